#include "providers/tcp/domain.h"

#include <sys/socket.h>
#include <sys/timerfd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "cuda/gpu_memory.h"

namespace kvc::tcp {
namespace {

// Connections accepted in one poll(): each costs a few microseconds.
constexpr int kAcceptsPerPoll = 16;
// How long the listener rests when the process has no descriptor left: long enough not to spin, short beside
// connect_timeout.
constexpr std::chrono::milliseconds kListenerPause{200};

bool out_of_descriptors(int error_number) {
  return error_number == EMFILE || error_number == ENFILE || error_number == ENOBUFS || error_number == ENOMEM;
}

// Why no peer could carry out this batch; nullopt if one might. The ranges of the source are the group's to check.
std::optional<Error> impossible(const WriteBatch& batch) {
  if (batch.pages.empty() || batch.pages.size() > kMaxPages) {
    return tcp_error(ErrorCode::kInvalidArgument, "write", "a batch has 1 to 64 pages");
  }
  if (batch.page_bytes > kMaxPageBytes) {
    return tcp_error(ErrorCode::kInvalidArgument, "write", "a page has at most 1 TiB");
  }
  if (batch.counted && Immediate::decode(batch.immediate).multiplicity != batch.pages.size()) {
    return tcp_error(ErrorCode::kInvalidArgument, "write", "the immediate does not stand for the pages of its batch");
  }
  return std::nullopt;
}

}  // namespace

Result<std::unique_ptr<TcpDomain>> TcpDomain::open(const DomainConfig& config, DomainSink& sink, const Tuning& tuning) {
  if (config.connections == 0 || config.connections > kMaxConnections) {
    return tcp_error(ErrorCode::kInvalidArgument, "open",
                     std::to_string(config.connections) + " connections: give 1 to " + std::to_string(kMaxConnections));
  }
  Result<Epoll> epoll = Epoll::create();
  if (!epoll) return epoll.error();
  std::unique_ptr<TcpDomain> domain(new TcpDomain(config, sink, tuning, std::move(epoll.value())));
  if (Status started = domain->start(); !started) return started.error();
  return domain;
}

TcpDomain::TcpDomain(const DomainConfig& config, DomainSink& sink, const Tuning& tuning, Epoll epoll)
    : config_(config), shared_(sink, tuning, std::move(epoll)) {}

TcpDomain::~TcpDomain() = default;

Status TcpDomain::start() {
  Result<UniqueFd> listener = listen_on(config_.address, shared_.tuning);
  if (!listener) return listener.error();
  listener_ = std::move(listener.value());
  Result<uint16_t> port = local_port(listener_);
  if (!port) return port.error();
  port_ = port.value();
  bits_per_second_ = interface_speed(config_.address);
  timer_ = UniqueFd(::timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC));
  if (!timer_) return system_error("tcp", "timerfd_create", errno);
  if (Status added = shared_.epoll.add(listener_, EPOLLIN, listener_watched_); !added) return added;
  return shared_.epoll.add(timer_, EPOLLIN, timer_watched_);
}

std::string TcpDomain::description() const { return "tcp " + endpoint(config_.address, port_); }

// --- Memory.

Result<uint64_t> TcpDomain::register_region(std::byte* base, uint64_t bytes, int /*memfd*/, uint64_t /*memfd_offset*/) {
  if (Status possible = cuda::refuse_gpu_memory("tcp", base); !possible) return possible.error();
  return shared_.regions.add(base, bytes);
}

bool TcpDomain::deregister_region(uint64_t rkey) { return shared_.regions.remove(rkey); }

// --- Links.

Link* TcpDomain::find(LinkId id) noexcept {
  const auto found = links_.find(id);
  return found == links_.end() ? nullptr : found->second.get();
}

Result<Bytes> TcpDomain::offer(LinkId id) {
  if (find(id) != nullptr) return tcp_error(ErrorCode::kInvalidArgument, "offer", "this link exists already");
  Result<Secret> dialer = Secret::make();
  if (!dialer) return dialer.error();
  Result<Secret> listener = Secret::make();
  if (!listener) return listener.error();
  Offer offer;
  offer.address = config_.address;
  offer.port = port_;
  offer.link = id;
  offer.connections = static_cast<uint16_t>(config_.connections);
  offer.dialer = dialer.value();
  offer.listener = listener.value();
  auto link = std::make_unique<Link>(shared_, id, offer.connections);
  link->expect(offer.dialer, offer.listener);
  links_.emplace(id, std::move(link));
  return offer.encode();
}

