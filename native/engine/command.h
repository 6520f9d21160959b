// Command: a request of another thread to the transfer thread. The set of commands is closed.
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

// A single write, the most frequent command. It refers to registry objects without counting references, because each
// count would move between two cores. Submitted under the mutex of the registries.
struct AddWrite {
  Transfer* transfer;
  LocalRegion* source;
  const RemoteRegion* target;
  uint64_t bytes;
  std::optional<uint32_t> immediate;
  SingleWrite write;
};
// A single write that is the only write of its transfer. It adds no member, because that would take one more cache
// line.
struct WriteOne : AddWrite {};

struct AddRequest {
  std::shared_ptr<Transfer> transfer;
  RequestRef request;
  bool seal;
};

struct Arm {
  std::unique_ptr<ArmedPlan> plan;
};

struct Seal {
  std::shared_ptr<Transfer> transfer;
};

// One submission of a prepared scatter. The run keeps its scatter alive.
struct StartScatter {
  ScatterRun* run;
};

// A counter set that had reached its targets when they were set. The transfer thread calls its callback.
struct Fire {
  std::unique_ptr<CounterSets::Fired> set;
};

// A rare command: a control operation whose caller waits. The function is allocated apart, because its size and
// alignment would be those of all commands: libc++ 48 and 16 bytes, libstdc++ 32 and 8.
struct Call {
  explicit Call(std::function<void()> function) : run(std::make_unique<std::function<void()>>(std::move(function))) {}
  std::unique_ptr<std::function<void()>> run;
};

// Kept small, because its cache lines move between cores.
struct Command {
  Command* next = nullptr;  // in the list that holds it
  std::variant<std::monostate, AddWrite, WriteOne, AddRequest, Arm, Seal, StartScatter, Fire, Call> body;
};
static_assert(sizeof(Command) <= 80);

}  // namespace kvc
