#include "providers/libfabric/domain.h"

#include <rdma/fi_errno.h>
#include <sys/epoll.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <utility>

namespace kvc::libfabric {
namespace {

// Links served by one poll(), beginning where the last one stopped: a look at an idle one costs 0.1 us where the
// provider reads memory, and a system call of a microsecond where it asks the kernel.
constexpr size_t kLinksPerPoll = 32;
// Providers without a descriptor are looked at this often once the worker sleeps: at first, and when nothing has come
// for as long as kRestAfter. 50 us are what waking up costs anyway; 1 ms is 0.5 % of a core at 5 us a look.
constexpr std::chrono::microseconds kShortNap{50};
constexpr std::chrono::microseconds kLongNap{1000};
constexpr std::chrono::milliseconds kRestAfter{10};

}  // namespace

Result<std::unique_ptr<LibfabricDomain>> LibfabricDomain::open(const DomainConfig& config, DomainSink& sink,
                                                               const Tuning& tuning) {
  Result<std::unique_ptr<Device>> device = Device::open(config);
  if (!device) return device.error();
  std::unique_ptr<LibfabricDomain> domain(new LibfabricDomain(std::move(device.value()), sink, tuning));
  if (Status started = domain->start(); !started) return started.error();
  return domain;
}

Status LibfabricDomain::start() {
  epoll_ = UniqueFd(::epoll_create1(EPOLL_CLOEXEC));
  timer_ = UniqueFd(::timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC));
  if (!epoll_ || !timer_) return system_error("libfabric", "open", errno);
  watch(timer_.get());
  last_look_ = idle_since_ = Clock::now();
  if (!device_->needs(FI_MR_ENDPOINT)) {
    auto memory = device_->register_memory(shared_.doorbell.data(), shared_.doorbell.size(), kRegionAccess, nullptr);
    if (!memory) return memory.error();
    shared_.doorbell_memory = std::move(memory.value());
  }
  // An endpoint to try out: better to refuse here than at the first peer.
  const Result<std::unique_ptr<Link>> link = Link::create(shared_, 0, 1);
  if (!link) return link.error();
  return {};
}

LibfabricDomain::~LibfabricDomain() {
  // The engine has fenced every link before it destroys its domains; this is for one that had no time to.
  links_.clear();
  closed_.clear();
}

std::string LibfabricDomain::description() const {
  return "libfabric " + device_->description() +
         (device_->waits_by_descriptor() ? "" : ", which has no descriptor to wait on: looked at every 50 us to 1 ms");
}

// --- Memory

Result<uint64_t> LibfabricDomain::register_region(std::byte* base, uint64_t bytes, int /*memfd*/, uint64_t /*offset*/) {
  if (base == nullptr || bytes == 0 || bytes > UINT64_MAX - reinterpret_cast<uintptr_t>(base)) {
    return fabric_error(ErrorCode::kInvalidArgument, "register_region", "the range is empty or wraps around");
  }
  Region region{.base = base, .bytes = bytes, .memory = {}};
  if (!device_->needs(FI_MR_ENDPOINT)) {
    auto memory = device_->register_memory(base, bytes, kRegionAccess, nullptr);
    if (!memory) return memory.error();
    region.memory = std::move(memory.value());
  }
  for (;;) {
    const Result<uint64_t> rkey = random_key();
    if (!rkey) return rkey.error();
    if (shared_.regions.find(rkey.value()) != nullptr) continue;
    shared_.regions.add(rkey.value(), std::move(region));
    return rkey.value();
  }
}

bool LibfabricDomain::deregister_region(uint64_t rkey) {
  Region* const region = shared_.regions.find(rkey);
  if (region == nullptr) return true;
  if (!std::exchange(region->revoked, true)) {
    for (const LinkId id : region->told) {
      if (Link* link = find(id)) link->revoke(rkey);
    }
  }
  if (!region->told.empty() || region->reads > 0) return false;
  for (const auto& [id, link] : links_) link->forget_memory(*region);
  if (region->memory != nullptr && fi_close(&region->memory->fid) == -FI_EBUSY) return false;
  [[maybe_unused]] auto* const closed = region->memory.release();
  shared_.regions.erase(rkey);
  return true;
}