Result<Bytes> TcpDomain::accept(LinkId id, std::span<const std::byte> bytes) {
  if (find(id) != nullptr) return tcp_error(ErrorCode::kInvalidArgument, "accept", "this link exists already");
  Result<Offer> decoded = Offer::decode(bytes);
  if (!decoded) return decoded.error();
  const Offer& offer = decoded.value();
  Answer answer;
  answer.link = offer.link;
  answer.connections = std::min(offer.connections, static_cast<uint16_t>(config_.connections));
  auto link = std::make_unique<Link>(shared_, id, answer.connections);
  for (uint16_t index = 0; index < answer.connections; ++index) {
    Result<UniqueFd> socket = dial(config_.address, offer.address, offer.port, shared_.tuning);
    if (!socket) return socket.error();
    Hello hello;
    hello.index = index;
    hello.link = offer.link;
    hello.secret = offer.dialer;
    Welcome welcome;
    welcome.index = index;
    welcome.secret = offer.listener;
    Status dialed = link->connections()[index]->dial(std::move(socket.value()), hello, welcome);
    if (!dialed) return dialed.error();
  }
  link->deadline = Clock::now() + shared_.tuning.connect_timeout;
  links_.emplace(id, std::move(link));
  arm_timer();
  return answer.encode();
}

Status TcpDomain::complete(LinkId id, std::span<const std::byte> bytes) {
  Link* const link = find(id);
  if (link == nullptr) return tcp_error(ErrorCode::kUnknownPeer, "complete", "the link was fenced or broke");
  Result<Answer> answer = Answer::decode(bytes);
  if (!answer) return answer.error();
  if (answer.value().link != id || answer.value().connections > link->connections().size()) {
    return tcp_error(ErrorCode::kInvalidArgument, "complete", "the answer is not one to this link's offer");
  }
  link->limit(answer.value().connections);
  link->deadline = Clock::now() + shared_.tuning.connect_timeout;
  arm_timer();
  return {};
}

bool TcpDomain::remove_link(LinkId id, const Error& error) {
  auto node = links_.extract(id);
  if (node.empty()) return false;
  Link& link = *closed_links_.emplace_back(std::move(node.mapped()));
  link.close(error);
  return true;
}

bool TcpDomain::fence(LinkId id) {
  remove_link(id, tcp_error(ErrorCode::kPeerDown, "fence", "the link was fenced on this side"));
  return true;
}

void TcpDomain::break_link(Connection& connection, const Error& error) { break_link(connection.link().id(), error); }

void TcpDomain::break_link(LinkId id, const Error& error) {
  Link* const link = find(id);
  if (link == nullptr) return;
  // The peer may have said why, or acknowledged more, before it closed. The sink may fence the link meanwhile.
  for (size_t i = 0; find(id) == link && i < link->connections().size(); ++i) link->connections()[i]->read_last_words();
  if (remove_link(id, error)) shared_.sink.on_link_down(id, error, true);
}

// --- Strangers.

void TcpDomain::accept_strangers() {
  for (int i = 0; i < kAcceptsPerPoll; ++i) {
    UniqueFd socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (!socket) {
      if (out_of_descriptors(errno)) {
        (void)shared_.epoll.modify(listener_, 0, listener_watched_);
        listener_paused_until_ = Clock::now() + kListenerPause;
        arm_timer();
      }
      return;
    }
    if (strangers_.size() >= shared_.tuning.max_strangers) dismiss(strangers_.front());
    strangers_.emplace_back(std::move(socket), Clock::now() + shared_.tuning.hello_timeout);
    Stranger& stranger = strangers_.back();
    if (!shared_.epoll.add(stranger.socket, EPOLLIN, stranger)) {
      dismiss(stranger);
      continue;
    }
    if (strangers_.size() == 1) arm_timer();
  }
}

void TcpDomain::hear(Stranger& stranger) {
  if (!stranger.socket) return;  // dismissed earlier in this poll()
  const auto room = std::span(stranger.hello).subspan(stranger.received);
  const ssize_t got = ::recv(stranger.socket.get(), room.data(), room.size(), MSG_DONTWAIT);
  if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) return;
  if (got <= 0) return dismiss(stranger);
  stranger.received += static_cast<size_t>(got);
  if (stranger.received < stranger.hello.size()) return;
  Hello hello;
  std::memcpy(&hello, stranger.hello.data(), sizeof(hello));
  Link* const link = hello.magic == Hello::kMagic && hello.version == kVersion ? find(hello.link) : nullptr;
  Connection* const connection = link == nullptr ? nullptr : link->admit(hello);
  if (connection == nullptr) return dismiss(stranger);
  Status adopted = connection->adopt(std::move(stranger.socket), link->welcome(hello.index));
  dismiss(stranger);
  if (!adopted) break_link(*connection, adopted.error());
}

void TcpDomain::dismiss(Stranger& stranger) {
  if (stranger.socket) {
    shared_.epoll.remove(stranger.socket);
    hang_up(stranger.socket);
  }
  const auto place = std::find_if(strangers_.begin(), strangers_.end(),
                                  [&stranger](const Stranger& other) { return &other == &stranger; });
  closed_strangers_.splice(closed_strangers_.end(), strangers_, place);
}

