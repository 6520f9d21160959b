// Link: one end of a connection between two sim domains.
#pragma once

#include <array>
#include <cstdint>
#include <memory>

#include "lane/work_slots.h"
#include "providers/sim/fabric.h"

namespace kvc::sim {

// Batches on one link without a completion. Few, so that tests meet kBusy.
inline constexpr uint32_t kMaxPosted = 32;

struct Link : LinkEnd {
  Link(std::shared_ptr<Gate> both_ends, int our_side) : gate(std::move(both_ends)), side(our_side) {}
  // Whoever lets go of it: the gate is closed.
  ~Link() override { Fabric::close(*gate, side); }

  const std::shared_ptr<Gate> gate;
  const int side;  // ours of the gate
  WorkSlots<kMaxPosted> posted;
  SentMessages messages;
  std::array<std::shared_ptr<Batch>, kMaxPosted> batches;  // by slot; in use again once only this holds them

  size_t other() const { return static_cast<size_t>(1 - side); }
};

}  // namespace kvc::sim
