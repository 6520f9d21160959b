// LingeringSockets: connections that this side has ended and the peer has not. If a socket is closed while the peer
// still sends, the kernel answers the unread bytes with a reset. The reset drops our last words if they are not
// delivered yet. So these sockets are read for a while longer, on the control thread, where no transfer waits.
#pragma once

#include <list>
#include <memory>

#include "base/error.h"
#include "base/timer_fd.h"
#include "base/unique_fd.h"
#include "providers/tcp/socket.h"
#include "providers/tcp/tuning.h"

namespace kvc::tcp {

// Used on the control thread only. Nothing here blocks. Received bytes are dropped.
class LingeringSockets {
 public:
  static Result<std::shared_ptr<LingeringSockets>> create(const Tuning& tuning);
  LingeringSockets(const Tuning& tuning, Epoll epoll, TimerFd timer);
  LingeringSockets(const LingeringSockets&) = delete;
  LingeringSockets& operator=(const LingeringSockets&) = delete;
  // Empties the sockets and leaves them to the kernel, which goes on delivering our last words.
  ~LingeringSockets();

  // Takes a socket whose sending direction is shut. If there are too many, the oldest one ends.
  void add(UniqueFd socket);
  size_t size() const noexcept { return sockets_.size(); }

  // A descriptor that is readable when serve() has work.
  int fd() const noexcept { return epoll_.fd(); }
  // Reads a bounded number of bytes. Closes the sockets whose peers have ended their side and those whose deadline has
  // passed.
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
