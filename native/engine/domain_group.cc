#include "engine/domain_group.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>
#include <utility>

#include "engine/handshake.h"
#include "engine/message.h"

namespace kvc {

namespace {

// Links offered for a lane where we have fewer domains: an acceptor with up to four (the most NICs that one
// accelerator has in the paper's machines) then uses all of its own. Those not used are fenced by complete().
constexpr size_t kOfferedLinks = 4;

// How long closing waits for fences. Only a peer on this machine that is stopped in the middle of a copy needs more
// than milliseconds, and a process that ends cannot wait for it for ever.
constexpr auto kCloseTimeout = std::chrono::seconds(5);

// While something has to be asked again (a fence, a revoked key) the worker sleeps this long at most: such steps end
// without a descriptor saying so.
constexpr std::chrono::milliseconds kRetry{1};

uint32_t sequence_of(std::span<const std::byte> message) {
  uint32_t sequence = 0;
  for (size_t i = 0; i < sizeof(sequence); ++i) sequence |= static_cast<uint32_t>(message[1 + i]) << (8 * i);
  return sequence;
}

LinkId next_link_id() {
  static std::atomic<LinkId> last{0};
  return last.fetch_add(1, std::memory_order_relaxed) + 1;
}

std::string join(const std::vector<std::string>& words) {
  std::string text;
  for (const std::string& word : words) text += (text.empty() ? "" : ", ") + word;
  return text;
}

}  // namespace

DomainGroup::DomainGroup(const EngineConfig& config, Registry<Peer>& peers, Registry<Transfer>& transfers,
                         Registry<const RemoteRegion>& remote_regions, CounterSets& counters, EventQueue& events,
                         MessagePool& messages, Stats& stats)
    : config_(config),
      peers_(peers),
      remote_regions_(remote_regions),
      counters_(counters),
      events_(events),
      messages_(messages),
      stats_(stats),
      scheduler_(transfers, counters, events, stats),
      keeper_(scheduler_, counters, stats, *this),
      departures_(events, [this](Peer& peer) {
        return fence_step(peer, Error{ErrorCode::kPeerDown, {}, {}, "disconnect", "this peer has left"});
      }) {}

DomainGroup::~DomainGroup() = default;

Status DomainGroup::open() {
  for (const DomainConfig& domain_config : config_.domains) {
    Result<std::unique_ptr<Domain>> domain = config_.open(domain_config, *this);
    if (!domain) {
      if (!config_.allow_fallback) return domain.error();
      unusable_.push_back(std::move(domain.error()));
      continue;
    }
    Lane* lane = find_lane(domain_config.provider);
    if (lane == nullptr) lane = &lanes_.emplace_back(Lane{domain_config.provider, {}});
    descriptions_.push_back(domain.value()->description());
    lane->domains.push_back(std::move(domain.value()));
  }
  if (lanes_.empty()) return unusable_.front();  // config_.domains is not empty
  return {};
}

void DomainGroup::close() {
  const Error closed{ErrorCode::kClosed, {}, {}, "close", "the engine was closed"};
  const auto deadline = std::chrono::steady_clock::now() + kCloseTimeout;
  bool fenced = false;
  while (!fenced && std::chrono::steady_clock::now() < deadline) {
    fenced = true;
    for (const std::shared_ptr<Peer>& peer : peers_.all()) fenced &= fence_step(*peer, closed);
    retry_orphans();
    fenced &= orphans_.empty();
    bool progress = false;
    for (Lane& lane : lanes_) {
      for (const auto& domain : lane.domains) progress |= domain->poll();
    }
    progress |= scheduler_.settle();
    if (!fenced && !progress) std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  scheduler_.settle();
  links_.clear();
  orphans_.clear();
  lanes_.clear();
}

// --- Memory

Status DomainGroup::register_region(LocalRegion& region, int memfd, uint64_t memfd_offset) {
  for (Lane& lane : lanes_) {
    for (const auto& domain : lane.domains) {
      Result<uint64_t> rkey = domain->register_region(region.base, region.bytes, memfd, memfd_offset);
      if (!rkey) {
        // Nobody was told the keys, so nothing can be landing: one call revokes each.
        deregister_step(region);
        return rkey.error();
      }
      region.rkeys.push_back(rkey.value());
    }
  }
  return {};
}

bool DomainGroup::deregister_step(LocalRegion& region) {
  region.live.store(false, std::memory_order_relaxed);
  region.revoked.resize(region.rkeys.size(), false);
  bool all = region.batches_in_flight == 0;
  size_t index = 0;
  for (Lane& lane : lanes_) {
    for (const auto& domain : lane.domains) {
      if (index == region.rkeys.size()) return all;  // registration failed half way
      if (!region.revoked[index]) region.revoked[index] = domain->deregister_region(region.rkeys[index]);
      all &= region.revoked[index];
      ++index;
    }
  }
  return all;
}

std::vector<std::pair<std::string, std::vector<uint64_t>>> DomainGroup::lane_rkeys(const LocalRegion& region) const {
  std::vector<std::pair<std::string, std::vector<uint64_t>>> keys;
  auto next = region.rkeys.begin();
  for (const Lane& lane : lanes_) {
    const auto end = next + static_cast<ptrdiff_t>(lane.domains.size());
    keys.emplace_back(lane.provider, std::vector<uint64_t>(next, end));
    next = end;
  }
  return keys;
}

// --- Peers

Result<Handshake> DomainGroup::offer(PeerId id, std::string name) {
  auto peer = std::make_shared<Peer>(id, std::move(name));
  peer->offerer = true;
  Offer offer{config_.name, {}};
  for (Lane& lane : lanes_) {
    LaneOffer& lane_offer =
        offer.lanes.emplace_back(LaneOffer{lane.provider, static_cast<uint32_t>(lane.domains.size()), {}});
    const size_t count = std::max(lane.domains.size(), kOfferedLinks);
    for (size_t i = 0; i < count; ++i) {
      const size_t local = i % lane.domains.size();
      Domain* domain = lane.domains[local].get();
      const LinkId link = next_link_id();
      Result<Bytes> bytes = domain->offer(link);
      if (!bytes) {
        abandon(peer->links);
        return bytes.error();
      }
      peer->links.emplace_back(link, domain, static_cast<uint32_t>(local));
      lane_offer.links.push_back(std::move(bytes.value()));
    }
  }
  for (Link& link : peer->links) links_.emplace(link.id, Place{peer.get(), &link});
  peers_.insert(id, peer);
  return Handshake{id, encode(offer), {}};
}

Result<Handshake> DomainGroup::accept(PeerId id, std::string name, std::span<const std::byte> bytes) {
  const std::optional<Offer> offer = decode_offer(bytes);
  if (!offer) {
    return Error{
        ErrorCode::kInvalidArgument, {}, std::move(name), "accept", "not an offer of an engine of this version"};
  }
  if (name.empty()) name = offer->engine;
  auto peer = std::make_shared<Peer>(id, std::move(name));
  Handshake handshake{id, {}, {}};
  std::vector<std::string> offered;
  for (const LaneOffer& lane_offer : offer->lanes) {
    offered.push_back(lane_offer.provider);
    Lane* lane = find_lane(lane_offer.provider);
    if (lane == nullptr) {
      handshake.passed_over.push_back(lane_offer.provider + ": not configured here");
      continue;
    }
    Answer answer{config_.name, lane->provider, static_cast<uint32_t>(lane->domains.size()), {}};
    Result<std::vector<Link>> links = accept_lane(*lane, lane_offer.domains, lane_offer.links, answer.links);
    if (!links) {
      links.error().peer = peer->name;
      if (links.error().code != ErrorCode::kNotReachable && !config_.allow_fallback) return links.error();
      handshake.passed_over.push_back(lane_offer.provider + ": " + links.error().to_string());
      continue;
    }
    peer->links = std::move(links.value());
    for (Link& link : peer->links) links_.emplace(link.id, Place{peer.get(), &link});
    peer->provider = lane->provider;
    peer->remote_domains = lane_offer.domains;
    weigh(*peer);
    peer->state.store(Peer::State::kConnected, std::memory_order_release);
    peers_.insert(id, peer);
    handshake.bytes = encode(answer);
    return handshake;
  }
  std::vector<std::string> configured;
  configured.reserve(lanes_.size());
  for (const Lane& lane : lanes_) configured.push_back(lane.provider);
  return Error{ErrorCode::kNotReachable,
               {},
               peer->name,
               "accept",
               "no common lane: it offers " + join(offered) + "; configured here: " + join(configured) +
                   (handshake.passed_over.empty() ? "" : " (" + join(handshake.passed_over) + ")")};
}

Result<std::vector<Link>> DomainGroup::accept_lane(Lane& lane, uint32_t offerer_domains,
                                                   const std::vector<Bytes>& offers, std::vector<Bytes>& answers) {
  const size_t count = std::min(std::max<size_t>(lane.domains.size(), offerer_domains), offers.size());
  std::vector<Link> links;
  for (size_t i = 0; i < count; ++i) {
    const size_t local = i % lane.domains.size();
    Domain* domain = lane.domains[local].get();
    const LinkId id = next_link_id();
    Result<Bytes> answer = domain->accept(id, offers[i]);
    if (!answer) {
      abandon(links);
      return answer.error();
    }
    links.emplace_back(id, domain, static_cast<uint32_t>(local), static_cast<uint32_t>(i % offerer_domains));
    answers.push_back(std::move(answer.value()));
  }
  return links;
}

Status DomainGroup::complete(const std::shared_ptr<Peer>& peer, std::span<const std::byte> bytes) {
  if (peer->links.empty() || !peer->provider.empty()) {
    return Error{ErrorCode::kInvalidArgument, {}, peer->name, "complete", "this peer has no offer open"};
  }
  // Whatever comes of it, the offer is used up. `offered` becomes the links that are left over.
  std::vector<Link> offered = std::exchange(peer->links, {});
  for (const Link& link : offered) forget_link(link.id);
  const auto refuse = [&](Error error) {
    for (const Link& link : peer->links) forget_link(link.id);
    abandon(std::exchange(peer->links, {}));
    abandon(offered);
    peers_.erase(peer->id);
    if (error.peer.empty()) error.peer = peer->name;
    return error;
  };

  if (peer->down) return refuse(*peer->down);  // fence() has begun
  const std::optional<Answer> answer = decode_answer(bytes);
  if (!answer) {
    return refuse({ErrorCode::kInvalidArgument, {}, {}, "complete", "not an answer of an engine of this version"});
  }
  Lane* lane = find_lane(answer->provider);
  if (lane == nullptr) {
    return refuse({ErrorCode::kInvalidArgument, answer->provider, {}, "complete", "a lane that was not offered"});
  }
  // The links of our lanes stand in `offered` one lane after the other.
  const auto first = std::find_if(offered.begin(), offered.end(),
                                  [&](const Link& link) { return link.domain == lane->domains[0].get(); });
  const size_t lane_links = std::max(lane->domains.size(), kOfferedLinks);
  const size_t count = std::max<size_t>(lane->domains.size(), answer->domains);
  if (answer->links.size() != std::min(count, lane_links)) {
    return refuse({ErrorCode::kInvalidArgument,
                   answer->provider,
                   {},
                   "complete",
                   std::to_string(answer->links.size()) + " links answered, which is not what was offered"});
  }
  // Known before anything is asked of a domain: the peer may write, and part, as soon as it hears of a link, and a
  // domain takes in what has come while it completes that link and while it ends those that are left over.
  const auto last = first + static_cast<ptrdiff_t>(answer->links.size());
  peer->links.assign(std::make_move_iterator(first), std::make_move_iterator(last));
  offered.erase(first, last);
  for (Link& link : peer->links) links_.emplace(link.id, Place{peer.get(), &link});
  for (size_t i = 0; i < peer->links.size(); ++i) {
    Link& link = peer->links[i];
    link.remote_domain = static_cast<uint32_t>(i % answer->domains);
    if (link.broken) return refuse(*link.broken);
    if (Status status = link.domain->complete(link.id, answer->links[i]); !status) return refuse(status.error());
    if (link.broken) return refuse(*link.broken);
  }
  peer->provider = lane->provider;
  peer->remote_domains = answer->domains;
  weigh(*peer);
  peer->state.store(Peer::State::kConnected, std::memory_order_release);
  if (peer->parting.heard) departures_.hear(peer);  // it said goodbye before its answer was here
  abandon(offered);
  return {};
}

bool DomainGroup::fence_step(Peer& peer, const Error& why) {
  if (peer.state.load(std::memory_order_relaxed) != Peer::State::kFencing) {
    peer.state.store(Peer::State::kFencing, std::memory_order_release);
    scheduler_.fail_peer(peer, why);
    keeper_.forget(peer);
  }
  if (!fence_links(peer)) return false;
  for (const Link& link : peer.links) forget_link(link.id);
  keeper_.forget(peer);  // once more: links may have ended while they were fenced
  for (auto& region : remote_regions_.erase_if([&](const RemoteRegion& region) { return region.peer == peer.id; })) {
    scheduler_.retire(std::move(region));
  }
  peers_.erase(peer.id);
  return true;
}

bool DomainGroup::fence_links(Peer& peer) {
  bool all = true;
  for (Link& link : peer.links) {
    if (!link.fenced) link.fenced = link.domain->fence(link.id);
    all &= link.fenced;
  }
  return all;
}

void DomainGroup::abandon(std::span<const Link> links) {
  for (const Link& link : links) {
    if (!link.domain->fence(link.id)) orphans_.push_back({link.domain, link.id});
  }
}

size_t DomainGroup::lane_domains(std::string_view provider) const {
  const auto found =
      std::find_if(lanes_.begin(), lanes_.end(), [&](const Lane& lane) { return lane.provider == provider; });
  return found == lanes_.end() ? 0 : found->domains.size();
}

DomainGroup::Lane* DomainGroup::find_lane(std::string_view provider) {
  const auto found =
      std::find_if(lanes_.begin(), lanes_.end(), [&](const Lane& lane) { return lane.provider == provider; });
  return found == lanes_.end() ? nullptr : &*found;
}

// --- What domains tell

void DomainGroup::on_immediate(LinkId id, uint32_t immediate) noexcept {
  if (id == 0) keeper_.lose_count();
  // Counted for the link too, where there is another one that could have to stand in for it.
  if (const Place place = find_link(id); place.peer != nullptr && place.peer->links.size() > 1) {
    place.link->counted.add(immediate);
  }
  CounterSets::Added added = counters_.add(immediate);
  const uint32_t pages = Immediate::decode(immediate).multiplicity;
  Stats::add(stats_.immediates_received, pages);
  if (added.stale) Stats::add(stats_.immediates_stale, pages);
  if (added.fired) scheduler_.fired(std::move(*added.fired));
}

bool DomainGroup::on_message(LinkId id, std::span<const std::byte> message) noexcept {
  const Place place = find_link(id);
  if (place.peer == nullptr || message.empty()) return true;  // an orphan's: nobody is there to read it
  Peer& peer = *place.peer;
  switch (static_cast<MessageTag>(message[0])) {
    case MessageTag::kUser: {
      if (message.size() <= kUserHeaderBytes) return true;
      const uint32_t sequence = sequence_of(message);
      if (peer.messages_seen.seen(sequence)) return true;  // sent again over another link
      if (!messages_.put(peer.id, message.subspan(kUserHeaderBytes))) return false;
      peer.messages_seen.add(sequence);
      return true;
    }
    case MessageTag::kGoodbye:
      if (const std::shared_ptr<Peer> leaving = peers_.find(peer.id)) departures_.hear(leaving);
      return true;
    default:
      // Before the answer to our offer is here, the peer may have lost a link already: it says so again.
      if (!peer.provider.empty()) keeper_.receive(peer, id, message);
      return true;
  }
}

void DomainGroup::on_link_down(LinkId id, const Error& error, bool fenced) noexcept {
  const Place place = find_link(id);
  if (place.peer == nullptr) return;  // an orphan
  Peer& peer = *place.peer;
  Link& link = *place.link;
  if (id == link.id) link.fenced |= fenced;
  if (peer.provider.empty()) {
    // One link of an offer: the acceptor may have tried this lane, given it up, and be about to answer with another.
    link.broken = error;
    return;
  }
  if (departures_.link_ended(peer)) return;
  keeper_.broke(peer, link, id, error);  // its other links may belong to the domain that is calling: later
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

void DomainGroup::abandon_link(Domain& domain, LinkId id) {
  if (!domain.fence(id)) orphans_.push_back({&domain, id});
}

// Domains of unknown speed among them: all are taken for equal.
void DomainGroup::weigh(Peer& peer) {
  peer.limits = peer.links.front().domain->limits();
  double fastest = 0;
  bool known = true;
  for (Link& link : peer.links) {
    const auto sharing = std::count_if(peer.links.begin(), peer.links.end(),
                                       [&](const Link& other) { return other.domain == link.domain; });
    const auto speed = static_cast<double>(link.domain->bits_per_second()) / static_cast<double>(sharing);
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
  fence_links(peer);  // completes what is posted on its other links; fence() asks again
  events_.push(Event{.kind = EventKind::kPeerDown, .id = peer.id, .error = std::move(error)});
}

// --- The worker's turn

bool DomainGroup::turn() {
  bool any = scheduler_.post_due_layers();
  any |= scheduler_.post();
  for (Lane& lane : lanes_) {
    for (const auto& domain : lane.domains) any |= domain->poll();
  }
  any |= keeper_.step();
  any |= deliver_messages();
  any |= scheduler_.settle();
  any |= departures_.turn();
  any |= retry_orphans();
  return any;
}

bool DomainGroup::deliver_messages() {
  if (!message_callback_) return false;
  bool wake = false;  // the worker is awake: it polls again after this turn
  const std::vector<Message> messages = messages_.take(MessagePool::kRoom, wake);
  for (const Message& message : messages) {
    try {
      message_callback_(message);
    } catch (...) {
      Stats::add(stats_.callback_errors, 1);  // see TransferScheduler::call()
    }
  }
  return !messages.empty();
}

bool DomainGroup::retry_orphans() {
  return std::erase_if(orphans_, [](const Orphan& orphan) { return orphan.domain->fence(orphan.link); }) > 0;
}

std::optional<std::chrono::milliseconds> DomainGroup::longest_sleep() const {
  if (!orphans_.empty() || !departures_.empty()) return kRetry;
  const std::optional<LinkKeeper::Clock::time_point> next = keeper_.next_step();
  if (!next) return std::nullopt;
  const auto wait = std::chrono::ceil<std::chrono::milliseconds>(*next - LinkKeeper::Clock::now());
  return std::max(wait, kRetry);
}

bool DomainGroup::prepare_sleep() {
  if (scheduler_.has_due_layers() || messages_.room_again()) return false;
  for (Lane& lane : lanes_) {
    for (const auto& domain : lane.domains) {
      if (!domain->prepare_sleep()) return false;
    }
  }
  return true;
}

std::vector<int> DomainGroup::fds() const {
  std::vector<int> fds;
  for (const Lane& lane : lanes_) {
    for (const auto& domain : lane.domains) fds.push_back(domain->fd());
  }
  return fds;
}

}  // namespace kvc
