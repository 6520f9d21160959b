// ArmedPlans: requests that wait for a signal to reach a value.
//
// Every method runs on the transfer thread. A signal is read once a turn, however many requests wait for it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "engine/request.h"
#include "engine/transfer.h"
#include "lane/control_queue.h"
#include "lane/layer_signal.h"

namespace kvc {

// The requests of one arm() call.
struct ArmedPlan {
  struct Item {
    uint64_t signal_value = 0;
    RequestRef request;
  };
  std::shared_ptr<Transfer> transfer;
  ControlOwned<LayerSignal> signal;
  std::vector<Item> items;  // by rising value
  size_t next = 0;          // the first item whose value has not been reached
};

class ArmedPlans {
 public:
  // Adds a plan with at least one item, of a transfer that has not ended.
  void add(ArmedPlan plan) {
    Stream& stream = plan.transfer->stream;
    ++stream.armed;
    auto watched = std::find_if(watched_.begin(), watched_.end(),
                                [&](const Watched& other) { return other.signal == plan.signal; });
    if (watched == watched_.end()) watched = watched_.insert(watched_.end(), {plan.signal, kNever, {}});
    watched->next_value = std::min(watched->next_value, plan.items.front().signal_value);
    watched->plans.push_back(std::move(plan));
  }

  // Calls `post(Stream&, uint64_t value, RequestRef)` for each request whose value has been reached. Returns true if
  // there was one.
  template <typename Post>
  bool release(Post&& post) {
    bool any = false;
    for (size_t i = 0; i < watched_.size();) {
      Watched& watched = watched_[i];
      const uint64_t value = watched.signal->load();
      if (value >= watched.next_value) {
        any = true;
        watched.next_value = kNever;
        std::erase_if(watched.plans, [&](ArmedPlan& plan) { return advance(plan, value, watched.next_value, post); });
      }
      if (!watched.plans.empty()) {
        ++i;
        continue;
      }
      if (i + 1 < watched_.size()) watched_[i] = std::move(watched_.back());
      watched_.pop_back();
    }
    return any;
  }

  // Drops all plans of this stream: none of their requests is released any more.
  void drop(Stream& stream) {
    if (stream.armed == 0) return;
    for (Watched& watched : watched_) {
      std::erase_if(watched.plans, [&](const ArmedPlan& plan) { return &plan.transfer->stream == &stream; });
    }
    stream.armed = 0;  // the next release() removes signals without plans
  }

  // True if a signal has reached a value since the last release(), or if a GPU may write one at any time. The transfer
  // thread must not sleep while this is true.
  bool may_be_due() const {
    return std::any_of(watched_.begin(), watched_.end(), [](const Watched& watched) {
      return !watched.plans.empty() && (watched.signal->polled() || watched.signal->load() >= watched.next_value);
    });
  }

 private:
  static constexpr uint64_t kNever = std::numeric_limits<uint64_t>::max();

  struct Watched {
    ControlOwned<LayerSignal> signal;
    uint64_t next_value;  // the lowest value that a plan waits for, or a lower one
    std::vector<ArmedPlan> plans;
  };

  // Posts the due items of a plan. Returns true if none is left.
  template <typename Post>
  static bool advance(ArmedPlan& plan, uint64_t value, uint64_t& next_value, Post&& post) {
    Stream& stream = plan.transfer->stream;
    while (plan.next < plan.items.size() && plan.items[plan.next].signal_value <= value) {
      ArmedPlan::Item& item = plan.items[plan.next++];
      post(stream, item.signal_value, std::move(item.request));
    }
    if (plan.next < plan.items.size()) {
      next_value = std::min(next_value, plan.items[plan.next].signal_value);
      return false;
    }
    --stream.armed;
    return true;
  }

  std::vector<Watched> watched_;
};

}  // namespace kvc
