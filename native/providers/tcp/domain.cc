#include "providers/tcp/domain.h"

#include <algorithm>
#include <array>
#include <optional>
#include <utility>

namespace kvc::tcp {

Result<std::unique_ptr<TcpDomain>> TcpDomain::open(const std::string& address, ControlQueue& control,
                                                   std::shared_ptr<LingeringSockets> lingering, const Tuning& tuning) {
  Result<Epoll> epoll = Epoll::create();
  if (!epoll) return epoll.error();
  Result<TimerFd> timer = TimerFd::create("tcp");
  if (!timer) return timer.error();
  std::unique_ptr<TcpDomain> domain(new TcpDomain(address, control, std::move(lingering), tuning,
                                                  std::move(epoll.value()), std::move(timer.value())));
  Status added = domain->context_.epoll.add(domain->timer_.fd(), EPOLLIN, domain->timer_watched_);
  if (!added) return added.error();
  return domain;
}

TcpDomain::TcpDomain(const std::string& address, ControlQueue& control, std::shared_ptr<LingeringSockets> lingering,
                     const Tuning& tuning, Epoll epoll, TimerFd timer)
    : address_(address),
      context_(completions_, control, std::move(lingering), tuning, std::move(epoll)),
      timer_(std::move(timer)) {}

// --- Links.

Link* TcpDomain::find(LinkId id) noexcept {
  const auto found = links_.find(id);
  return found == links_.end() ? nullptr : found->second.get();
}

void TcpDomain::attach(LinkId id, std::unique_ptr<LinkEnd> end) {
  auto& made = static_cast<TcpLinkEnd&>(*end);
  Link& link = *links_.emplace(id, std::make_unique<Link>(context_, id, made.connections)).first->second;
  link.deadline = Clock::now() + context_.tuning.connect_timeout;
  if (Status begun = link.begin(made); !begun) fail(link, begun.error());
  arm_timer();
}

bool TcpDomain::fence(LinkId id) {
  auto node = links_.extract(id);
  if (!node.empty()) node.mapped()->end(tcp_error(ErrorCode::kPeerDown, "fence", "the link was fenced on this side"));
  return true;
}

void TcpDomain::fail(Link& link, const Error& error) {
  if (!link.failure) {
    link.failure = error;
    link.part();
    link.deadline = Clock::now() + context_.tuning.closing_timeout;
    arm_timer();
  }
  if (link.ended()) report(link);
}

void TcpDomain::report(Link& link) {
  if (!std::exchange(link.deadline, std::nullopt)) return;  // reported already
  completions_.link_down(link.id(), *link.failure);
}

// --- Deadlines.

void TcpDomain::arm_timer() {
  std::optional<Clock::time_point> earliest;
  for (const auto& [id, link] : links_) {
    if (link->deadline && (!earliest || *link->deadline < *earliest)) earliest = link->deadline;
  }
  timer_.arm(earliest);
}

void TcpDomain::expire() {
  const Clock::time_point now = Clock::now();
  for (const auto& [id, link] : links_) {
    if (!link->deadline || *link->deadline > now) continue;
    if (link->failure) {
      report(*link);
    } else if (link->up()) {
      link->deadline.reset();
    } else {
      fail(*link, tcp_error(ErrorCode::kPeerDown, "connect",
                            "not connected after " + std::to_string(context_.tuning.connect_timeout.count()) +
                                " ms: is the peer's address reachable from " + address_ + "?"));
    }
  }
  arm_timer();
}

// --- Data path.

Posted TcpDomain::post(LinkId id, const WriteBatch& batch) {
  if (Link* const link = find(id); link != nullptr) return link->post(batch);
  return refuse(batch.work, tcp_error(ErrorCode::kPeerDown, "write", "the link was fenced"));
}

Posted TcpDomain::send(LinkId id, WorkId work, std::span<const std::byte> message) {
  if (Link* const link = find(id); link != nullptr) return link->send(work, message);
  return refuse(work, tcp_error(ErrorCode::kPeerDown, "send", "the link was fenced"));
}

void TcpDomain::take(LinkId id, uint32_t slot) {
  if (Link* const link = find(id); link != nullptr) link->take(slot);
}

bool TcpDomain::poll() {
  bool progress = false;
  // Posted frames leave before any event is handled.
  for (int i = 0; i < context_.tuning.turns && !context_.sendable.empty(); ++i) {
    Connection& connection = *context_.sendable.front();
    context_.sendable.pop_front();
    progress = true;
    if (Status sent = connection.send_turn(); !sent) fail(connection.link(), sent.error());
  }
  // A poll() handles few events. epoll rotates its list of ready descriptors, so the others come first in the next
  // poll().
  std::array<epoll_event, 16> room;
  const auto turns = std::min<size_t>(room.size(), static_cast<size_t>(context_.tuning.turns));
  for (const epoll_event& event : context_.epoll.ready(std::span(room).first(turns))) {
    progress = true;
    auto* const watched = static_cast<Watched*>(event.data.ptr);
    if (watched->kind == Watched::Kind::kTimer) {
      expire();
    } else if (watched->kind == Watched::Kind::kArrivals) {
      auto& link = static_cast<Link&>(*watched);
      if (Status admitted = link.admit(); !admitted) fail(link, admitted.error());
    } else {
      auto& connection = static_cast<Connection&>(*watched);
      if (Status handled = connection.on_events(event.events); !handled) fail(connection.link(), handled.error());
    }
  }
  return progress;
}

}  // namespace kvc::tcp
