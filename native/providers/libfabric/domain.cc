#include "providers/libfabric/domain.h"

#include <sys/epoll.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <optional>
#include <utility>

#include "providers/libfabric/connector.h"
#include "providers/libfabric/region.h"

namespace kvc::libfabric {
namespace {

// Idle links that one poll() looks at, in turn. A look at an idle link costs 0.1 us if the provider reads memory, and a
// system call of a microsecond if it calls the kernel. So a transfer's links are served each turn, however many other
// links there are. Of 256 links, each is looked at after 16 turns.
constexpr size_t kIdleLooks = 16;
// Time after which no further link is looked at. One link may take as long again.
constexpr std::chrono::microseconds kPollLimit{50};
// Polling intervals of a sleeping thread for providers without a descriptor: the short one at first, the long one when
// nothing has arrived for kRestAfter. Waking up costs 50 us anyway. 1 ms is 0.5 % of a core at 5 us a look.
constexpr std::chrono::microseconds kShortNap{50};
constexpr std::chrono::microseconds kLongNap{1000};
constexpr std::chrono::milliseconds kRestAfter{10};

void watch(const UniqueFd& epoll, int fd, uint64_t data = 0) {
  if (fd < 0) return;
  epoll_event readable{.events = EPOLLIN, .data = {.u64 = data}};
  // EEXIST: a provider may give one descriptor to several queues.
  (void)::epoll_ctl(epoll.get(), EPOLL_CTL_ADD, fd, &readable);
}

void unwatch(const UniqueFd& epoll, int fd) {
  if (fd >= 0) (void)::epoll_ctl(epoll.get(), EPOLL_CTL_DEL, fd, nullptr);
}

}  // namespace

// --- Opening and closing

Result<OpenedDomain> open(const DomainConfig& config, ControlQueue& control, const Tuning& tuning) {
  Result<std::shared_ptr<const Device>> device = Device::open(config, tuning);
  if (!device) return device.error();
  // Opens an endpoint as a test: an error here is better than at the first peer.
  const Result<std::unique_ptr<Endpoint>> endpoint = Endpoint::open(device.value(), 1);
  if (!endpoint) return endpoint.error();
  auto domain = std::make_unique<LibfabricDomain>(device.value(), control, tuning);
  if (Status started = domain->start(); !started) return started.error();
  return OpenedDomain{std::make_unique<LibfabricConnector>(std::move(device.value())), std::move(domain)};
}

Status LibfabricDomain::start() {
  epoll_ = UniqueFd(::epoll_create1(EPOLL_CLOEXEC));
  deaths_ = UniqueFd(::epoll_create1(EPOLL_CLOEXEC));
  if (!epoll_ || !deaths_) return system_error("libfabric", "open", errno);
  Result<TimerFd> timer = TimerFd::create("libfabric");
  if (!timer) return timer.error();
  timer_ = std::move(timer.value());
  watch(epoll_, deaths_.get());
  watch(epoll_, timer_.fd());
  return {};
}

LibfabricDomain::~LibfabricDomain() {
  // The transfer engine has fenced every link. This closes links for which there was no time.
  for (auto& [id, link] : links_) {
    link->close();
    context_.control.dispose(std::move(link));
  }
}

// --- Memory

bool LibfabricDomain::withdraw(Registration& registration) {
  auto& region = static_cast<Region&>(registration);
  bool released = true;
  for (const auto& [id, link] : links_) {
    if (!region.revoked) link->revoke(region);
    released &= link->release(region);
  }
  return context_.regions.withdraw(region) && released;
}

// --- Links

Link* LibfabricDomain::find(LinkId id) noexcept {
  const auto found = links_.find(id);
  return found == links_.end() ? nullptr : found->second.get();
}

void LibfabricDomain::attach(LinkId id, std::unique_ptr<LinkEnd> end) {
  std::shared_ptr<Endpoint> endpoint(static_cast<Endpoint*>(end.release()));
  watch(epoll_, endpoint->fd());
  watch(deaths_, endpoint->pidfd().get(), id);
  links_.insert_or_assign(id, std::make_unique<Link>(context_, id, std::move(endpoint)));
}

bool LibfabricDomain::fence(LinkId id) {
  const auto found = links_.find(id);
  if (found == links_.end()) return true;
  // From here on only fence() looks at the link.
  Link& link = *found->second;
  unwatch(epoll_, link.endpoint().fd());
  unwatch(deaths_, link.endpoint().pidfd().get());
  if (!link.fence()) return false;
  context_.control.dispose(std::move(found->second));
  links_.erase(found);
  return true;
}

// --- Data path

Posted LibfabricDomain::post(LinkId id, const WriteBatch& batch) {
  if (Link* link = find(id)) return link->post(batch);
  return refuse(batch.work, link_error("write", "the link was fenced"));
}

Posted LibfabricDomain::send(LinkId id, WorkId work, std::span<const std::byte> message) {
  if (Link* link = find(id)) return link->send(work, message);
  return refuse(work, link_error("send", "the link was fenced"));
}

void LibfabricDomain::take(LinkId id, uint32_t slot) {
  if (Link* link = find(id)) link->take(slot);
}

bool LibfabricDomain::poll() {
  const Clock::time_point now = Clock::now();
  const bool is_due = now - last_look_ >= context_.tuning.look;
  if (std::exchange(slept_, false) || is_due) notice_deaths();
  if (is_due) look_after(now);
  const bool any = poll_links();
  if (any) idle_since_ = now;
  return any || !completions_.empty();
}

bool LibfabricDomain::poll_links() {
  bool any = false;
  const Clock::time_point limit = Clock::now() + kPollLimit;
  size_t idle_looks = kIdleLooks;
  std::optional<LinkId> passed_over;
  auto place = links_.lower_bound(next_);
  for (size_t left = links_.size(); left > 0; --left, ++place) {
    if (place == links_.end()) place = links_.begin();
    Link& link = *place->second;
    if (!link.active()) {
      if (idle_looks == 0) {
        if (!passed_over) passed_over = place->first;
        continue;
      }
      --idle_looks;
    }
    if (!link.poll()) continue;
    any = true;
    if (Clock::now() < limit) continue;
    next_ = place->first + 1;
    return any;
  }
  if (passed_over) next_ = *passed_over;
  return any;
}

void LibfabricDomain::notice_deaths() {
  std::array<epoll_event, 64> events;  // further events come in the next call
  const int count = ::epoll_wait(deaths_.get(), events.data(), static_cast<int>(events.size()), 0);
  for (int i = 0; i < count; ++i) {
    if (Link* link = find(static_cast<LinkId>(events[static_cast<size_t>(i)].data.u64))) link->lose_peer();
  }
}

void LibfabricDomain::look_after(Clock::time_point now) {
  const auto gap = now - std::exchange(last_look_, now);
  for (const auto& [id, link] : links_) link->look_after(now, gap);
}

bool LibfabricDomain::prepare_sleep() {
  bool naps = !context_.device->waits_by_descriptor() && !links_.empty();
  for (const auto& [id, link] : links_) {
    if (!link->may_sleep()) return false;
    naps |= link->waits_for_room();
  }
  std::optional<Clock::time_point> until;
  if (!links_.empty()) {
    const Clock::time_point now = Clock::now();
    until = last_look_ + context_.tuning.look;
    if (naps) until = std::min(*until, now + (now - idle_since_ < kRestAfter ? kShortNap : kLongNap));
  }
  timer_.arm(until);
  slept_ = true;
  return completions_.empty();
}

}  // namespace kvc::libfabric
