// Link: one end of a connection between two sim domains.
#pragma once

#include <cstdint>
#include <memory>
#include <set>

#include "providers/sim/fabric.h"

namespace kvc::sim {

struct Link {
  std::shared_ptr<Gate> gate;
  int side = 0;             // ours of the gate
  bool answered = false;    // may post
  uint64_t secret = 0;      // what an offer waits under in the fabric
  std::set<WorkId> posted;  // batches and messages without a completion yet
  size_t messages = 0;      // messages among them

  int other() const { return 1 - side; }
};

}  // namespace kvc::sim