// --- Links

Link* LibfabricDomain::find(LinkId id) noexcept {
  const auto found = links_.find(id);
  return found == links_.end() ? nullptr : found->second.get();
}

void LibfabricDomain::watch(int fd) {
  if (fd < 0) return;
  epoll_event readable{.events = EPOLLIN, .data = {.fd = fd}};
  // EEXIST: a provider may give one descriptor to several queues.
  (void)::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &readable);
}

void LibfabricDomain::unwatch(int fd) {
  if (fd >= 0) (void)::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr);
}

Result<Link*> LibfabricDomain::make_link(LinkId id, uint64_t secret) {
  Result<std::unique_ptr<Link>> link = Link::create(shared_, id, secret);
  if (!link) return link.error();
  watch(link.value()->fd());
  return links_.insert_or_assign(id, std::move(link.value())).first->second.get();
}

Result<Bytes> LibfabricDomain::offer(LinkId id) {
  const Result<uint64_t> secret = random_key();
  if (!secret) return secret.error();
  Result<Link*> link = make_link(id, secret.value());
  if (!link) return link.error();
  Result<Card> card = link.value()->card();
  if (card) return card.value().encode();
  remove(id, card.error());
  return card.error();
}

Status LibfabricDomain::check(std::string_view operation, const Card& peer) const {
  const fi_info& info = device_->info();
  const std::string pair = "the peer has " + peer.provider + " and this side " + device_->provider();
  if (peer.protocol != info.ep_attr->protocol || peer.address_format != info.addr_format) {
    return fabric_error(ErrorCode::kRefused, std::string(operation),
                        pair + ", which do not speak with each other: configure the same device on both");
  }
  if (peer.protocol_version != info.ep_attr->protocol_version) {
    return fabric_error(ErrorCode::kRefused, std::string(operation),
                        pair + " in versions that differ (" + std::to_string(peer.protocol_version) + " and " +
                            std::to_string(info.ep_attr->protocol_version) + "): install the same libfabric on both");
  }
  if (device_->is_local() && !Machine::current().shares_memory(peer.machine)) {
    return fabric_error(ErrorCode::kNotReachable, std::string(operation),
                        "the peer does not share this machine's /dev/shm and processes");
  }
  if (device_->is_local() && peer.pid == static_cast<uint32_t>(::getpid())) {
    // Endpoints of one process use each other's memory directly, also after one of them was closed: a crash (1.17).
    return fabric_error(ErrorCode::kNotReachable, std::string(operation), "shm leads to other processes only");
  }
  return {};
}

Result<Bytes> LibfabricDomain::accept(LinkId id, std::span<const std::byte> offer) {
  const Result<Card> peer = Card::decode("accept", offer);
  if (!peer) return peer.error();
  if (Status reachable = check("accept", peer.value()); !reachable) return reachable.error();
  Result<Link*> link = make_link(id, peer.value().secret);
  if (!link) return link.error();
  Status met = link.value()->meet(peer.value(), false);
  watch(link.value()->pidfd());
  Result<Card> card = met ? link.value()->card() : met.error();
  if (card) return card.value().encode();
  remove(id, card.error());
  return card.error();
}

Status LibfabricDomain::complete(LinkId id, std::span<const std::byte> answer) {
  Link* const link = find(id);
  if (link == nullptr) return fabric_error(ErrorCode::kUnknownPeer, "complete", "the link was fenced or broke");
  const Result<Card> peer = Card::decode("complete", answer);
  if (!peer) return peer.error();
  if (peer.value().secret != link->secret()) {
    return fabric_error(ErrorCode::kInvalidArgument, "complete", "the answer is not one to this link's offer");
  }
  if (Status reachable = check("complete", peer.value()); !reachable) return reachable;
  Status met = link->meet(peer.value(), true);
  watch(link->pidfd());
  return met;
}

