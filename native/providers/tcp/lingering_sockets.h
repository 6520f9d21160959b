// LingeringSockets: connections that this side has ended and the peer has not. What we said last is lost where a socket is
// closed while the peer still sends: the kernel answers bytes that nobody reads with a reset, and a reset drops what it has
// not delivered yet. So they are heard out here, for a while, by a thread whose time nobody waits for.
#pragma once

#include <list>
#include <memory>

#include "base/error.h"
#include "base/timer_fd.h"
#include "base/unique_fd.h"
#include "providers/tcp/socket.h"
#include "providers/tcp/tuning.h"

namespace kvc::tcp {

// The control thread. Nothing here blocks, and nothing that comes is kept.
class LingeringSockets {
 public:
  static Result<std::shared_ptr<LingeringSockets>> create(const Tuning& tuning);
  LingeringSockets(const Tuning& tuning, Epoll epoll, TimerFd timer);
  LingeringSockets(const LingeringSockets&) = delete;
  LingeringSockets& operator=(const LingeringSockets&) = delete;
  // Empties the sockets and leaves them to the kernel, which goes on delivering what we said.
  ~LingeringSockets();

  // A socket whose sending direction is shut. One too many ends the oldest.
  void add(UniqueFd socket);
  size_t size() const noexcept { return sockets_.size(); }

  // Readable when serve() has something to do.
  int fd() const noexcept { return epoll_.fd(); }
  // Bounded. Lets go of those whose peers have ended their side, and of those whose time is over.
  void serve();

 private:
  struct Lingering : Watched {
    Lingering(UniqueFd left, TimerFd::Clock::time_point end)
        : Watched(Kind::kLingering), socket(std::move(left)), until(end) {}
    UniqueFd socket;
    TimerFd::Clock::time_point until;
  };

  void end_oldest();
  void arm_timer();

  const Tuning tuning_;
  Epoll epoll_;
  TimerFd timer_;
  Watched timer_watched_{Watched::Kind::kTimer};
  std::list<Lingering> sockets_;  // oldest first
};

}  // namespace kvc::tcp
