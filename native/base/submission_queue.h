// SubmissionQueue: many threads push, one thread takes all items in the order of the pushes.
//
// An intrusive list behind one atomic head. A push is one compare-and-swap loop without lock, allocation or size limit.
// The consumer swaps out the whole list and reverses it. Single nodes are never popped, so no ABA problem exists. A
// pushed node is visible at once, on which the sleep protocol relies.
#pragma once

#include <atomic>
#include <memory>

namespace kvc {

// Node must have a member `Node* next`.
template <typename Node>
class SubmissionQueue {
 public:
  SubmissionQueue() = default;
  SubmissionQueue(const SubmissionQueue&) = delete;
  SubmissionQueue& operator=(const SubmissionQueue&) = delete;
  ~SubmissionQueue() {
    drain([](std::unique_ptr<Node>) {});
  }

  // Any thread. Sequentially consistent: if a thread pushes and then reads the transfer thread's sleeping flag, one of
  // the two holds. Either the transfer thread's last call of empty() sees the push, or the pushing thread sees the
  // flag.
  void push(std::unique_ptr<Node> node) noexcept {
    Node* raw = node.release();
    raw->next = head_.load(std::memory_order_relaxed);
    while (!head_.compare_exchange_weak(raw->next, raw, std::memory_order_seq_cst, std::memory_order_relaxed)) {
    }
  }

  bool empty() const noexcept { return head_.load(std::memory_order_seq_cst) == nullptr; }

  // The consumer thread only. Calls `take(std::unique_ptr<Node>)` for each node, oldest first. Returns false if the
  // queue was empty.
  template <typename Take>
  bool drain(Take&& take) {
    if (head_.load(std::memory_order_relaxed) == nullptr) return false;  // the common case writes nothing
    Node* newest = head_.exchange(nullptr, std::memory_order_acquire);
    Node* oldest = nullptr;
    while (newest != nullptr) {
      Node* next = newest->next;
      newest->next = oldest;
      oldest = newest;
      newest = next;
    }
    while (oldest != nullptr) {
      std::unique_ptr<Node> node(oldest);
      oldest = oldest->next;
      take(std::move(node));
    }
    return true;
  }

 private:
  std::atomic<Node*> head_{nullptr};
};

}  // namespace kvc