void LibfabricDomain::remove(LinkId id, const Error& error) {
  auto node = links_.extract(id);
  if (node.empty()) return;
  Link& link = *closed_.emplace_back(std::move(node.mapped()));
  unwatch(link.fd());
  unwatch(link.pidfd());
  link.close(error);
}

bool LibfabricDomain::fence(LinkId id) {
  Link* const link = find(id);
  if (link == nullptr) return true;
  const Error error = fabric_error(ErrorCode::kPeerDown, "fence", "the link was fenced on this side");
  if (!link->leave(error)) return false;
  remove(id, error);
  return true;
}

// --- Data path

Posted LibfabricDomain::post(LinkId id, const WriteBatch& batch) {
  if (Link* link = find(id)) return link->post(batch);
  const Error error = fabric_error(ErrorCode::kPeerDown, "write", "the link was fenced or broke");
  shared_.sink.on_complete(batch.work, &error);
  return Posted::kYes;
}

Posted LibfabricDomain::send(LinkId id, WorkId work, std::span<const std::byte> message) {
  if (Link* link = find(id)) return link->send(work, message);
  const Error error = fabric_error(ErrorCode::kPeerDown, "send", "the link was fenced or broke");
  shared_.sink.on_complete(work, &error);
  return Posted::kYes;
}

bool LibfabricDomain::poll() {
  closed_.clear();
  if (std::exchange(slept_, false)) {
    uint64_t expirations = 0;
    (void)!::read(timer_.get(), &expirations, sizeof(expirations));
  }
  const bool any = poll_links();
  const Clock::time_point now = Clock::now();
  if (any) idle_since_ = now;
  if (now - last_look_ >= shared_.tuning.look) look_after();
  return any;
}

bool LibfabricDomain::poll_links() {
  bool any = false;
  std::array<LinkId, kLinksPerPoll> ids;  // the sink may fence links meanwhile
  size_t count = 0;
  auto place = links_.lower_bound(next_);
  for (; count < std::min(links_.size(), kLinksPerPoll); ++count, ++place) {
    if (place == links_.end()) place = links_.begin();
    ids[count] = place->first;
  }
  next_ = place == links_.end() ? 0 : place->first;
  for (size_t i = 0; i < count; ++i) {
    Link* const link = find(ids[i]);
    if (link == nullptr) continue;
    any |= link->poll();
    if (find(ids[i]) == nullptr || !link->broken()) continue;
    any = true;
    const Error error = *link->broken();
    remove(ids[i], error);
    shared_.sink.on_link_down(ids[i], error, true);
  }
  return any;
}

void LibfabricDomain::look_after() {
  const Clock::time_point now = Clock::now();
  const auto gap = now - std::exchange(last_look_, now);
  for (const auto& [id, link] : links_) link->look_after(now, gap);
}

bool LibfabricDomain::prepare_sleep() {
  bool nap = !device_->waits_by_descriptor() && !links_.empty();
  for (const auto& [id, link] : links_) {
    if (link->broken() || !link->may_sleep()) return false;
    nap |= link->waits_for_room();
  }
  itimerspec when{};
  if (!links_.empty()) {
    const Clock::time_point now = Clock::now();
    auto until = std::chrono::nanoseconds(last_look_ + shared_.tuning.look - now);
    if (nap) until = std::min<std::chrono::nanoseconds>(until, now - idle_since_ < kRestAfter ? kShortNap : kLongNap);
    when.it_value.tv_nsec = std::clamp<int64_t>(until.count(), 1, 999'999'999);
  }
  ::timerfd_settime(timer_.get(), 0, &when, nullptr);
  slept_ = true;
  return true;
}

}  // namespace kvc::libfabric
