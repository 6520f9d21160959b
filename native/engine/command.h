// Command: what other threads ask the worker to do. A closed set.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <variant>

#include "engine/request.h"
#include "engine/transfer.h"
#include "engine/transfer_scheduler.h"

namespace kvc {

struct AddWrites {
  std::shared_ptr<Transfer> transfer;
  Request request;
  bool seal = false;
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
  using Body = std::variant<AddWrites, Arm, Seal, Fire, Call>;
  explicit Command(Body command) : body(std::move(command)) {}

  Body body;
  Command* next = nullptr;  // SubmissionQueue's
};

}  // namespace kvc
