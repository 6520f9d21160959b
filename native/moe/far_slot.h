// FarSlot: the ranks of other nodes, as a launch of one slot on a CPU uses them. Their segments are not mapped here.
#pragma once

#include <cstdint>

#include "cuda/moe_launch.h"

namespace kvc::moe {

// One launch of the slot at a time, in the order of Group. No call waits for another rank.
class FarSlot {
 public:
  virtual ~FarSlot() = default;

  // One bit for each far rank.
  virtual uint32_t ranks() const noexcept = 0;
  // The first rank whose packets failed, as a bit: a far rank, or this rank if it cannot send; 0: none.
  virtual uint32_t lost() const noexcept = 0;
  // Whether send() may be called: the lanes no longer read the memory of an earlier packet.
  virtual bool can_send(const DispatchLaunch& launch) const noexcept = 0;
  virtual bool can_send(const CombineLaunch& launch) const noexcept = 0;

  // Sends this launch's packet to every far rank. The masks of a dispatch and its epoch are set.
  virtual void send(const DispatchLaunch& launch) = 0;
  virtual void send(const CombineLaunch& launch) = 0;
  // Takes the packets that have come, and sets the flags of their ranks in this rank's own segment. Rows of a dispatch
  // are then in their places.
  virtual void receive(const DispatchLaunch& launch) = 0;
  virtual void receive(const CombineLaunch& launch) = 0;
  // The results of a far rank for this rank's tokens, in the tokens' order, without tokens that the far rank did not
  // get. Valid from the arrival of the packet to the slot's next dispatch.
  virtual const unsigned char* results(uint32_t rank) const noexcept = 0;
};

}  // namespace kvc::moe
