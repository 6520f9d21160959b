// Arrivals: the connections of one offered link that have proved themselves, on their way from the connector, which admits
// them, to the domain. It lives as long as the link has use for them.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "base/error.h"
#include "base/unique_fd.h"

namespace kvc::tcp {

// Two threads: one puts, one takes. Nothing here blocks.
class Arrivals {
 public:
  struct Arrival {
    uint16_t index = 0;  // which of the link's connections it is
    UniqueFd socket;
  };

  static Result<std::shared_ptr<Arrivals>> create();
  explicit Arrivals(UniqueFd bell) : bell_(std::move(bell)) {}
  // Ends what nobody has taken.
  ~Arrivals();

  // Readable while something waits; valid as long as this object.
  int fd() const noexcept { return bell_.get(); }

  // The connector.
  void put(uint16_t index, UniqueFd socket);
  // The domain.
  std::vector<Arrival> take();

 private:
  const UniqueFd bell_;
  std::mutex mutex_;  // guards what follows
  std::vector<Arrival> waiting_;
};

}  // namespace kvc::tcp
