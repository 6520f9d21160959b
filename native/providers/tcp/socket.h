// The system calls of the tcp provider: non-blocking sockets with our options, and the epoll instance.
#pragma once

#include <sys/epoll.h>

#include <cstdint>
#include <span>
#include <string>

#include "base/error.h"
#include "base/unique_fd.h"
#include "providers/tcp/tuning.h"

namespace kvc::tcp {

// Both return at once; `address` is numeric (IPv4 or IPv6), no name is looked up.
// Listens on `address` and a port of the kernel's choice.
Result<UniqueFd> listen_on(const std::string& address, const Tuning& tuning);
// Starts to connect from `local` to `address`:`port`; the socket becomes writable when that ended.
Result<UniqueFd> dial(const std::string& local, const std::string& address, uint16_t port, const Tuning& tuning);

// "10.0.0.3:41233", "[fd00::3]:41233".
std::string endpoint(const std::string& address, uint16_t port);
// What the interface with this address can carry, in bits a second, as its driver says; 0 where it says nothing.
uint64_t interface_speed(const std::string& address);
// The port that a listening socket got.
Result<uint16_t> local_port(const UniqueFd& socket);
// Takes SO_ERROR: 0, or the errno of what happened in the background.
int take_error(const UniqueFd& socket);
// Received bytes lie in the socket and wait to be read.
bool more_waits(const UniqueFd& socket);
// Ends the connection now, also where a forked child holds the same descriptor: what the peer's kernel has not received
// yet is dropped.
void hang_up(UniqueFd& socket);

// What an epoll event leads to. The object must outlive its registration and the events already fetched.
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
  // Before a watched descriptor is closed: close() alone leaves it watched where a forked child holds it too.
  void remove(int target) noexcept;
  // Ready events, without waiting.
  std::span<epoll_event> ready(std::span<epoll_event> room) const noexcept;

 private:
  explicit Epoll(UniqueFd fd) : fd_(std::move(fd)) {}
  Status control(int operation, int target, uint32_t events, Watched& watched);
  UniqueFd fd_;
};

}  // namespace kvc::tcp
