#include "providers/tcp/connector.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "cuda/gpu_memory.h"

namespace kvc::tcp {
namespace {

// Connections accepted in one serve(). Each costs a few microseconds.
constexpr int kAcceptsPerTurn = 16;
// Pause of the listener after the process has run out of descriptors. It is long enough not to spin, and short compared
// with connect_timeout.
constexpr std::chrono::milliseconds kListenerPause{200};

bool out_of_descriptors(int error_number) {
  return error_number == EMFILE || error_number == ENFILE || error_number == ENOBUFS || error_number == ENOMEM;
}

}  // namespace

Result<std::unique_ptr<TcpConnector>> TcpConnector::open(const DomainConfig& config, const Tuning& tuning) {
  if (config.connections == 0 || config.connections > kMaxConnections) {
    return tcp_error(ErrorCode::kInvalidArgument, "open",
                     std::to_string(config.connections) + " connections: give 1 to " + std::to_string(kMaxConnections));
  }
  Result<Epoll> epoll = Epoll::create();
  if (!epoll) return epoll.error();
  std::unique_ptr<TcpConnector> connector(new TcpConnector(config, tuning, std::move(epoll.value())));
  if (Status started = connector->start(); !started) return started.error();
  return connector;
}

Status TcpConnector::start() {
  Result<UniqueFd> listener = listen_on(config_.address, tuning_);
  if (!listener) return listener.error();
  listener_ = std::move(listener.value());
  Result<uint16_t> port = local_port(listener_);
  if (!port) return port.error();
  port_ = port.value();
  bits_per_second_ = interface_speed(config_.address);
  Result<TimerFd> timer = TimerFd::create("tcp");
  if (!timer) return timer.error();
  timer_ = std::move(timer.value());
  Result<std::shared_ptr<LingeringSockets>> lingering = LingeringSockets::create(tuning_);
  if (!lingering) return lingering.error();
  lingering_ = std::move(lingering.value());
  if (Status added = epoll_.add(listener_.get(), EPOLLIN, listener_watched_); !added) return added;
  if (Status added = epoll_.add(timer_.fd(), EPOLLIN, timer_watched_); !added) return added;
  return epoll_.add(lingering_->fd(), EPOLLIN, lingering_watched_);
}

std::string TcpConnector::description() const { return "tcp " + endpoint(config_.address, port_); }

// --- Memory.

Result<std::unique_ptr<Registration>> TcpConnector::register_memory(const MemoryRange& range) {
  if (Status possible = cuda::refuse_gpu_memory("tcp", range.base); !possible) return possible.error();
  return std::make_unique<Registration>(range, random_key());
}

// --- Links.

Result<Bytes> TcpConnector::offer(LinkId link) {
  Result<std::shared_ptr<Arrivals>> arrivals = Arrivals::create();
  if (!arrivals) return arrivals.error();
  Offer offer;
  offer.address = config_.address;
  offer.port = port_;
  offer.link = link;
  offer.connections = static_cast<uint16_t>(config_.connections);
  offer.dialer = Secret::make();
  offer.listener = Secret::make();
  Offered& offered = offers_[link];
  offered.dialer = offer.dialer;
  offered.listener = offer.listener;
  offered.connections = offer.connections;
  offered.arrivals = arrivals.value();
  offered.end = std::make_unique<TcpLinkEnd>();
  offered.end->arrivals = std::move(arrivals.value());
  return offer.encode();
}

Result<Connector::Accepted> TcpConnector::accept(LinkId /*link*/, std::span<const std::byte> bytes) {
  Result<Offer> decoded = Offer::decode(bytes);
  if (!decoded) return decoded.error();
  const Offer& offer = decoded.value();
  Answer answer;
  answer.link = offer.link;
  answer.connections = std::min(offer.connections, static_cast<uint16_t>(config_.connections));
  auto end = std::make_unique<TcpLinkEnd>();
  end->connections = answer.connections;
  for (uint16_t index = 0; index < answer.connections; ++index) {
    Result<UniqueFd> socket = dial(config_.address, offer.address, offer.port, tuning_);
    if (!socket) return socket.error();
    Dialled& dialled = end->dialled.emplace_back();
    dialled.socket = std::move(socket.value());
    dialled.hello.index = index;
    dialled.hello.link = offer.link;
    dialled.hello.secret = offer.dialer;
    dialled.welcome.index = index;
    dialled.welcome.secret = offer.listener;
  }
  return Accepted{answer.encode(), std::move(end)};
}

Result<std::unique_ptr<LinkEnd>> TcpConnector::complete(LinkId link, std::span<const std::byte> bytes) {
  const auto found = offers_.find(link);
  if (found == offers_.end() || found->second.end == nullptr) {
    return tcp_error(ErrorCode::kUnknownPeer, "complete", "the offer was withdrawn or used up");
  }
  Offered& offered = found->second;
  Result<Answer> answer = Answer::decode(bytes);
  if (answer && (answer.value().link != link || answer.value().connections > offered.connections)) {
    answer = tcp_error(ErrorCode::kInvalidArgument, "complete", "the answer does not belong to this link's offer");
  }
  if (!answer) {
    offers_.erase(found);
    return answer.error();
  }
  std::unique_ptr<TcpLinkEnd> end = std::move(offered.end);
  end->connections = offered.connections = answer.value().connections;
  offered.until = Clock::now() + tuning_.connect_timeout;
  if (offered.all_came()) offers_.erase(found);
  arm_timer();
  return std::unique_ptr<LinkEnd>(std::move(end));
}

// --- Strangers.

void TcpConnector::serve() {
  bool expired = false;
  bool knocked = false;
  std::array<epoll_event, 16> room;
  for (const epoll_event& event : epoll_.ready(room)) {
    auto* const watched = static_cast<Watched*>(event.data.ptr);
    const Watched::Kind kind = watched->kind;
    expired |= kind == Watched::Kind::kTimer;
    knocked |= kind == Watched::Kind::kListener;
    if (kind == Watched::Kind::kLingering) lingering_->serve();
    if (kind == Watched::Kind::kStranger) hear(static_cast<Stranger&>(*watched));
  }
  // After the events, because events name strangers that these calls dismiss.
  if (expired) expire();
  if (knocked) accept_strangers();
}

void TcpConnector::accept_strangers() {
  for (int i = 0; i < kAcceptsPerTurn; ++i) {
    UniqueFd socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (!socket) {
      if (out_of_descriptors(errno)) {
        (void)epoll_.modify(listener_.get(), 0, listener_watched_);
        listener_paused_until_ = Clock::now() + kListenerPause;
      }
      break;
    }
    // The oldest stranger is read once more before it is dismissed: its Hello may have arrived meanwhile.
    if (strangers_.size() >= tuning_.max_strangers) hear(strangers_.front());
    if (strangers_.size() >= tuning_.max_strangers) dismiss(strangers_.front());
    Stranger& stranger = strangers_.emplace_back(std::move(socket), Clock::now() + tuning_.hello_timeout);
    if (!epoll_.add(stranger.socket.get(), EPOLLIN, stranger)) dismiss(stranger);
  }
  arm_timer();
}

void TcpConnector::hear(Stranger& stranger) {
  // Reads no byte beyond the Hello: the following bytes belong to the link.
  const auto room = std::span(stranger.hello).subspan(stranger.received);
  const ssize_t got = ::recv(stranger.socket.get(), room.data(), room.size(), MSG_DONTWAIT);
  if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) return;
  if (got > 0) stranger.received += static_cast<size_t>(got);
  if (got > 0 && stranger.received < stranger.hello.size()) return;
  if (got > 0) {
    Hello hello;
    std::memcpy(&hello, stranger.hello.data(), sizeof(hello));
    admit(hello, stranger.socket);
  }
  dismiss(stranger);
}

