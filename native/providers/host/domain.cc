#include "providers/host/domain.h"

#include <algorithm>
#include <utility>

namespace kvc::host {

namespace {

// Control messages that a turn sends, and about how many it reads. A message with a memfd takes 2 us to send, and 6 us
// to read and map.
constexpr uint32_t kToldPerTurn = 16;
constexpr uint32_t kHeardPerTurn = 16;

}  // namespace

HostDomain::~HostDomain() {
  for (auto& [id, link] : links_) {
    link->close(kLane.error(ErrorCode::kClosed, "close", "the domain is closed"));
    control_.dispose(std::move(link));
  }
}

// --- Memory

void HostDomain::publish(Registration& registration) {
  const auto& region = static_cast<const Region&>(registration);
  Memory& memory = *region.memory;
  if (memory.fd && memory.published++ == 0) {
    memory.name = ++memories_.last;
    memories_.by_name.emplace(memory.name, &memory);  // the links announce these memfds to their peers
  }
  RegionEntry& entry = board_.regions[place_of(region.key)];
  entry.base.store(reinterpret_cast<uint64_t>(region.base), std::memory_order_relaxed);
  entry.length.store(region.bytes, std::memory_order_relaxed);
  entry.memory.store(memory.name, std::memory_order_relaxed);
  entry.memory_offset.store(region.offset, std::memory_order_relaxed);
  entry.rkey.store(region.key, std::memory_order_release);
}

bool HostDomain::withdraw(Registration& registration) {
  auto& region = static_cast<Region&>(registration);
  if (!std::exchange(region.revoked, true)) {
    board_.regions[place_of(region.key)].rkey.store(0, std::memory_order_seq_cst);
    for (const auto& [id, link] : links_) {
      if (const uint64_t gate = link->gate(); gate % 2 != 0) region.inside.emplace_back(id, gate);
    }
  }
  std::erase_if(region.inside, [this](const auto& entry) {
    const Link* link = find(entry.first);
    return link == nullptr || link->left_gate(entry.second);
  });
  if (!region.inside.empty()) return false;
  Memory& memory = *region.memory;
  if (memory.fd && --memory.published == 0) {
    memories_.by_name.erase(memory.name);
    for (const auto& [id, link] : links_) link->forget(memory.name);
  }
  return true;
}

// --- Links

Link* HostDomain::find(LinkId link) noexcept {
  const auto found = links_.find(link);
  return found == links_.end() ? nullptr : found->second.get();
}

void HostDomain::attach(LinkId id, std::unique_ptr<LinkEnd> end) {
  const std::shared_ptr<Connection> connection(static_cast<Connection*>(end.release()));
  auto link = std::make_unique<Link>(id, connection, LinkContext{events_, completions_, control_}, memories_);
  link->begin();
  links_.emplace(id, std::move(link));
}

bool HostDomain::fence(LinkId id) {
  const auto found = links_.find(id);
  if (found == links_.end()) return true;
  Link& link = *found->second;
  link.close(kLane.error(ErrorCode::kPeerDown, "fence", "the link was fenced on this side"));
  if (!link.end()) return false;
  control_.dispose(std::move(found->second));
  links_.erase(found);
  return true;
}

// --- Data path

Posted HostDomain::post(LinkId id, const WriteBatch& batch) {
  if (Link* link = find(id)) return link->post(batch);
  return refuse(batch.work, kLane.error(ErrorCode::kPeerDown, "post", "no such link, or it was fenced"));
}

Posted HostDomain::send(LinkId id, WorkId work, std::span<const std::byte> message) {
  if (Link* link = find(id)) return link->send(work, message);
  return refuse(work, kLane.error(ErrorCode::kPeerDown, "send", "no such link, or it was fenced"));
}

void HostDomain::take(LinkId id, uint32_t slot) {
  if (Link* link = find(id)) link->take(slot);
}

bool HostDomain::poll() {
  sleep_.end();

  bool happened = false;
  for (const auto& [id, link] : links_) happened |= link->receive();

  // One chunk in all, beginning behind the link that was served last, so that every link has a turn.
  uint64_t spent = 0;
  auto next = links_.upper_bound(last_served_);
  for (size_t i = links_.size(); i > 0 && spent < kChunkBytes; --i, ++next) {
    if (next == links_.end()) next = links_.begin();
    if (const uint64_t bytes = next->second->progress(kChunkBytes - spent); bytes > 0) {
      spent += bytes;
      last_served_ = next->first;
    }
  }
  happened |= spent > 0;

  uint32_t told = 0;
  for (const auto& [id, link] : links_) {
    while (told < kToldPerTurn && link->tell()) ++told;
  }
  happened |= told > 0;

  if (sleep_.look_due(happened)) happened |= look();
  return happened;
}

// Serves the readable sockets, and the links whose peers are gone.
bool HostDomain::look() {
  uint32_t heard = 0;
  return events_.look([&](LinkId id, bool process) {
    Link* const link = find(id);
    if (link == nullptr || heard >= kHeardPerTurn) return;  // unserved events are reported again
    if (process) {
      link->process_ended();
    } else {
      heard += link->service();
    }
  });
}

bool HostDomain::prepare_sleep() {
  sleep_.announce();
  if (std::none_of(links_.begin(), links_.end(), [](const auto& entry) { return entry.second->has_work(); })) {
    return true;
  }
  sleep_.end();
  return false;
}

}  // namespace kvc::host
