#include "engine/domain_group.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "base/poll_loop.h"
#include "engine/message.h"
#include "engine/trace.h"

namespace kvc {

namespace {

// Limit for fences while closing. A fence takes milliseconds, unless a peer on this machine is stopped in the middle of a
// copy. A process that ends cannot wait for such a peer without limit.
constexpr auto kCloseTimeout = std::chrono::seconds(5);
// Imported regions of a fenced peer that one step forgets, under the lock that every write takes. Each takes about 0.1
// us, and a peer that receives weights has thousands.
constexpr size_t kForgottenPerStep = 512;

uint32_t sequence_of(std::span<const std::byte> message) {
  uint32_t sequence = 0;
  for (size_t i = 0; i < sizeof(sequence); ++i) sequence |= static_cast<uint32_t>(message[1 + i]) << (8 * i);
  return sequence;
}

}  // namespace

DomainGroup::DomainGroup(Shared shared)
    : shared_(std::move(shared)),
      scheduler_(shared_.transfers, shared_.counters, shared_.events, shared_.stats),
      keeper_(scheduler_, shared_.counters, shared_.stats, *this),
      disconnects_(
          shared_.events,
          [this](Peer& peer) {
            return fence_step(peer, Error{ErrorCode::kPeerDown, {}, {}, "disconnect", "the peer disconnected"});
          },
          [this](Peer& peer, std::span<const std::byte> goodbye) { return scheduler_.say_goodbye(peer, goodbye); }) {}

DomainGroup::~DomainGroup() = default;

void DomainGroup::open() {
  for (const Lane& lane : shared_.lanes.all()) {
    for (const LaneDomain& domain : lane.domains) domains_.push_back(domain.domain.get());
  }
}

void DomainGroup::close() {
  const Error closed{ErrorCode::kClosed, {}, {}, "close", "the transfer engine was closed"};
  const auto deadline = std::chrono::steady_clock::now() + kCloseTimeout;
  const std::vector<std::shared_ptr<LocalRegion>> regions = shared_.regions.all();
  bool fenced = false;
  while (!fenced && std::chrono::steady_clock::now() < deadline) {
    fenced = true;
    // Checked for each peer, because one pass over many peers may take longer than the limit.
    for (const std::shared_ptr<Peer>& peer : shared_.peers.all()) {
      if (std::chrono::steady_clock::now() >= deadline) {
        fenced = false;
        break;
      }
      fenced &= fence_step(*peer, closed);
    }
    retry_endings();
    fenced &= endings_.empty();
    // The owner may free its memory after this, and GPU memory must not be freed while another process maps it.
    if (fenced) {
      for (const auto& region : regions) fenced &= withdraw_step(*region->memory);
    }
    bool progress = false;
    for (Domain* const domain : domains_) {
      progress |= domain->poll();
      hear(*domain);
    }
    progress |= scheduler_.settle();
    if (!fenced && !progress) std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  scheduler_.settle();
  links_.clear();
  endings_.clear();
  untaken_.clear();
  domains_.clear();
  shared_.lanes.close_domains();
}

// --- Memory

void DomainGroup::publish(LocalMemory& memory) {
  for (Lane& lane : shared_.lanes.all()) {
    for (LaneDomain& domain : lane.domains) {
      if (memory.registrations[domain.place]) domain.domain->publish(*memory.registrations[domain.place]);
    }
  }
}

bool DomainGroup::published(const LocalMemory& memory) const {
  for (const Lane& lane : shared_.lanes.all()) {
    for (const LaneDomain& domain : lane.domains) {
      const Registration* const registration = memory.registrations[domain.place].get();
      if (registration != nullptr && !domain.domain->published(*registration)) return false;
    }
  }
  return true;
}

bool DomainGroup::withdraw_step(LocalMemory& memory) {
  memory.live.store(false, std::memory_order_relaxed);
  if (memory.batches_in_flight > 0) return false;
  bool all = true;
  for (Lane& lane : shared_.lanes.all()) {
    for (LaneDomain& domain : lane.domains) {
      // If two threads deregister the memory, one may be past this step and end the registrations.
      if (memory.withdrawn[domain.place]) continue;
      Registration* const registration = memory.registrations[domain.place].get();
      memory.withdrawn[domain.place] = registration == nullptr || domain.domain->withdraw(*registration);
      all &= memory.withdrawn[domain.place];
    }
  }
  return all;
}

// --- Peers

bool DomainGroup::connect(const std::shared_ptr<Peer>& peer, FirstLink& first, bool offerer) {
  if (peer->state.load(std::memory_order_relaxed) != Peer::State::kOffered || peer->down) return false;
  Lane& lane = *first.lane;
  const auto own = static_cast<uint32_t>(lane.domains.size());
  const uint32_t count = std::max(own, first.remote_domains);
  // Both sides compute the same pairs: link i connects the domains i places after those of the first link.
  for (uint32_t i = 0; i < count; ++i) {
    LaneDomain& domain = lane.domains[(first.local_domain + i) % own];
    peer->links.emplace_back(domain.domain.get(), domain.connector.get(), domain.place, (first.local_domain + i) % own,
                             (first.remote_domain + i) % first.remote_domains);
  }
  peer->provider = lane.provider;
  peer->remote_domains = first.remote_domains;
  peer->offerer = offerer;
  peer->resting = count > 1;
  weigh(*peer, lane);
  Link& link = peer->links.front();
  link.id = first.id;
  link.state = Link::State::kUp;
  link.fenced = false;
  links_.emplace(link.id, Place{peer.get(), &link});
  link.domain->attach(link.id, std::move(first.end));
  Stats::add(shared_.stats.links, 1);
  peer->state.store(Peer::State::kConnected, std::memory_order_release);
  return true;
}

bool DomainGroup::fence_step(Peer& peer, const Error& why) {
  if (peer.state.load(std::memory_order_relaxed) != Peer::State::kFencing) {
    peer.state.store(Peer::State::kFencing, std::memory_order_release);
    scheduler_.fail_peer(peer, why);
    keeper_.forget(peer);
  }
  if (!fence_links(peer)) return false;
  for (const Link& link : peer.links) forget_link(link.id);
  keeper_.forget(peer);  // again: links may have ended while they were fenced
  std::erase_if(falling_, [&](const auto& other) { return other.get() == &peer; });
  std::vector<std::shared_ptr<const RemoteRegion>> forgotten;
  const bool all = shared_.remote_regions.erase_some(peer.regions, kForgottenPerStep, forgotten);
  for (auto& region : forgotten) scheduler_.endings().retire(std::move(region));
  if (!all) return false;
  shared_.peers.erase(peer.id);
  return true;
}

bool DomainGroup::fence_links(Peer& peer) {
  bool all = true;
  for (Link& link : peer.links) {
    if (link.state == Link::State::kUp) Stats::add(shared_.stats.links, -1);
    link.state = Link::State::kOut;
    if (!link.fenced) link.fenced = fence(*link.domain, link.id);
    all &= link.fenced;
  }
  return all;
}

bool DomainGroup::fence(Domain& domain, LinkId id) {
  const bool fenced = domain.fence(id);
  hear(domain);  // events up to here belong to the accounts of the link
  return fenced;
}

// --- Events of domains

bool DomainGroup::hear(Domain& domain) {
  return domain.completions().drain([&](Completion& completion) {
    switch (completion.kind) {
      case Completion::Kind::kWork: {
        const TransferScheduler::Ended ended = scheduler_.complete(completion.work(), completion.error());
        if (ended.link != nullptr) keeper_.broke(*ended.peer, *ended.link, ended.link->id, *completion.error());
        if (ended.goodbye_to != 0) disconnects_.said(ended.goodbye_to, completion.error() == nullptr);
        return;
      }
      case Completion::Kind::kImmediate:
        return count(completion.link, completion.immediate());
      case Completion::Kind::kMessage:
        return hear_message(domain, completion.link, completion.slot(), completion.bytes());
      case Completion::Kind::kLinkDown:
        return link_down(completion.link, *completion.error());
    }
  });
}

void DomainGroup::count(LinkId id, uint32_t immediate) {
  const uint32_t pages = Immediate::decode(immediate).multiplicity;
  Stats::add(shared_.stats.immediates_received, pages);
  if (shared_.stats.trace != nullptr) {
    shared_.stats.trace->note(
        {.kind = TraceStep::Kind::kCounted, .request = Immediate::with_multiplicity(immediate, 1), .pages = pages});
  }
  const Place place = find_link(id);
  if (place.peer == nullptr) return Stats::add(shared_.stats.immediates_stale, pages);
  // Also counted for the link, if another link could replace it.
  if (place.peer->links.size() > 1) place.link->counted.add(immediate);
  const ImmCounterTable::Added added = shared_.counters.add(immediate, place.peer->id);
  if (added.reached) {
    if (auto fired = shared_.counters.reached(added.owner)) scheduler_.endings().fired(*std::move(fired));
  } else if (added.foreign) {
    Stats::add(shared_.stats.immediates_foreign, pages);
    if (LinkKeeper::noted(*place.link, id)) return;
    keeper_.broke(*place.peer, *place.link, id,
                  Error{ErrorCode::kRefused,
                        {},
                        {},
                        "count",
                        "the peer raised a counter of another peer: the peer is faulty or hostile"});
  } else if (added.stale) {
    Stats::add(shared_.stats.immediates_stale, pages);
  }
}

void DomainGroup::hear_message(Domain& domain, LinkId id, uint32_t slot, Bytes& message) {
  const Place place = find_link(id);
  if (place.peer == nullptr || message.empty()) return domain.take(id, slot);  // no reader
  Peer& peer = *place.peer;
  switch (static_cast<MessageTag>(message[0])) {
    case MessageTag::kUser:
      if (!take_message(peer, message)) {
        untaken_.push_back({&domain, id, slot, std::move(message)});
        return;
      }
      break;
    case MessageTag::kGoodbye:
      if (const std::shared_ptr<Peer> leaving = shared_.peers.find(peer.id)) disconnects_.hear(leaving);
      break;
    default:
      keeper_.receive(peer, id, message);
      break;
  }
  domain.take(id, slot);
}

// Returns false if there is no room for it now.
bool DomainGroup::take_message(Peer& peer, std::span<const std::byte> message) {
  if (message.size() <= kUserHeaderBytes) return true;
  const uint32_t sequence = sequence_of(message);
  if (peer.messages_seen.seen(sequence)) return true;  // sent again over another link
  if (!shared_.messages.put(peer.id, message.subspan(kUserHeaderBytes))) return false;
  peer.messages_seen.add(sequence);
  return true;
}

// Each message is tried, so that one peer without room does not hold back the others.
bool DomainGroup::retry_untaken() {
  if (untaken_.empty() || !shared_.messages.room_again()) return false;
  return std::erase_if(untaken_, [this](Untaken& untaken) {
           const Place place = find_link(untaken.link);
           if (place.peer != nullptr && !take_message(*place.peer, untaken.bytes)) return false;
           untaken.domain->take(untaken.link, untaken.slot);
           return true;
         }) > 0;
}

void DomainGroup::link_down(LinkId id, const Error& error) {
  const Place place = find_link(id);
  if (place.peer == nullptr) return;  // fenced on this side meanwhile
  if (disconnects_.link_ended(*place.peer)) return;
  keeper_.broke(*place.peer, *place.link, id, error);
}

// --- Links

DomainGroup::Place DomainGroup::find_link(LinkId id) {
  Recent& recent = recent_[id % recent_.size()];
  if (recent.id == id) return recent.place;
  const auto found = links_.find(id);
  if (found == links_.end()) return {};
  recent = {id, found->second};
  return found->second;
}

LinkId DomainGroup::new_link(Peer& peer, Link& link) {
  const LinkId id = next_link_id();
  links_.emplace(id, Place{&peer, &link});
  return id;
}

void DomainGroup::forget_link(LinkId id) {
  links_.erase(id);
  if (Recent& recent = recent_[id % recent_.size()]; recent.id == id) recent = {};
}

void DomainGroup::abandon_link(const Link& link, LinkId id) {
  shared_.control.run([connector = link.connector, id] { connector->withdraw(id); });
  if (!fence(*link.domain, id)) endings_.push_back({link.domain, id});
}

void DomainGroup::offer_link(Peer& peer, const Link& link, LinkId id) {
  shared_.control.run([this, &connector = *link.connector, shared = shared_.peers.find(peer.id),
                       place = static_cast<size_t>(&link - peer.links.data()), id] {
    auto offer = std::make_shared<Result<Bytes>>(connector.offer(id));
    shared_.on_worker([this, shared, place, id, offer] {
      if (shared != nullptr) keeper_.offered(*shared, place, id, std::move(*offer));
    });
  });
}

void DomainGroup::accept_link(Peer& peer, const Link& link, LinkId id, uint32_t epoch, Bytes bytes) {
  shared_.control.run([this, &connector = *link.connector, shared = shared_.peers.find(peer.id),
                       place = static_cast<size_t>(&link - peer.links.data()), id, epoch, bytes = std::move(bytes)] {
    auto accepted = std::make_shared<Result<Connector::Accepted>>(connector.accept(id, bytes));
    shared_.on_worker([this, shared, place, id, epoch, accepted] {
      if (shared != nullptr) keeper_.accepted(*shared, place, id, epoch, *accepted);
      if (accepted->ok()) shared_.control.dispose(std::move(accepted->value().end));
    });
  });
}

void DomainGroup::complete_link(Peer& peer, const Link& link, LinkId id, Bytes bytes) {
  shared_.control.run([this, &connector = *link.connector, shared = shared_.peers.find(peer.id),
                       place = static_cast<size_t>(&link - peer.links.data()), id, bytes = std::move(bytes)] {
    auto end = std::make_shared<Result<std::unique_ptr<LinkEnd>>>(connector.complete(id, bytes));
    shared_.on_worker([this, shared, place, id, end] {
      if (shared != nullptr) keeper_.completed(*shared, place, id, *end);
      if (end->ok()) shared_.control.dispose(std::move(end->value()));
    });
  });
}

// Sets the cost of each link. If the speed of any domain is unknown, all count as equal.
void DomainGroup::weigh(Peer& peer, const Lane& lane) {
  peer.limits = lane.limits;
  double fastest = 0;
  bool known = true;
  for (Link& link : peer.links) {
    const auto sharing = std::count_if(peer.links.begin(), peer.links.end(),
                                       [&](const Link& other) { return other.domain == link.domain; });
    const auto speed =
        static_cast<double>(lane.domains[link.local_domain].bits_per_second) / static_cast<double>(sharing);
    known &= speed > 0;
    fastest = std::max(fastest, speed);
    link.cost = speed;
  }
  for (Link& link : peer.links) link.cost = known ? fastest / link.cost : 1;
}

void DomainGroup::lose_peer(Peer& peer, Error error) {
  const Peer::State state = peer.state.load(std::memory_order_relaxed);
  if (state == Peer::State::kDown || state == Peer::State::kFencing) return;
  peer.state.store(Peer::State::kDown, std::memory_order_release);
  error.peer = peer.name;
  if (error.provider.empty()) error.provider = peer.provider;
  scheduler_.fail_peer(peer, error);
  keeper_.forget(peer);
  // Ends the work that is posted on its links, whether or not fence() is called.
  if (!fence_links(peer)) falling_.push_back(shared_.peers.find(peer.id));
  shared_.events.push(Event{.kind = EventKind::kPeerDown, .id = peer.id, .error = std::move(error)});
}

// --- The turn of the transfer thread

bool DomainGroup::turn() {
  // Handles broken links that the last turn reported, after the commands that arrived since. A transfer that was sealed
  // before the peer disconnected is therefore not reported as failed.
  bool any = keeper_.step();
  if (any) scheduler_.settle();
  any |= scheduler_.post_due_layers();
  any |= scheduler_.post();
  for (Domain* const domain : domains_) {
    any |= domain->poll();
    any |= hear(*domain);
  }
  for (Peer* const peer : scheduler_.take_wanting()) keeper_.make_links(*peer);
  any |= retry_untaken();
  any |= deliver_messages();
  // If a link broke, the next turn reports the end of the peer first, and then what failed with it.
  any |= keeper_.broken() > 0 || scheduler_.settle();
  any |= disconnects_.turn();
  any |= retry_endings();
  return any;
}

bool DomainGroup::deliver_messages() {
  if (!message_callback_) return false;
  bool wake = false;  // the transfer thread is awake and polls again after this turn
  const std::vector<Message> messages = shared_.messages.take(MessagePool::kRoom, wake);
  for (const Message& message : messages) {
    try {
      message_callback_(message);
    } catch (...) {
      Stats::add(shared_.stats.callback_errors, 1);  // see Endings::call()
    }
  }
  return !messages.empty();
}

bool DomainGroup::retry_endings() {
  const size_t ended =
      std::erase_if(endings_, [this](const Ending& ending) { return fence(*ending.domain, ending.link); });
  const size_t fallen = std::erase_if(falling_, [this](const auto& peer) { return fence_links(*peer); });
  return ended + fallen > 0;
}

std::optional<std::chrono::milliseconds> DomainGroup::longest_sleep() const {
  if (!endings_.empty() || !falling_.empty() || !disconnects_.empty()) return PollLoop::kRetry;
  const std::optional<LinkKeeper::Clock::time_point> next = keeper_.next_step();
  if (!next) return std::nullopt;
  const auto wait = std::chrono::ceil<std::chrono::milliseconds>(*next - LinkKeeper::Clock::now());
  return std::max(wait, PollLoop::kRetry);
}

bool DomainGroup::prepare_sleep() {
  if (scheduler_.has_due_layers() || retry_untaken()) return false;
  for (Domain* const domain : domains_) {
    if (!domain->completions().empty() || !domain->prepare_sleep()) return false;
  }
  return true;
}

std::vector<int> DomainGroup::fds() const {
  std::vector<int> fds;
  fds.reserve(domains_.size());
  for (const Domain* const domain : domains_) fds.push_back(domain->fd());
  return fds;
}

}  // namespace kvc
