// Link: one end of a connection between two sim domains.
#pragma once

#include <array>
#include <cstdint>
#include <memory>

#include "lane/work_slots.h"
#include "providers/sim/fabric.h"

namespace kvc::sim {

// The most batches on one link without a completion: few, so that tests reach kBusy.
inline constexpr uint32_t kMaxPosted = 32;

struct Link : LinkEnd {
  Link(std::shared_ptr<Gate> both_ends, int our_side) : gate(std::move(both_ends)), side(our_side) {}
  // Closes the gate, on every path that destroys a link.
  ~Link() override { Fabric::close(*gate, side); }

  const std::shared_ptr<Gate> gate;
  const int side;  // our side of the gate
  WorkSlots<kMaxPosted> posted;
  SentMessages messages;
  // by slot; a batch is used again once only this array holds it
  std::array<std::shared_ptr<Batch>, kMaxPosted> batches;

  size_t other() const { return static_cast<size_t>(1 - side); }
};

}  // namespace kvc::sim
