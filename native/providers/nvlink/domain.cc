#include "providers/nvlink/domain.h"

#include <algorithm>
#include <optional>
#include <utility>

namespace kvc::nvlink {

namespace {

// One launch for each stream. Gathering a large one takes 40 us, and copying it 90 us.
constexpr uint32_t kLaunchesPerTurn = cuda::kStreams;

}  // namespace

NvlinkDomain::~NvlinkDomain() {
  std::vector<std::shared_ptr<Link>> links;
  for (auto& [id, link] : links_) {
    link->close(kLane.error(ErrorCode::kClosed, "close", "the domain is closed"));
    links.push_back(std::move(link));
  }
  control_.run([copier = copies_.copier(), links = std::move(links)]() mutable {
    if (copier != nullptr) copier->wait();  // the copier writes where the links have mapped the peers' memory
    links.clear();
  });
}

// --- Memory

void NvlinkDomain::publish(Registration& registration) {
  auto& region = static_cast<Region&>(registration);
  copies_.open(region.copier);
  const uint32_t place = region.place();
  RegionEntry& entry = board_.regions[place];
  entry.base.store(reinterpret_cast<uint64_t>(region.base), std::memory_order_relaxed);
  entry.length.store(region.bytes, std::memory_order_relaxed);
  entry.offset.store(region.shared.offset, std::memory_order_relaxed);
  entry.device.store(static_cast<uint64_t>(region.copier->context().device()), std::memory_order_relaxed);
  entry.pieces_bytes.store(region.shared.pieces_bytes, std::memory_order_relaxed);
  entry.allocation = region.shared.handle;
  entry.rkey.store(region.key, std::memory_order_release);
  if (place >= board_.places.load(std::memory_order_relaxed)) {
    board_.places.store(place + 1, std::memory_order_release);
  }
  regions_.emplace(place, &region);
  for (const auto& [id, link] : links_) link->tell(region);
}

bool NvlinkDomain::withdraw(Registration& registration) {
  auto& region = static_cast<Region&>(registration);
  if (!std::exchange(region.revoked, true)) {
    board_.regions[region.place()].rkey.store(0, std::memory_order_seq_cst);
    regions_.erase(region.place());
    for (const auto& [id, link] : links_) region.users.push_back(link->revoke(region.key));
  }
  std::erase_if(region.users, [this](const Region::User& user) {
    const Link* const link = find(user.link);
    return link == nullptr || link->has_left(user);
  });
  return region.users.empty();
}

// --- Links

Link* NvlinkDomain::find(LinkId link) noexcept {
  const auto found = links_.find(link);
  return found == links_.end() ? nullptr : found->second.get();
}

void NvlinkDomain::attach(LinkId id, std::unique_ptr<LinkEnd> end) {
  auto link = std::make_unique<Link>(id, static_cast<Meeting&>(*end), LinkContext{events_, completions_, control_},
                                     driver_, copies_);
  link->begin(regions_);
  links_.emplace(id, std::move(link));
}

bool NvlinkDomain::fence(LinkId id) {
  Link* const link = find(id);
  if (link == nullptr) return true;
  link->close(kLane.error(ErrorCode::kPeerDown, "fence", "the link was fenced on this side"));
  return link->end();
}

// Erases fenced links once their peers have unmapped our memory.
void NvlinkDomain::reap() {
  for (auto next = links_.begin(); next != links_.end();) {
    const auto entry = next++;
    if (!entry->second->over()) continue;
    control_.dispose(std::move(entry->second));
    links_.erase(entry);
  }
}

// --- Data path

Posted NvlinkDomain::post(LinkId id, const WriteBatch& batch) {
  if (Link* link = find(id)) return link->post(batch);
  return refuse(batch.work, kLane.error(ErrorCode::kPeerDown, "post", "no such link, or it was fenced"));
}

Posted NvlinkDomain::send(LinkId id, WorkId work, std::span<const std::byte> message) {
  if (Link* link = find(id)) return link->send(work, message);
  return refuse(work, kLane.error(ErrorCode::kPeerDown, "send", "no such link, or it was fenced"));
}

void NvlinkDomain::take(LinkId id, uint32_t slot) {
  if (Link* link = find(id)) link->take_message(slot);
}

bool NvlinkDomain::poll() {
  sleep_.end();
  bool happened = settle();
  for (const auto& [id, link] : links_) happened |= link->receive();
  happened |= launch();
  for (const auto& [id, link] : links_) happened |= link->flush();
  if (const Error* dead = copies_.dead()) {
    for (const auto& [id, link] : links_) link->break_down(kLane.named(*dead));
  }
  if (sleep_.look_due(happened)) {
    happened |= events_.look([this](LinkId id, bool process) { on_event(id, process); });
    reap();
  }
  return happened;
}

bool NvlinkDomain::settle() {
  return copies_.settle([this](Flight& flight, const Error* failed) {
    if (failed != nullptr && !flight.error) flight.error = kLane.named(*failed);
    find(flight.link)->land(std::move(flight));  // a link stays as long as it has flights
  });
}

bool NvlinkDomain::launch() {
  bool any = false;
  for (uint32_t i = 0; i < kLaunchesPerTurn && copies_.can_begin(); ++i) {
    // Begins behind the link that was served last, so that every link has a turn.
    auto next = links_.upper_bound(last_served_);
    const Link* first = nullptr;
    for (size_t left = links_.size(); left > 0 && first == nullptr; --left, ++next) {
      if (next == links_.end()) next = links_.begin();
      if (!next->second->can_launch()) continue;
      first = next->second.get();
      last_served_ = next->first;
    }
    if (first == nullptr) break;
    cuda::Copier& copier = *copies_.copier();
    const uint64_t page_bytes = first->first().page_bytes;
    copier.begin(page_bytes);
    // Takes one batch of each link in turn, for as long as they fit.
    for (bool more = true; more;) {
      more = false;
      for (const auto& [id, link] : links_) {
        if (!link->can_launch() || link->first().page_bytes != page_bytes) continue;
        if (std::optional<Flight> flight = link->take(copier)) {
          gathered_.push_back(std::move(*flight));
          more = true;
        }
      }
    }
    if (gathered_.empty()) continue;  // the first batch had to wait for its region
    copies_.launch(gathered_);
    gathered_.clear();
    any = true;
  }
  return any;
}

void NvlinkDomain::on_event(LinkId id, bool process) {
  Link* link = find(id);
  if (link == nullptr) return;
  if (process) {
    link->process_ended();
  } else {
    link->service();
  }
}

bool NvlinkDomain::prepare_sleep() {
  // The GPU sends no wake-up. While it copies, the thread keeps polling.
  if (!copies_.idle()) return false;
  sleep_.announce();
  if (std::none_of(links_.begin(), links_.end(), [](const auto& entry) { return entry.second->has_work(); })) {
    return true;
  }
  sleep_.end();
  return false;
}

}  // namespace kvc::nvlink
