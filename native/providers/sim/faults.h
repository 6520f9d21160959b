// Faults: what a test does to the NICs of a sim fabric. A NIC is named by DomainConfig::device. A domain without a
// device name has its own NIC, which Faults cannot reach.
//
// Any thread may make any call. A cut is as hard as a pulled cable: pages in flight are lost, and so are the
// completions of pages that have landed.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "providers/sim/fabric.h"

namespace kvc::sim {

class Faults {
 public:
  // Keeps the fabric of this name alive. It may be called before a domain opens in the fabric.
  explicit Faults(const std::string& fabric) : fabric_(Fabric::get(fabric)) {}

  // Takes the NIC down: all its links break on both sides, and it joins no new link.
  void cut(const std::string& device) { fabric_->cut(*fabric_->nic(device)); }
  // Takes the NIC down once `pages` more pages (of either direction) have landed over it.
  void cut_after(const std::string& device, int64_t pages) { fabric_->nic(device)->pages_to_cut.store(pages); }
  void restore(const std::string& device) { fabric_->nic(device)->up.store(true); }
  // Sets the speed that domains report if they open on the NIC later. It does not slow them down.
  void set_speed(const std::string& device, uint64_t bits_per_second) {
    fabric_->nic(device)->bits_per_second.store(bits_per_second);
  }

 private:
  const std::shared_ptr<Fabric> fabric_;
};

}  // namespace kvc::sim
