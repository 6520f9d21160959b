// The tcp provider's system calls: non-blocking sockets with our options, and the epoll instance.
#pragma once

#include <sys/epoll.h>

#include <cstdint>
#include <span>
#include <string>

#include "base/error.h"
#include "base/unique_fd.h"
#include "providers/tcp/tuning.h"

namespace kvc::tcp {

// listen_on() and dial() return at once. `address` is numeric (IPv4 or IPv6): no name is looked up.
// Listens on `address`, on a port that the kernel chooses.
Result<UniqueFd> listen_on(const std::string& address, const Tuning& tuning);
// Starts to connect from `local` to `address`:`port`. The socket becomes writable when the attempt has ended.
Result<UniqueFd> dial(const std::string& local, const std::string& address, uint16_t port, const Tuning& tuning);

// Formats an address and a port: "10.0.0.3:41233", "[fd00::3]:41233".
std::string endpoint(const std::string& address, uint16_t port);
// Returns the speed of the interface with this address in bits a second, as its driver reports it; 0 if unknown.
uint64_t interface_speed(const std::string& address);
// Returns the port of a listening socket.
Result<uint16_t> local_port(const UniqueFd& socket);
// Takes SO_ERROR: returns 0, or the errno of the attempt that ended in the background.
int take_error(const UniqueFd& socket);
// Whether received bytes wait in the socket.
bool more_waits(const UniqueFd& socket);
// Ends the connection now, even if a forked child holds the same descriptor. Bytes that the peer's kernel has not
// received yet are dropped.
void hang_up(UniqueFd& socket);

// The object behind an epoll event. It must outlive its registration and the events already fetched.
struct Watched {
  enum class Kind : uint8_t { kListener, kTimer, kStranger, kLingering, kArrivals, kConnection };
  explicit Watched(Kind watched_kind) : kind(watched_kind) {}
  const Kind kind;
};

// A level-triggered epoll instance.
class Epoll {
 public:
  static Result<Epoll> create();
  int fd() const noexcept { return fd_.get(); }
  Status add(int target, uint32_t events, Watched& watched);
  Status modify(int target, uint32_t events, Watched& watched);
  // Call this before a watched descriptor is closed: if a forked child holds it too, close() alone leaves it watched.
  void remove(int target) noexcept;
  // Returns the ready events, without waiting.
  std::span<epoll_event> ready(std::span<epoll_event> room) const noexcept;

 private:
  explicit Epoll(UniqueFd fd) : fd_(std::move(fd)) {}
  Status control(int operation, int target, uint32_t events, Watched& watched);
  UniqueFd fd_;
};

}  // namespace kvc::tcp
