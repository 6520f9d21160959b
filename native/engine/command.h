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

// A single write, the command that there are most of: it refers to what was found in the registries and counts no
// reference, for each would move a count from one core to the other. Submitted under the registries' mutex.
struct AddWrite {
  Transfer* transfer;
  LocalRegion* source;
  const RemoteRegion* target;
  uint64_t bytes;
  std::optional<uint32_t> immediate;
  SingleWrite write;
};
// The same for a write that is all that its transfer has: no member more, for that would be one more cache line.
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

// One submission of a prepared scatter. It keeps itself.
struct StartScatter {
  ScatterRun* run;
};

// A counter set that was complete when its targets were set: the worker calls its callback.
struct Fire {
  std::unique_ptr<CounterSets::Fired> set;
};

// Anything rare: control operations whose caller waits. The function is not in the command: each C++ library has its own
// size and alignment for it (libc++ 48 and 16 bytes, libstdc++ 32 and 8), which would be those of all commands.
struct Call {
  explicit Call(std::function<void()> function) : run(std::make_unique<std::function<void()>>(std::move(function))) {}
  std::unique_ptr<std::function<void()>> run;
};

// Small, for its cache lines change sides with it.
struct Command {
  Command* next = nullptr;  // of the list that it is in
  std::variant<std::monostate, AddWrite, WriteOne, AddRequest, Arm, Seal, StartScatter, Fire, Call> body;
};
static_assert(sizeof(Command) <= 80);

}  // namespace kvc
