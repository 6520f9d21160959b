// Listener: the TCP port at which libfabric's tcp provider accepts an endpoint's connections, accessed through the
// kernel. libfabric has no call that ends the connections that it accepted there.
#pragma once

#include <cstddef>
#include <span>
#include <utility>

#include "providers/libfabric/wire.h"

namespace kvc::libfabric {

class Listener {
 public:
  // `address` is the endpoint's own address, a sockaddr of one interface (peers have to reach it).
  explicit Listener(Bytes address) : address_(std::move(address)) {}

  // Stops the listening socket: no connection is accepted any more.
  void stop() const;
  // Closes all accepted connections that have received nothing so far. Returns the number of this process's
  // descriptors.
  size_t hang_up_on_the_silent() const;

 private:
  // Calls visit(fd) for every socket of this process with this address, which includes accepted ones. Returns the
  // number of descriptors.
  template <typename Visit>
  size_t for_each_socket(Visit&& visit) const;
  bool is_ours(int fd) const;

  const Bytes address_;
};

}  // namespace kvc::libfabric
