#include "engine/link_keeper.h"

#include <algorithm>
#include <array>
#include <string>
#include <utility>

namespace kvc {

namespace {

// Time until a question is repeated. It is many times longer than an answer takes (two turns and a round trip, together
// below 1 ms), and well below kSettleTime. A repeated question does no harm.
constexpr auto kAskAgain = std::chrono::milliseconds(100);

// Limit for the peer to close its end and answer, and for this end to close. A fence waits for the end of a copy at
// most, so only a stopped peer needs longer. After 5 s of silence, membership declares it dead as well.
constexpr auto kSettleTime = std::chrono::seconds(5);

// Pauses between offers of a link that is out. A pulled cable comes back within seconds (link training takes 2 to 5 s),
// a switch within a minute. The first try comes soon, for a queue pair that only had to be made again. The pause then
// doubles up to 10 s, at which the offers cost almost nothing.
constexpr auto kFirstPause = std::chrono::milliseconds(100);
constexpr auto kLongestPause = std::chrono::milliseconds(10000);
// A link that was up this long after its return is considered unrelated to its last failure.
constexpr auto kStableTime = kLongestPause;

// Limit for the answer to an offer and for the hello over a new link: a round trip, plus tcp's first retry of a lost
// SYN.
constexpr auto kProveTime = std::chrono::milliseconds(2000);

// A step that is this late shows that this process was stopped (SIGSTOP, a paused machine). A turn takes milliseconds
// at most, and the thread wakes in time for due work. The shortest limit above is twice as long.
constexpr auto kStopped = std::chrono::milliseconds(1000);

// Messages about links that wait for step(). A step handles all of them, so only a flood reaches this limit. Questions
// that are dropped here are repeated.
constexpr size_t kMaxReceived = 1024;

// A link that is being proved counts too: settlements wait for its outcome at most.
bool other_link_works(const Peer& peer, const Link& than) {
  return std::any_of(peer.links.begin(), peer.links.end(), [&](const Link& link) {
    return &link != &than && (link.state == Link::State::kUp || link.state == Link::State::kProving);
  });
}

uint8_t place_of(const Peer& peer, const Link& link) { return static_cast<uint8_t>(&link - peer.links.data()); }

bool ending(const Peer& peer) {
  const Peer::State state = peer.state.load(std::memory_order_relaxed);
  return state == Peer::State::kDown || state == Peer::State::kFencing;
}

}  // namespace

void LinkKeeper::broke(Peer& peer, Link& link, LinkId id, const Error& error) {
  if (noted(link, id)) return;
  link.noted = id;
  broken_.push_back({&peer, &link, id, error});
}

void LinkKeeper::receive(Peer& peer, LinkId id, std::span<const std::byte> message) {
  if (received_.size() < kMaxReceived) received_.push_back({&peer, id, Bytes(message.begin(), message.end())});
}

void LinkKeeper::forget(Peer& peer) {
  for (Link& link : peer.links) {
    if (link.repair != nullptr && link.repair->offered != 0) withdraw(link);
  }
  std::erase_if(broken_, [&](const Broken& broken) { return broken.peer == &peer; });
  std::erase_if(received_, [&](const Received& received) { return received.peer == &peer; });
  std::erase_if(repairs_, [&](const Repair& repair) { return repair.peer == &peer; });
  std::erase(wanting_, &peer);
}

void LinkKeeper::make_links(Peer& peer) {
  peer.resting = false;
  if (!peer.offerer) return wanting_.push_back(&peer);
  for (Link& link : peer.links) {
    if (link.state != Link::State::kOut || link.repair != nullptr) continue;
    link.repair = std::make_unique<LinkRepair>();
    link.repair->pause = kFirstPause / 2;  // doubled when a try fails
    link.repair->due = Clock::now();
    watch(peer, link);
  }
}

bool LinkKeeper::step() {
  if (broken_.empty() && received_.empty() && repairs_.empty() && wanting_.empty()) return false;
  now_ = Clock::now();
  forgive_own_silence();
  bool any = !broken_.empty() || !received_.empty();
  const std::array want{static_cast<std::byte>(MessageTag::kLinksWanted)};
  std::erase_if(wanting_, [&](Peer* peer) { return scheduler_.send(*peer, want); });
  // Each of these may end a peer, which makes other entries of that peer meaningless, and may add new entries.
  while (!broken_.empty()) {
    for (const Broken& broken : std::exchange(broken_, {})) take_out(broken);
  }
  while (!received_.empty()) {
    for (const Received& received : std::exchange(received_, {})) {
      if (ending(*received.peer) || handle(received)) continue;
      owner_.lose_peer(*received.peer,
                       Error{ErrorCode::kPeerDown, {}, {}, "links", "the peer sent a malformed message"});
    }
  }
  for (size_t i = 0; i < repairs_.size();) {
    const Repair repair = repairs_[i];
    any |= advance(*repair.peer, *repair.link);
    // The entry was removed with its peer, and another one is at its place.
    if (i >= repairs_.size() || repairs_[i].link != repair.link) continue;
    const bool waits_for_peer = repair.link->state == Link::State::kOut && !repair.peer->offerer;
    if (repair.link->state != Link::State::kUp && !waits_for_peer) {
      ++i;
      continue;
    }
    repairs_[i] = repairs_.back();
    repairs_.pop_back();
  }
  return any;
}

// Messages that arrived while this process was stopped are read after this step, so the peers' limits start again.
void LinkKeeper::forgive_own_silence() {
  if (repairs_.empty()) return;
  const auto due = [](const Repair& repair) { return repair.link->repair->due; };
  const Clock::duration late = now_ - due(*std::min_element(repairs_.begin(), repairs_.end(),
                                                            [&](auto& a, auto& b) { return due(a) < due(b); }));
  if (late < kStopped) return;
  for (const Repair& repair : repairs_) {
    repair.link->repair->began = now_;
    if (repair.link->state == Link::State::kOffered) repair.link->repair->due = now_ + kProveTime;
  }
}

void LinkKeeper::append_lost(const Peer& peer, const std::vector<std::string>& domains, std::vector<LostLink>& lost) {
  if (ending(peer)) return;
  for (const Link& link : peer.links) {
    if (link.repair == nullptr || link.repair->times_lost == 0) continue;
    Error reason = link.repair->why;
    if (reason.provider.empty()) reason.provider = peer.provider;
    lost.push_back({.peer = peer.id,
                    .link = place_of(peer, link),
                    .links = static_cast<uint32_t>(peer.links.size()),
                    .domain = domains[link.domain_place],
                    .times_lost = link.repair->times_lost,
                    .up = link.state == Link::State::kUp,
                    .reason = std::move(reason)});
  }
}

std::optional<LinkKeeper::Clock::time_point> LinkKeeper::next_step() const {
  std::optional<Clock::time_point> next;
  if (!wanting_.empty()) next = now_;
  for (const Repair& repair : repairs_) {
    if (!next || repair.link->repair->due < *next) next = repair.link->repair->due;
  }
  return next;
}

void LinkKeeper::enter(Link& link, Link::State state, Clock::duration wait) {
  link.state = state;
  link.repair->began = now_;
  link.repair->due = now_ + wait;
}

// --- Links that break

void LinkKeeper::take_out(const Broken& broken) {
  Peer& peer = *broken.peer;
  Link& link = *broken.link;
  if (ending(peer)) return;
  if (link.state == Link::State::kOffered && broken.id == link.repair->offered) {
    withdraw(link);
    return pause(link);
  }
  if (broken.id != link.id || (link.state != Link::State::kUp && link.state != Link::State::kProving)) return;
  if (!other_link_works(peer, link)) return owner_.lose_peer(peer, broken.error);
  const bool first = link.repair == nullptr;
  if (first) link.repair = std::make_unique<LinkRepair>();
  LinkRepair& repair = *link.repair;
  const bool up = link.state == Link::State::kUp;
  repair.was_up |= up;
  if (up) {
    ++repair.times_lost;
    Stats::add(stats_.links_lost, 1);
    Stats::add(stats_.links, -1);
  }
  const bool stable = up && now_ - repair.up_since > kStableTime;
  repair.pause = first || stable ? kFirstPause : std::min(repair.pause * 2, kLongestPause);
  repair.why = broken.error;
  repair.asking = false;
  repair.ask_due = now_;
  repair.landed.clear();
  repair.answered.clear();
  repair.peer_asks.clear();
  enter(link, Link::State::kBroken, {});
  watch(peer, link);
}

void LinkKeeper::watch(Peer& peer, Link& link) {
  const bool known =
      std::any_of(repairs_.begin(), repairs_.end(), [&](const Repair& other) { return other.link == &link; });
  if (!known) repairs_.push_back({&peer, &link});
}

bool LinkKeeper::advance(Peer& peer, Link& link) {
  LinkRepair& repair = *link.repair;
  switch (link.state) {
    case Link::State::kUp:
      return false;
    case Link::State::kBroken:
      if (close_and_ask(peer, link)) return true;
      if (now_ - repair.began > kSettleTime) {
        Error error = repair.why;
        error.message += " (and the peer did not report within 5 s what had landed over the link)";
        owner_.lose_peer(peer, std::move(error));
        return true;
      }
      return false;
    case Link::State::kOut:
      if (!peer.offerer || now_ < repair.due) return false;
      offer(peer, link);
      return true;
    case Link::State::kOffered:
      if (now_ < repair.due) return false;
      withdraw(link);
      pause(link);
      return true;
    case Link::State::kProving:
      prove(peer, link);
      if (link.state == Link::State::kUp || now_ - repair.began <= kProveTime) return false;
      take_out({&peer, &link, link.id, Error{ErrorCode::kTimeout, {}, {}, "links", "the new link carries no data"}});
      return true;
  }
  return false;
}

// Closes this end, answers the peer's question and sends the own question. Returns true if the link is settled.
bool LinkKeeper::close_and_ask(Peer& peer, Link& link) {
  LinkRepair& repair = *link.repair;
  if (!link.fenced) link.fenced = owner_.fence(*link.domain, link.id);
  repair.due = now_;
  if (!link.fenced) return false;
  std::erase_if(repair.peer_asks, [&](const LinkMessage& question) { return answer(peer, link, question); });
  if (!repair.asking) {
    // This end is closed, so no entry is added to the unsettled ones any more.
    repair.asking = true;
    for (const uint32_t counter : scheduler_.unsettled_counters(link)) repair.landed.push_back({.counter = counter});
    repair.answered.assign(
        std::max<size_t>((repair.landed.size() + LinkMessage::kMaxNumbers - 1) / LinkMessage::kMaxNumbers, 1), false);
    repair.began = now_;
  }
  if (std::find(repair.answered.begin(), repair.answered.end(), false) == repair.answered.end()) {
    settle(peer, link);
    return true;
  }
  if (now_ < repair.ask_due) {
    repair.due = repair.peer_asks.empty() ? repair.ask_due : now_;
    return false;
  }
  bool asked = true;
  for (size_t part = 0; part < repair.answered.size(); ++part) {
    if (repair.answered[part]) continue;
    LinkMessage question{.tag = MessageTag::kLinkLost,
                         .link = place_of(peer, link),
                         .epoch = link.epoch,
                         .part = static_cast<uint16_t>(part)};
    const size_t first = part * LinkMessage::kMaxNumbers;
    const size_t last = std::min(first + LinkMessage::kMaxNumbers, repair.landed.size());
    for (size_t i = first; i < last; ++i) question.numbers.push_back(repair.landed[i].counter);
    asked &= scheduler_.send(peer, encode(question));
  }
  if (!asked) return false;  // no link took all parts: try again in the next turn
  repair.ask_due = now_ + kAskAgain;
  if (repair.peer_asks.empty()) repair.due = repair.ask_due;
  return false;
}

void LinkKeeper::settle(Peer& peer, Link& link) {
  owner_.forget_link(std::exchange(link.id, 0));
  scheduler_.recover(peer, link, link.repair->landed);
  enter(link, Link::State::kOut, link.repair->pause);
}

// --- Messages of the peer

bool LinkKeeper::handle(const Received& received) {
  Peer& peer = *received.peer;
  if (received.bytes.size() == 1 && received.bytes[0] == static_cast<std::byte>(MessageTag::kLinksWanted)) {
    if (peer.offerer) make_links(peer);
    return peer.offerer;
  }
  std::optional<LinkMessage> message = decode_link_message(received.bytes);
  if (!message || message->link >= peer.links.size() || peer.links.size() < 2) return false;
  Link& link = peer.links[message->link];
  switch (message->tag) {
    case MessageTag::kLinkLost:
      hear_lost(peer, link, *std::move(message));
      return true;
    case MessageTag::kTallies:
      return hear_tallies(link, *message);
    case MessageTag::kLinkOffer:
      if (peer.offerer) return false;
      hear_offer(peer, link, *std::move(message));
      return true;
    case MessageTag::kLinkAnswer:
      if (!peer.offerer) return false;
      hear_answer(peer, link, *std::move(message));
      return true;
    case MessageTag::kLinkHello:
      // Arrives over the new link itself, perhaps before the answer, which uses another link.
      if (link.repair == nullptr) return true;
      if (received.id == link.id || received.id == link.repair->offered) link.repair->hello_heard = true;
      return true;
    default:
      return false;
  }
}

void LinkKeeper::hear_lost(Peer& peer, Link& link, LinkMessage message) {
  if (message.epoch == link.epoch) {
    if (link.state == Link::State::kUp || link.state == Link::State::kProving) {
      take_out({&peer, &link, link.id,
                Error{ErrorCode::kPeerDown, {}, {}, "links", "the peer reported that the link broke"}});
      if (ending(peer)) return;
    }
    if (link.fenced && answer(peer, link, message)) return;
    // At most as many parts as all counters need. Later questions are dropped here and repeated by the peer.
    if (link.state == Link::State::kBroken &&
        link.repair->peer_asks.size() <= (1U << Immediate::kSlotBits) / LinkMessage::kMaxNumbers) {
      link.repair->peer_asks.push_back(std::move(message));
    }
  } else if (message.epoch > link.epoch && link.repair != nullptr && message.epoch <= link.repair->last_epoch) {
    // The peer accepted an offer whose answer arrived too late here: neither side has posted anything on that link.
    if (link.state == Link::State::kOffered && message.epoch == link.repair->last_epoch) {
      withdraw(link);
      pause(link);
    }
    if (message.numbers.empty()) (void)answer(peer, link, message);
  }
}

bool LinkKeeper::answer(Peer& peer, const Link& link, const LinkMessage& question) {
  LinkMessage tallies{
      .tag = MessageTag::kTallies, .link = question.link, .epoch = question.epoch, .part = question.part};
  for (const uint32_t counter : question.numbers) {
    const std::optional<uint32_t> pages = link.counted.pages(counter);
    if (!pages) {
      tallies.numbers.push_back(LinkMessage::kUnknown);
    } else {
      // In this order: a counter that is released in between is at least reported as released.
      const bool acted_on = counters_.acted_on(counter);
      const bool released = !counters_.live(counter);
      tallies.numbers.push_back(*pages | (released ? LinkMessage::kReleased : 0) |
                                (acted_on ? LinkMessage::kActedOn : 0));
    }
  }
  return scheduler_.send(peer, encode(tallies));
}

// Returns false if the message does not fit the question.
bool LinkKeeper::hear_tallies(Link& link, const LinkMessage& message) {
  // The second answer to a repeated question may arrive late.
  if (message.epoch != link.epoch || link.state != Link::State::kBroken || !link.repair->asking) return true;
  LinkRepair& repair = *link.repair;
  if (message.part >= repair.answered.size()) return false;
  const size_t first = message.part * LinkMessage::kMaxNumbers;
  if (message.numbers.size() != std::min(repair.landed.size() - first, LinkMessage::kMaxNumbers)) return false;
  for (size_t i = 0; i < message.numbers.size(); ++i) {
    Landed& landed = repair.landed[first + i];
    const uint32_t number = message.numbers[i];
    landed.known = number != LinkMessage::kUnknown;
    landed.released = (number & LinkMessage::kReleased) != 0;
    landed.acted_on = (number & LinkMessage::kActedOn) != 0;
    landed.pages = number & ~(LinkMessage::kReleased | LinkMessage::kActedOn);
    if (landed.known && landed.pages >= LinkTally::kModulus) return false;
  }
  repair.answered[message.part] = true;
  return true;
}

// --- Links that return

void LinkKeeper::pause(Link& link) {
  LinkRepair& repair = *link.repair;
  repair.pause = std::min(repair.pause * 2, kLongestPause);
  enter(link, Link::State::kOut, repair.pause);
}

void LinkKeeper::withdraw(Link& link) {
  const LinkId id = std::exchange(link.repair->offered, 0);
  link.state = Link::State::kOut;
  owner_.forget_link(id);
  owner_.abandon_link(link, id);
}

Link* LinkKeeper::still_making(Peer& peer, size_t place, LinkId id) {
  Link& link = peer.links[place];
  const bool making = !ending(peer) && link.repair != nullptr && link.repair->offered == id;
  return making ? &link : nullptr;
}

void LinkKeeper::offer(Peer& peer, Link& link) {
  LinkRepair& repair = *link.repair;
  repair.offered = owner_.new_link(peer, link);
  repair.hello_heard = false;
  enter(link, Link::State::kOffered, kProveTime);
  owner_.offer_link(peer, link, repair.offered);
}

void LinkKeeper::offered(Peer& peer, size_t place, LinkId id, Result<Bytes> offer) {
  Link* const link = still_making(peer, place, id);
  if (link == nullptr) return;  // withdrawn meanwhile
  LinkRepair& repair = *link->repair;
  now_ = Clock::now();
  bool sent = false;
  if (offer && offer.value().size() <= LinkMessage::kMaxBytes) {
    sent = scheduler_.send(peer, encode({.tag = MessageTag::kLinkOffer,
                                         .link = place_of(peer, *link),
                                         .epoch = ++repair.last_epoch,
                                         .bytes = std::move(offer.value())}));
  }
  if (sent) return enter(*link, Link::State::kOffered, kProveTime);
  withdraw(*link);  // the device does not work yet, or no link takes the message
  pause(*link);
}

void LinkKeeper::hear_offer(Peer& peer, Link& link, LinkMessage message) {
  // Any other state of the link (for example, its last failure is not settled) lets the offer expire. The peer offers
  // again.
  if (link.state != Link::State::kOut || message.epoch <= link.epoch) return;
  if (link.repair == nullptr) link.repair = std::make_unique<LinkRepair>();
  LinkRepair& repair = *link.repair;
  if (repair.offered != 0) return;
  repair.offered = owner_.new_link(peer, link);
  repair.hello_heard = false;
  owner_.accept_link(peer, link, repair.offered, message.epoch, std::move(message.bytes));
}

void LinkKeeper::accepted(Peer& peer, size_t place, LinkId id, uint32_t epoch, Result<Connector::Accepted>& accepted) {
  Link* const link = still_making(peer, place, id);
  if (link == nullptr) return;
  now_ = Clock::now();
  LinkMessage reply{.tag = MessageTag::kLinkAnswer, .link = place_of(peer, *link), .epoch = epoch};
  const bool made = accepted && accepted.value().answer.size() <= LinkMessage::kMaxBytes;
  if (made) {
    // Attached first: messages may arrive as soon as the peer has the answer.
    link->domain->attach(id, std::move(accepted.value().end));
    reply.bytes = std::move(accepted.value().answer);
  }
  link->repair->offered = 0;
  const bool sent = scheduler_.send(peer, encode(reply));
  if (!made || !sent) {
    owner_.forget_link(id);
    return owner_.abandon_link(*link, id);
  }
  renew(*link, id, epoch);
  watch(peer, *link);
}

void LinkKeeper::hear_answer(Peer& peer, Link& link, LinkMessage message) {
  if (link.state != Link::State::kOffered || message.epoch != link.repair->last_epoch) return;
  if (!message.bytes.empty()) return owner_.complete_link(peer, link, link.repair->offered, std::move(message.bytes));
  withdraw(link);
  pause(link);
}

void LinkKeeper::completed(Peer& peer, size_t place, LinkId id, Result<std::unique_ptr<LinkEnd>>& end) {
  Link* const link = still_making(peer, place, id);
  if (link == nullptr) return;
  now_ = Clock::now();
  if (!end) {
    withdraw(*link);
    return pause(*link);
  }
  link->domain->attach(id, std::move(end.value()));
  link->repair->offered = 0;
  renew(*link, id, link->repair->last_epoch);
}

// Replaces the link. A side posts on the new link only after the other side has said hello over it, which happens after
// this call. So the old link's accounts are not needed any more, and the new ones start at zero.
void LinkKeeper::renew(Link& link, LinkId id, uint32_t epoch) {
  link.id = id;
  link.epoch = epoch;
  link.fenced = false;
  link.posted.clear();
  link.counted.clear();
  link.refused.clear();
  link.repair->hello_said = false;
  enter(link, Link::State::kProving, {});
}

void LinkKeeper::prove(Peer& peer, Link& link) {
  LinkRepair& repair = *link.repair;
  if (!repair.hello_said) {
    repair.hello_said = scheduler_.send(
        peer, encode({.tag = MessageTag::kLinkHello, .link = place_of(peer, link), .epoch = link.epoch}), &link);
  }
  repair.due = repair.hello_said ? repair.began + kProveTime : now_;
  if (!repair.hello_said || !repair.hello_heard) return;
  enter(link, Link::State::kUp, {});
  repair.up_since = now_;
  Stats::add(stats_.links, 1);
  if (repair.was_up) Stats::add(stats_.links_restored, 1);
  repair.was_up = true;
}

}  // namespace kvc