void TcpConnector::admit(const Hello& hello, UniqueFd& socket) {
  const auto found = offers_.find(hello.link);
  if (hello.magic != Hello::kMagic || hello.version != kVersion || found == offers_.end()) return;
  Offered& offered = found->second;
  if (!hello.secret.equals(offered.dialer) || hello.index >= offered.connections) return;
  const uint32_t bit = 1U << hello.index;
  const std::shared_ptr<Arrivals> arrivals = offered.arrivals.lock();
  if ((offered.came & bit) != 0 || arrivals == nullptr) return;
  epoll_.remove(socket.get());
  Welcome welcome;
  welcome.index = hello.index;
  welcome.secret = offered.listener;
  // The first bytes of a new connection always fit its send buffer. If the connection broke, the domain notices when it
  // reads.
  (void)::send(socket.get(), &welcome, sizeof(welcome), MSG_DONTWAIT | MSG_NOSIGNAL);
  arrivals->put(hello.index, std::move(socket));
  offered.came |= bit;
  if (offered.end == nullptr && offered.all_came()) offers_.erase(found);
}

void TcpConnector::dismiss(Stranger& stranger) {
  if (stranger.socket) {
    epoll_.remove(stranger.socket.get());
    hang_up(stranger.socket);
  }
  strangers_.remove_if([&stranger](const Stranger& other) { return &other == &stranger; });
}

// --- Deadlines.

void TcpConnector::arm_timer() {
  std::optional<Clock::time_point> earliest = listener_paused_until_;
  const auto consider = [&earliest](Clock::time_point deadline) {
    if (!earliest || deadline < *earliest) earliest = deadline;
  };
  if (!strangers_.empty()) consider(strangers_.front().deadline);
  for (const auto& [link, offered] : offers_) {
    if (offered.until) consider(*offered.until);
  }
  timer_.arm(earliest);
}

void TcpConnector::expire() {
  const Clock::time_point now = Clock::now();
  while (!strangers_.empty() && strangers_.front().deadline <= now) dismiss(strangers_.front());
  if (listener_paused_until_ && *listener_paused_until_ <= now) {
    listener_paused_until_.reset();
    (void)epoll_.modify(listener_.get(), EPOLLIN, listener_watched_);
  }
  std::erase_if(offers_, [now](const auto& entry) { return entry.second.until && *entry.second.until <= now; });
  arm_timer();
}

}  // namespace kvc::tcp
