// ArmedPlans: requests that wait for a signal's value.
//
// Every method runs on the worker thread. A signal is read once a turn, whatever waits for it.
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
  size_t next = 0;          // the first one whose value has not come
};

class ArmedPlans {
 public:
  // Of a transfer that goes on, and with at least one item.
  void add(ArmedPlan plan) {
    Stream& stream = plan.transfer->stream;
    ++stream.armed;
    auto watched = std::find_if(watched_.begin(), watched_.end(),
                                [&](const Watched& other) { return other.signal == plan.signal; });
    if (watched == watched_.end()) watched = watched_.insert(watched_.end(), {plan.signal, kNever, {}});
    watched->next_value = std::min(watched->next_value, plan.items.front().signal_value);
    watched->plans.push_back(std::move(plan));
  }

  // Calls `post(Stream&, uint64_t value, RequestRef)` for each request whose value has come; true if there was one.
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

  // Nothing of this stream is released any more.
  void drop(Stream& stream) {
    if (stream.armed == 0) return;
    for (Watched& watched : watched_) {
      std::erase_if(watched.plans, [&](const ArmedPlan& plan) { return &plan.transfer->stream == &stream; });
    }
    stream.armed = 0;  // what is left without plans goes at the next release()
  }

  // A signal has passed since the last release(), or a GPU may write one at any time: the worker must not sleep.
  bool may_be_due() const {
    return std::any_of(watched_.begin(), watched_.end(), [](const Watched& watched) {
      return !watched.plans.empty() && (watched.signal->polled() || watched.signal->load() >= watched.next_value);
    });
  }

 private:
  static constexpr uint64_t kNever = std::numeric_limits<uint64_t>::max();

  struct Watched {
    ControlOwned<LayerSignal> signal;
    uint64_t next_value;  // the least that a plan waits for, or less
    std::vector<ArmedPlan> plans;
  };

  // True: the plan is through.
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
