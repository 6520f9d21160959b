// A plain blocking TCP connection over loopback: the yardstick of the tcp provider.
//
// One connection, one request at a time. The request names the places of the pages. The target receives the pages
// straight into place and answers one byte. Nothing is authenticated, and slots are checked only against the pool's
// size.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <thread>
#include <vector>

#include "base/unique_fd.h"
#include "bench/page_lists.h"

namespace kvc::bench {

// Listens on 127.0.0.1 and serves one initiator, on its own thread, until it disconnects or this object is destroyed.
class SocketTarget {
 public:
  // Serves [pool, pool + pool_bytes), which the caller owns. Throws std::system_error.
  SocketTarget(std::byte* pool, uint64_t pool_bytes);
  ~SocketTarget();
  SocketTarget(const SocketTarget&) = delete;
  SocketTarget& operator=(const SocketTarget&) = delete;

  uint16_t port() const noexcept { return port_; }

 private:
  void serve();
  void serve_connection(int fd);

  std::byte* pool_;
  uint64_t pool_bytes_;
  UniqueFd listener_;
  UniqueFd stop_;  // an eventfd, readable once this object is being destroyed
  uint16_t port_ = 0;
  std::thread thread_;
};

// One thread at a time may call its methods. Each blocks until the target has answered. They throw std::system_error.
class SocketInitiator {
 public:
  SocketInitiator(std::byte* pool, uint16_t port);

  // Writes the pages `source` of our pool to `target_slots` of the target's pool.
  void write_pages(std::span<const int64_t> target_slots, const PageList& source);

  // Writes `bytes` bytes to the target, which writes as many back, `iterations` times, each after a sleep of
  // `pause_us`. Returns half of each round trip, in microseconds.
  std::vector<double> ping_pong(uint64_t bytes, uint32_t iterations, uint32_t pause_us);

 private:
  std::byte* pool_;
  UniqueFd connection_;
};

}  // namespace kvc::bench
