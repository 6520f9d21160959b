// SubmissionQueue: many threads push, one thread takes everything, in the order of the pushes.
//
// An intrusive list behind one atomic head: push is one compare-and-swap loop, no lock, no allocation of its own, no
// limit to run into; the taker swaps the whole list out and turns it round. There is no pop of single nodes, hence
// no ABA problem, and no moment at which a pushed node is invisible (which the sleep protocol relies on).
#pragma once

#include <atomic>
#include <memory>

namespace kvc {

// Node: a type with a member `Node* next`.
template <typename Node>
class SubmissionQueue {
 public:
  SubmissionQueue() = default;
  SubmissionQueue(const SubmissionQueue&) = delete;
  SubmissionQueue& operator=(const SubmissionQueue&) = delete;
  ~SubmissionQueue() {
    drain([](std::unique_ptr<Node>) {});
  }

  // Any thread. Sequentially consistent: a push followed by a look at the worker's sleeping flag is seen either by
  // the worker's last look at empty(), or sees the flag.
  void push(std::unique_ptr<Node> node) noexcept {
    Node* raw = node.release();
    raw->next = head_.load(std::memory_order_relaxed);
    while (!head_.compare_exchange_weak(raw->next, raw, std::memory_order_seq_cst, std::memory_order_relaxed)) {
    }
  }

  bool empty() const noexcept { return head_.load(std::memory_order_seq_cst) == nullptr; }

  // The taking thread only: calls `take(std::unique_ptr<Node>)` for each node, oldest first; false if none was there.
  template <typename Take>
  bool drain(Take&& take) {
    if (head_.load(std::memory_order_relaxed) == nullptr) return false;  // the common case costs no write
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
