// Faults: what a test does to the NICs of a sim fabric. A NIC is named by DomainConfig::device; a domain that names
// none has one to itself, which cannot be reached from here.
//
// Any thread may call anything. A cut is as hard as a pulled cable: pages under way are lost, and so are the
// completions of pages that have landed.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "providers/sim/fabric.h"

namespace kvc::sim {

class Faults {
 public:
  // Keeps the fabric of this name, also before a domain opens in it.
  explicit Faults(const std::string& fabric) : fabric_(Fabric::get(fabric)) {}

  // The NIC goes down: all its links break, on both sides, and it takes part in no new one.
  void cut(const std::string& device) { fabric_->cut(*fabric_->nic(device)); }
  // The same once `pages` more pages (of either direction) have landed over it.
  void cut_after(const std::string& device, int64_t pages) { fabric_->nic(device)->pages_to_cut.store(pages); }
  void restore(const std::string& device) { fabric_->nic(device)->up.store(true); }
  // What the domains that open on it from now on say of their speed. It does not slow them down.
  void set_speed(const std::string& device, uint64_t bits_per_second) {
    fabric_->nic(device)->bits_per_second.store(bits_per_second);
  }

 private:
  const std::shared_ptr<Fabric> fabric_;
};

}  // namespace kvc::sim
