// Listener: the TCP port at which libfabric's tcp takes an endpoint's connections, as the kernel has it. libfabric has no
// call that ends what it accepted there.
#pragma once

#include <cstddef>
#include <span>
#include <utility>

#include "providers/libfabric/wire.h"

namespace kvc::libfabric {

class Listener {
 public:
  // The endpoint's own address, a sockaddr of one interface (peers have to reach it).
  explicit Listener(Bytes address) : address_(std::move(address)) {}

  // Nobody is accepted any more.
  void stop() const;
  // Hangs up on all who were accepted and have said nothing so far. Returns how many descriptors this process has.
  size_t hang_up_on_the_silent() const;

 private:
  // Calls visit(fd) with every socket of this process that has this address: those that were accepted here too. Returns
  // how many descriptors there are.
  template <typename Visit>
  size_t for_each_socket(Visit&& visit) const;
  bool is_ours(int fd) const;

  const Bytes address_;
};

}  // namespace kvc::libfabric
