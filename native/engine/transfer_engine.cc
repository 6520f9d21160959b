#include "engine/transfer_engine.h"

#include <algorithm>
#include <set>
#include <string>
#include <thread>
#include <utility>

#include "cuda/stream_signal.h"
#include "engine/engine_impl.h"
#include "engine/handshake.h"
#include "engine/message.h"
#include "engine/start_thread.h"

namespace kvc {

namespace {

// Untaken messages to one peer. Beyond this the peer's user does not read, and the messages should not use more of the
// sender's memory (4 MiB).
constexpr uint32_t kMaxPendingSends = 1024;

Status check_config(const EngineConfig& config) {
  if (config.name.empty() || config.name.size() > kMaxNameBytes) {
    return invalid("create",
                   "the name of the transfer engine must have 1 to " + std::to_string(kMaxNameBytes) + " bytes");
  }
  if (config.domains.empty() || config.domains.size() > kMaxDomains) {
    return invalid("create", std::to_string(config.domains.size()) + " domains configured: 1 to " +
                                 std::to_string(kMaxDomains) + " are supported");
  }
  if (config.workers < 1 || config.workers > kMaxDomains + 1) {
    return invalid("create", std::to_string(config.workers) + " workers: 1 to " + std::to_string(kMaxDomains + 1) +
                                 " are supported");
  }
  std::set<std::string> providers;
  for (const DomainConfig& domain : config.domains) providers.insert(domain.provider);
  if (providers.size() > kMaxLanes) {
    return invalid("create", std::to_string(providers.size()) + " providers configured: at most " +
                                 std::to_string(kMaxLanes) + " are supported");
  }
  return {};
}

}  // namespace

TransferEngine::TransferEngine(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
TransferEngine::~TransferEngine() { (void)close(); }

Status TransferEngine::close() {
  if (impl_ == nullptr) return {};
  // In a child of fork(), the threads and their objects belong to the parent: nothing may be ended here.
  if (impl_->process != getpid()) {
    [[maybe_unused]] Impl* const parents = impl_.release();
    return {};
  }
  Status ended = impl_->end();
  if (ended) {
    impl_.reset();
    return ended;
  }
  // The control thread continues, lets peers fence when the driver returns, and uses the object meanwhile. Another
  // thread then frees the object. If no thread can start, its memory is lost.
  Impl* const left = impl_.release();
  std::thread last;
  if (start_thread(last, [left] { std::unique_ptr<Impl>(left).reset(); })) last.detach();
  return ended;
}

Result<std::unique_ptr<TransferEngine>> TransferEngine::create(EngineConfig config) {
  if (Status status = check_config(config); !status) return status.error();
  load_libraries(config.domains);
  Result<std::shared_ptr<Waker>> waker = Waker::create();
  if (!waker) return waker.error();
  auto impl = std::make_unique<Impl>(std::move(config), std::move(waker.value()));
  if (Status status = impl->events.open(); !status) return status.error();
  if (Status status = impl->messages.open(); !status) return status.error();
  if (Status status = impl->start(); !status) return status.error();
  return std::unique_ptr<TransferEngine>(new TransferEngine(std::move(impl)));
}

// --- Peers

Result<Handshake> TransferEngine::offer(std::string name, std::span<const std::string> without) {
  return impl_->on_control("offer", [&]() -> Result<Handshake> {
    const PeerId id = impl_->peer_ids.next();
    Result<Bytes> bytes = impl_->offers.make(id, without);
    if (!bytes) return bytes.error();
    impl_->peers.insert(id, std::make_shared<Peer>(id, std::move(name)));
    return Handshake{id, std::move(bytes.value()), {}};
  });
}

Result<Handshake> TransferEngine::accept(std::string name, std::span<const std::byte> offer) {
  return impl_->on_control("accept", [&]() -> Result<Handshake> {
    Result<Offers::Accepted> accepted = impl_->offers.accept(name, offer);
    if (!accepted) return accepted.error();
    const PeerId id = impl_->peer_ids.next();
    auto peer = std::make_shared<Peer>(id, name.empty() ? std::move(accepted.value().offerer) : std::move(name));
    impl_->peers.insert(id, peer);
    Status connected = impl_->transfer_thread.call("accept", [&]() -> Status {
      impl_->group.connect(peer, accepted.value().link, false);
      return {};
    });
    if (!connected) return connected.error();
    return Handshake{id, std::move(accepted.value().answer), std::move(accepted.value().passed_over)};
  });
}

Status TransferEngine::complete(PeerId id, std::span<const std::byte> answer) {
  return impl_->on_control("complete", [&]() -> Status {
    const Result<std::shared_ptr<Peer>> found = impl_->find_peer(id, "complete");
    if (!found) return found.error();
    const std::shared_ptr<Peer>& peer = found.value();
    const auto refuse = [&](Error error) {
      if (peer->state.load(std::memory_order_acquire) == Peer::State::kOffered) impl_->peers.erase(id);
      if (error.peer.empty()) error.peer = peer->name;
      return error;
    };
    Result<FirstLink> link = impl_->offers.complete(id, answer);
    if (!link) return refuse(link.error());
    return impl_->transfer_thread.call("complete", [&]() -> Status {
      if (impl_->group.connect(peer, link.value(), true)) return {};
      return refuse({ErrorCode::kPeerDown, {}, {}, "complete", "the peer was fenced on this side"});
    });
  });
}

Status TransferEngine::fence(PeerId peer_id, Timeout timeout) {
  const Result<std::shared_ptr<Peer>> found = impl_->find_peer(peer_id, "fence");
  if (!found) return found.error();
  const std::shared_ptr<Peer>& peer = found.value();
  if (peer->state.load(std::memory_order_acquire) == Peer::State::kOffered) {
    const Status withdrawn = impl_->on_control("fence", [&]() -> Status {
      impl_->offers.withdraw(peer_id);  // if the offer was not completed meanwhile
      return {};
    });
    if (!withdrawn) return withdrawn;
  }
  const Error why{ErrorCode::kPeerDown, {}, {}, "fence", "the peer was fenced on this side"};
  Status status = impl_->transfer_thread.call_until(
      "fence", [impl = impl_.get(), peer, why] { return impl->group.fence_step(*peer, why); }, timeout,
      "a write of this peer may still land here: call fence() again");
  if (!status) status.error().peer = peer->name;
  return status;
}

Status TransferEngine::disconnect(PeerId peer_id, Timeout timeout) {
  const Result<std::shared_ptr<Peer>> found = impl_->find_peer(peer_id, "disconnect");
  if (!found) return found.error();
  const std::shared_ptr<Peer>& peer = found.value();
  if (peer->state.load(std::memory_order_acquire) == Peer::State::kOffered) {
    return invalid("disconnect", "peer " + peer->name + " has not answered the offer yet: withdraw it with fence()");
  }
  Status status = impl_->transfer_thread.call_until(
      "disconnect",
      [impl = impl_.get(), peer]() -> std::optional<Status> {
        if (impl->peers.find(peer->id) == nullptr) return Status();
        if (peer->parting.fencing) return std::nullopt;
        if (peer->down) return *peer->down;
        impl->group.leave(peer);
        return std::nullopt;
      },
      timeout,
      "transfers or messages with this peer have not ended: seal or cancel the open ones on both sides and call "
      "disconnect() again, or call fence()");
  if (!status) status.error().peer = peer->name;
  return status;
}

Result<std::string> TransferEngine::lane(PeerId peer_id) {
  const Result<std::shared_ptr<Peer>> peer = impl_->find_connected(peer_id, "lane");
  if (!peer) return peer.error();
  return peer.value()->provider;
}

// --- Messages

Result<TransferId> TransferEngine::send(PeerId peer_id, std::span<const std::byte> message, EventCallback callback) {
  if (message.empty() || message.size() > kMaxUserMessageBytes) {
    return invalid("send", "a message of " + std::to_string(message.size()) + " bytes: 1 to " +
                               std::to_string(kMaxUserMessageBytes) + " are supported. Send larger data with a write");
  }
  const Result<std::shared_ptr<Transfer>> made =
      impl_->make_transfer(peer_id, std::move(callback), Transfer::Kind::kMessage);
  if (!made) return made.error();
  const std::shared_ptr<Transfer>& transfer = made.value();
  if (transfer->peer->messages.load(std::memory_order_relaxed) > kMaxPendingSends) {
    return Error{
        ErrorCode::kResources, transfer->peer->provider, transfer->peer->name, "send",
        std::to_string(kMaxPendingSends) + " messages to this peer are waiting: the peer does not receive them"};
  }
  if (Status status = impl_->publish(transfer); !status) return status.error();
  Bytes bytes(kUserHeaderBytes + message.size());
  std::copy(message.begin(), message.end(), bytes.begin() + kUserHeaderBytes);
  impl_->transfer_thread.submit<AddRequest>(
      transfer, Request::make(nullptr, nullptr, 0, std::optional<uint32_t>{}, MessageWrite{std::move(bytes)}), true);
  return transfer->id;
}

std::vector<Message> TransferEngine::receive(size_t max) {
  bool wake = false;
  std::vector<Message> messages = impl_->messages.take(max, wake);
  if (wake) impl_->waker->wake();
  return messages;
}

Result<Message> TransferEngine::wait_message(Timeout timeout) {
  if (impl_->transfer_thread.on_thread()) return TransferThread::blocking_in_callback("wait_message");
  bool wake = false;
  Result<Message> message = impl_->messages.wait(timeout, wake);
  if (wake) impl_->waker->wake();
  return message;
}

int TransferEngine::message_fd() const { return impl_->messages.fd(); }

Status TransferEngine::set_message_callback(MessageCallback callback) {
  return impl_->transfer_thread.call("set_message_callback", [&]() -> Status {
    impl_->group.set_message_callback(std::move(callback));
    return {};
  });
}

// --- Counting

Result<CounterSet> TransferEngine::alloc_counters(uint32_t n, const std::vector<PeerId>& raisers) {
  if (n == 0) return invalid("alloc_counters", "0 counters requested: a counter set needs at least 1");
  return impl_->counters.allocate(n, raisers);
}

Status TransferEngine::expect(CounterSetId set, const std::vector<uint64_t>& targets, EventCallback callback,
                              std::shared_ptr<CompletionWord> word, uint64_t value) {
  Result<std::optional<CounterSets::Fired>> fired =
      impl_->counters.expect(set, targets, std::move(callback), std::move(word), value, impl_->control);
  if (!fired) return fired.error();
  if (!fired.value()) return {};
  if (fired.value()->callback || fired.value()->word) {
    impl_->transfer_thread.submit<Fire>(std::make_unique<CounterSets::Fired>(std::move(*fired.value())));
  } else {
    // The set may be released meanwhile.
    impl_->events.push_if(Event{.kind = EventKind::kCountersReached, .id = set},
                          [&] { return impl_->counters.exists(set); });
  }
  return {};
}

Status TransferEngine::mirror_counters(CounterSetId set, std::vector<std::shared_ptr<CompletionWord>> words) {
  return impl_->counters.mirror(set, std::move(words), impl_->control);
}

Result<std::vector<uint64_t>> TransferEngine::counter_values(CounterSetId set) { return impl_->counters.values(set); }

Result<CounterReader> TransferEngine::counter_reader(CounterSetId set) {
  Result<std::vector<uint32_t>> immediates = impl_->counters.read(set);
  if (!immediates) return immediates.error();
  return CounterReader(impl_->counted, std::move(immediates.value()));
}

uint64_t CounterReader::value(size_t counter) const noexcept { return counters_->value(immediates_[counter]); }

Status TransferEngine::release_counters(CounterSetId set) {
  Result<std::shared_ptr<const void>> released = impl_->counters.release(set);
  if (!released) return released.error();
  // The transfer thread may be reading it right now.
  if (released.value()) impl_->transfer_thread.submit<Call>([kept = std::move(released.value())] {});
  impl_->events.discard(EventQueue::Subject::kCounters, set);
  return {};
}

// --- Waiting

Result<Event> TransferEngine::wait_transfer(TransferId id, Timeout timeout, const std::function<bool()>& stays) {
  if (impl_->transfer_thread.on_thread()) return TransferThread::blocking_in_callback("wait_transfer");
  const std::shared_ptr<Transfer> transfer = impl_->transfers.find(id);
  const std::optional<Impl::Submission> submission = transfer ? std::nullopt : impl_->find_submission(id);
  if ((transfer != nullptr && transfer->callback) || (submission && submission->scatter->has_callback())) {
    return invalid("wait_transfer", "transfer " + std::to_string(id) + " has a callback, which receives its event");
  }
  const auto pending = [&] { return impl_->transfers.find(id) != nullptr || impl_->find_submission(id).has_value(); };
  return impl_->events.wait(EventQueue::Subject::kTransfer, id, timeout, pending, stays);
}

Result<Event> TransferEngine::wait_counters(CounterSetId set, Timeout timeout, const std::function<bool()>& stays) {
  if (impl_->transfer_thread.on_thread()) return TransferThread::blocking_in_callback("wait_counters");
  const auto pending = [&] { return impl_->counters.exists(set); };
  return impl_->events.wait(EventQueue::Subject::kCounters, set, timeout, pending, stays);
}

std::vector<Event> TransferEngine::poll_events(size_t max) { return impl_->events.poll(max); }
int TransferEngine::event_fd() const { return impl_->events.fd(); }

// --- Other methods

std::shared_ptr<LayerSignal> TransferEngine::create_signal() {
  // The waker is shared, because a signal may outlive the transfer engine.
  return std::make_shared<LayerSignal>([waker = impl_->waker] { waker->wake(); });
}

Result<std::shared_ptr<cuda::StreamSignal>> TransferEngine::create_stream_signal() {
  return cuda::StreamSignal::create([waker = impl_->waker] { waker->wake(); });
}

Status TransferEngine::start_trace(size_t steps) {
  impl_->trace.start(steps);
  return impl_->transfer_thread.call("start_trace", [&]() -> Status {
    impl_->stats.trace = &impl_->trace;
    return {};
  });
}

TakenTrace TransferEngine::take_trace() { return impl_->trace.take(); }

EngineStats TransferEngine::stats() const {
  const auto load = [](const std::atomic<uint64_t>& counter) { return counter.load(std::memory_order_relaxed); };
  const Stats& stats = impl_->stats;
  return EngineStats{.pages_written = load(stats.pages_written),
                     .bytes_written = load(stats.bytes_written),
                     .batches_posted = load(stats.batches_posted),
                     .immediates_received = load(stats.immediates_received),
                     .immediates_stale = load(stats.immediates_stale),
                     .immediates_foreign = load(stats.immediates_foreign),
                     .links = load(stats.links),
                     .links_lost = load(stats.links_lost),
                     .links_restored = load(stats.links_restored),
                     .pages_rewritten = load(stats.pages_rewritten),
                     .sleeps = load(stats.sleeps),
                     .callback_errors = load(stats.callback_errors),
                     .transfers_open = impl_->transfers.size(),
                     .counters_allocated = impl_->counters.allocated(),
                     .peers = impl_->peers.size(),
                     .regions = impl_->regions.size()};
}

Result<std::vector<LostLink>> TransferEngine::lost_links() {
  std::vector<LostLink> lost;
  const std::vector<std::shared_ptr<Peer>> peers = impl_->peers.all();
  const Status status = impl_->transfer_thread.call("lost_links", [&]() -> Status {
    for (const std::shared_ptr<Peer>& peer : peers) {
      LinkKeeper::append_lost(*peer, impl_->lanes.descriptions(), lost);
    }
    return {};
  });
  if (!status) return status.error();
  return lost;
}

const EngineConfig& TransferEngine::config() const { return impl_->config; }
const std::vector<std::string>& TransferEngine::domains() const { return impl_->lanes.descriptions(); }
const std::vector<Error>& TransferEngine::unusable() const { return impl_->lanes.unusable(); }

}  // namespace kvc