// --- Deadlines.

void TcpDomain::arm_timer() {
  std::optional<Clock::time_point> earliest = listener_paused_until_;
  const auto consider = [&earliest](Clock::time_point deadline) {
    if (!earliest || deadline < *earliest) earliest = deadline;
  };
  if (!strangers_.empty()) consider(strangers_.front().deadline);
  for (const auto& [id, link] : links_) {
    if (link->deadline) consider(*link->deadline);
  }
  itimerspec when{};  // all zeros: disarmed
  if (earliest) {
    const auto since_boot = std::max(earliest->time_since_epoch(), Clock::duration(1));
    const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(since_boot);
    when.it_value.tv_sec = seconds.count();
    when.it_value.tv_nsec = std::chrono::nanoseconds(since_boot - seconds).count();
  }
  ::timerfd_settime(timer_.get(), TFD_TIMER_ABSTIME, &when, nullptr);
}

void TcpDomain::expire() {
  const Clock::time_point now = Clock::now();
  while (!strangers_.empty() && strangers_.front().deadline <= now) dismiss(strangers_.front());
  if (listener_paused_until_ && *listener_paused_until_ <= now) {
    listener_paused_until_.reset();
    (void)shared_.epoll.modify(listener_, EPOLLIN, listener_watched_);
  }
  std::vector<LinkId> late;
  for (const auto& [id, link] : links_) {
    if (!link->deadline || *link->deadline > now) continue;
    if (!link->up()) late.push_back(id);
    link->deadline.reset();
  }
  for (const LinkId id : late) {
    break_link(id, tcp_error(ErrorCode::kPeerDown, "connect",
                             "not connected after " + std::to_string(shared_.tuning.connect_timeout.count()) +
                                 " ms: is the peer's address reachable from " + config_.address + "?"));
  }
  arm_timer();
}

// --- Data path.

Posted TcpDomain::post(LinkId id, const WriteBatch& batch) {
  Link* const link = find(id);
  std::optional<Error> error = impossible(batch);
  if (link == nullptr) error = tcp_error(ErrorCode::kPeerDown, "write", "the link was fenced or broke");
  if (!error) return link->post(batch);
  shared_.sink.on_complete(batch.work, &*error);
  return Posted::kYes;
}

Posted TcpDomain::send(LinkId id, WorkId work, std::span<const std::byte> message) {
  std::optional<Error> error;
  Link* const link = find(id);
  if (message.empty() || message.size() > kMaxMessageBytes) {
    error = tcp_error(ErrorCode::kInvalidArgument, "send",
                      "a message has 1 to " + std::to_string(kMaxMessageBytes) + " bytes");
  } else if (link == nullptr) {
    error = tcp_error(ErrorCode::kPeerDown, "send", "the link was fenced or broke");
  } else {
    return link->send(work, message);
  }
  shared_.sink.on_complete(work, &*error);
  return Posted::kYes;
}

bool TcpDomain::offer_held() {
  if (shared_.holding.empty()) return false;
  bool any = false;
  // A copy: the sink may fence links. Another one first in each turn, so that each gets its share of the room.
  std::rotate(shared_.holding.begin(), shared_.holding.begin() + 1, shared_.holding.end());
  for (Connection* const connection : std::vector(shared_.holding)) any |= connection->offer_held();
  std::erase_if(shared_.holding, [](const Connection* connection) { return !connection->holds(); });
  return any;
}

bool TcpDomain::poll() {
  closed_links_.clear();
  closed_strangers_.clear();
  bool progress = offer_held();
  // What was posted leaves before anything else is looked at.
  for (int i = 0; i < shared_.tuning.turns && !shared_.sendable.empty(); ++i) {
    Connection& connection = *shared_.sendable.front();
    shared_.sendable.pop_front();
    progress = true;
    if (Status sent = connection.send_turn(); !sent) break_link(connection, sent.error());
  }
  // Few events at a time: epoll rotates its list of ready descriptors, so those left out come first in the next poll().
  std::array<epoll_event, 16> room;
  const auto turns = std::min<size_t>(room.size(), static_cast<size_t>(shared_.tuning.turns));
  for (const epoll_event& event : shared_.epoll.ready(std::span(room).first(turns))) {
    progress = true;
    auto* const watched = static_cast<Watched*>(event.data.ptr);
    switch (watched->kind) {
      case Watched::Kind::kListener:
        accept_strangers();
        break;
      case Watched::Kind::kTimer:
        expire();
        break;
      case Watched::Kind::kStranger:
        hear(static_cast<Stranger&>(*watched));
        break;
      case Watched::Kind::kConnection: {
        auto& connection = static_cast<Connection&>(*watched);
        if (Status handled = connection.on_events(event.events); !handled) break_link(connection, handled.error());
        break;
      }
    }
  }
  return progress;
}

}  // namespace kvc::tcp
