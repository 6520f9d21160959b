// Command: what other threads ask the worker to do. A closed set.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <variant>

#include "engine/request.h"
#include "engine/transfer.h"
#include "engine/transfer_scheduler.h"

namespace kvc {

struct AddWrites {
  // `request`: what makes the Request, in place.
  template <typename... Args>
  AddWrites(std::shared_ptr<Transfer> to, bool seal_it, Args&&... of_request)
      : transfer(std::move(to)), request(std::forward<Args>(of_request)...), seal(seal_it) {}

  std::shared_ptr<Transfer> transfer;
  Request request;
  bool seal;
};

struct Arm {
  ArmedPlan plan;
};

struct Seal {
  std::shared_ptr<Transfer> transfer;
};

// A counter set that was complete when its targets were set: the worker calls its callback.
struct Fire {
  CounterSets::Fired set;
};

// Anything rare: control operations whose caller waits.
struct Call {
  std::function<void()> run;
};

struct Command {
  std::variant<std::monostate, AddWrites, Arm, Seal, Fire, Call> body;
  Command* next = nullptr;  // of the list that it is in
};

}  // namespace kvc
