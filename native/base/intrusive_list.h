// IntrusiveList: a list whose links lie in its elements, so that insertion and removal never allocate.
#pragma once

#include <cassert>

namespace kvc {

// The links of an element. An element has one hook for each list that it may be in.
template <typename T>
struct ListHook {
  T* next = nullptr;
  T* previous = nullptr;
};

// One thread. The list owns no element. An element is in at most one list per hook, and its owner tracks whether it is
// in one.
template <typename T, ListHook<T> T::* kHook>
class IntrusiveList {
 public:
  bool empty() const noexcept { return first_ == nullptr; }
  T* front() const noexcept { return first_; }
  // The element after `element`; null if `element` is the last.
  static T* after(const T& element) noexcept { return (element.*kHook).next; }

  void push_back(T& element) noexcept { insert(element, last_, nullptr); }
  void push_front(T& element) noexcept { insert(element, nullptr, first_); }
  void erase(T& element) noexcept {
    ListHook<T>& hook = element.*kHook;
    (hook.previous != nullptr ? (hook.previous->*kHook).next : first_) = hook.next;
    (hook.next != nullptr ? (hook.next->*kHook).previous : last_) = hook.previous;
    hook = {};
  }
  T* pop_front() noexcept {
    T* const element = first_;
    assert(element != nullptr);
    erase(*element);
    return element;
  }
  // Moves all elements of `other` to the end of this list.
  void append(IntrusiveList& other) noexcept {
    if (other.empty()) return;
    (last_ != nullptr ? (last_->*kHook).next : first_) = other.first_;
    (other.first_->*kHook).previous = last_;
    last_ = other.last_;
    other.first_ = other.last_ = nullptr;
  }

 private:
  void insert(T& element, T* before, T* behind) noexcept {
    element.*kHook = {behind, before};
    (before != nullptr ? (before->*kHook).next : first_) = &element;
    (behind != nullptr ? (behind->*kHook).previous : last_) = &element;
  }

  T* first_ = nullptr;
  T* last_ = nullptr;
};

}  // namespace kvc
