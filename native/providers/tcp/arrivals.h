// Arrivals: the queue by which the connector passes the connections of one offered link to the domain. The connector
// admits only connections that have proved themselves. The queue lives as long as the link needs it.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "base/error.h"
#include "base/unique_fd.h"

namespace kvc::tcp {

// Used by two threads: the connector's puts, the domain's takes. Nothing here blocks.
class Arrivals {
 public:
  struct Arrival {
    uint16_t index = 0;  // index of the connection within its link
    UniqueFd socket;
  };

  static Result<std::shared_ptr<Arrivals>> create();
  explicit Arrivals(UniqueFd bell) : bell_(std::move(bell)) {}
  // Ends the connections that the domain has not taken.
  ~Arrivals();

  // A descriptor that is readable while a connection waits; valid as long as this object.
  int fd() const noexcept { return bell_.get(); }

  // For the connector's thread.
  void put(uint16_t index, UniqueFd socket);
  // For the domain's thread.
  std::vector<Arrival> take();

 private:
  const UniqueFd bell_;
  std::mutex mutex_;  // guards the members below
  std::vector<Arrival> waiting_;
};

}  // namespace kvc::tcp
