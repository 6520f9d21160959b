// LinkEvents: the descriptor on which a domain's thread sleeps. It watches the sockets of the links and the peers'
// processes.
#pragma once

#include <sys/epoll.h>

#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdint>

#include "base/unique_fd.h"
#include "lane/domain.h"
#include "providers/same_host/connection.h"
#include "providers/same_host/lane.h"
#include "providers/same_host/system.h"

namespace kvc::same_host {

// Used on the domain's thread only; nothing here blocks. It watches a connection until remove() or its own end.
class LinkEvents {
 public:
  // Call it once, before anything else.
  Status open(const Lane& lane) {
    epoll_ = UniqueFd(epoll_create1(EPOLL_CLOEXEC));
    return epoll_ ? Status{} : lane.named(kernel_error("open", "epoll_create1", errno));
  }
  int fd() const noexcept { return epoll_.get(); }

  Status add(const Lane& lane, LinkId link, const Connection& connection) {
    const bool added =
        control(EPOLL_CTL_ADD, connection.socket(), EPOLLIN, link) &&
        (!connection.process() || control(EPOLL_CTL_ADD, connection.process(), EPOLLIN, link | kProcess));
    return added ? Status{} : lane.named(kernel_error("attach", "epoll_ctl", errno));
  }
  // Sets whether a writable socket is an event as well.
  void watch_room(LinkId link, const Connection& connection, bool room) {
    control(EPOLL_CTL_MOD, connection.socket(), room ? EPOLLIN | EPOLLOUT : EPOLLIN, link);
  }
  // Removes a connection explicitly. Closing its descriptors is not enough: a forked child may keep them open, and thus
  // keep them watched here.
  void remove(const Connection& connection) {
    control(EPOLL_CTL_DEL, connection.socket(), 0, 0);
    if (connection.process()) control(EPOLL_CTL_DEL, connection.process(), 0, 0);
  }

  // Calls `use(LinkId, bool process)` for a bounded number of events, each of the peer's process or of the socket.
  // Returns true if there was one.
  template <typename Use>
  bool look(Use&& use) {
    std::array<epoll_event, 16> events;
    const int ready = epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), 0);
    for (int i = 0; i < ready; ++i) {
      const uint64_t data = events[static_cast<size_t>(i)].data.u64;
      use(static_cast<LinkId>(data), (data & kProcess) != 0);
    }
    return ready > 0;
  }

 private:
  static constexpr uint64_t kProcess = uint64_t{1} << 32;  // above all bits of a LinkId

  bool control(int operation, const UniqueFd& fd, uint32_t events, uint64_t data) {
    epoll_event event{};
    event.events = events;
    event.data.u64 = data;
    return epoll_ctl(epoll_.get(), operation, fd.get(), &event) == 0;
  }

  UniqueFd epoll_;
};

}  // namespace kvc::same_host
