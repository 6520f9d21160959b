#include "providers/sim/domain.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <utility>

#include "lane/immediate.h"

namespace kvc::sim {

namespace {

// The most that one poll() delivers. 1 MiB takes 100 us at 10 GB/s, and a page's bookkeeping about 0.4 us.
constexpr uint64_t kPollBytes = 1 << 20;
constexpr uint64_t kPollRuns = 256;

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(TimerFd::Clock::now().time_since_epoch()).count();
}

}  // namespace

SimDomain::SimDomain(const DomainConfig& config, uint64_t number, std::shared_ptr<Fabric> fabric,
                     std::shared_ptr<Inbox> inbox, TimerFd timer, UniqueFd epoll)
    : fabric_(std::move(fabric)),
      inbox_(std::move(inbox)),
      timer_(std::move(timer)),
      epoll_(std::move(epoll)),
      max_delay_us_(config.max_delay_us),
      random_(config.seed + number) {}

SimDomain::~SimDomain() { inbox_->close(); }

// --- Links

void SimDomain::attach(LinkId id, std::unique_ptr<LinkEnd> end) {
  std::unique_ptr<Link> link(static_cast<Link*>(end.release()));
  Gate& gate = *link->gate;
  gate.attached[static_cast<size_t>(link->side)].store(true);
  std::shared_ptr<Inbox> other;
  bool open = false;
  {
    const std::lock_guard lock(gate.mutex);
    open = gate.open;
    other = gate.inbox[link->other()];
  }
  links_.emplace(id, std::move(link));
  if (open) {
    if (other != nullptr) other->put(LinkReady{});
  } else {
    inbox_->put(LinkClosed{id});  // the link ended before it was attached
  }
}

Link* SimDomain::find(LinkId id) noexcept {
  const auto found = links_.find(id);
  return found == links_.end() ? nullptr : found->second.get();
}

bool SimDomain::fence(LinkId id) {
  auto node = links_.extract(id);
  if (node.empty()) return true;
  std::unique_ptr<Link> link = std::move(node.mapped());
  // Nothing lands once the gate is closed. Completions that the peer sent before stay valid.
  Fabric::close(*link->gate, link->side);
  end_posted(*link, sim_error(ErrorCode::kPeerDown, "write", "the link was fenced on this side"));
  return true;
}

void SimDomain::end_posted(Link& link, const Error& error) {
  link.posted.clear([&](WorkId work) { completions_.failed(work, error); });
  link.messages.clear([&](WorkId work) { completions_.failed(work, error); });
}

// --- Data path

Posted SimDomain::refuse_unknown(WorkId work) {
  return refuse(work, sim_error(ErrorCode::kPeerDown, "write", "no such link: it ended, or has no answer yet"));
}

Posted SimDomain::post(LinkId id, const WriteBatch& batch) {
  Link* const link = find(id);
  if (link == nullptr) return refuse_unknown(batch.work);
  Gate& gate = *link->gate;
  if (link->posted.full() || !gate.attached[link->other()].load()) return Posted::kBusy;
  const uint32_t slot = *link->posted.put(batch.work);
  std::shared_ptr<Batch>& shared = link->batches[slot];
  if (shared == nullptr || shared.use_count() > 1) {
    shared = std::make_shared<Batch>();
    shared->gate = link->gate;
    shared->sender = link->side;
    shared->slot = slot;
  }
  shared->rkey = batch.rkey;
  shared->page_bytes = batch.page_bytes;
  shared->counted = batch.counted;
  shared->immediate = batch.immediate;
  shared->error.reset();
  shared->runs.clear();
  for_each_run(batch, [&](const PageRun& run) { shared->runs.push_back({run, due_ns()}); });
  shared->runs_left = shared->runs.size();
  gate.inbox[link->other()]->put(BatchArrival{shared});
  return Posted::kYes;
}

Posted SimDomain::send(LinkId id, WorkId work, std::span<const std::byte> message) {
  Link* const link = find(id);
  if (link == nullptr) return refuse_unknown(work);
  Gate& gate = *link->gate;
  if (link->messages.full() || !gate.attached[link->other()].load()) return Posted::kBusy;
  auto batch = std::make_shared<Batch>();
  batch->gate = link->gate;
  batch->sender = link->side;
  batch->slot = *link->messages.put(work);
  batch->message.assign(message.begin(), message.end());
  batch->runs.push_back({{}, due_ns()});
  gate.inbox[link->other()]->put(BatchArrival{std::move(batch)});
  return Posted::kYes;
}

void SimDomain::take(LinkId id, uint32_t slot) {
  const Link* const link = find(id);
  if (link == nullptr) return;
  const size_t other = link->other();
  link->gate->inbox[other]->put(WorkDone{.link = link->gate->link[other], .slot = slot, .message = true});
}

// Without delays neither the clock nor the seed is read: everything is due at once, and receive() reorders it.
int64_t SimDomain::due_ns() {
  if (max_delay_us_ == 0) return 0;
  return now_ns() + static_cast<int64_t>(random_() % (uint64_t{max_delay_us_} * 1000 + 1));
}

bool SimDomain::poll() {
  messages_.clear();
  inbox_->take(messages_);
  bool any = !messages_.empty();
  for (Message& message : messages_) {
    std::visit([this](auto& m) { this->receive(m); }, message);
  }
  uint64_t runs = 0;
  uint64_t bytes = 0;
  const int64_t now = arrivals_.empty() ? 0 : now_ns();
  while (!arrivals_.empty() && runs < kPollRuns && bytes < kPollBytes && arrivals_.front().due_ns <= now) {
    std::pop_heap(arrivals_.begin(), arrivals_.end(), std::mem_fn(&Arrival::later_than));
    const Arrival arrival = std::move(arrivals_.back());
    arrivals_.pop_back();
    bytes += deliver(arrival);
    ++runs;
    any = true;
  }
  return any;
}

void SimDomain::receive(BatchArrival& arrival) {
  for (uint32_t run = 0; run < arrival.batch->runs.size(); ++run) {
    arrivals_.push_back({arrival.batch->runs[run].due_ns, random_(), arrival.batch, run});
    std::push_heap(arrivals_.begin(), arrivals_.end(), std::mem_fn(&Arrival::later_than));
  }
}

void SimDomain::receive(WorkDone& done) {
  Link* const link = find(done.link);
  // the link was fenced meanwhile, or the completion was lost with it
  if (link == nullptr || link->gate->cut.load()) return;
  const std::optional<WorkId> work = done.message ? link->messages.take(done.slot) : link->posted.take(done.slot);
  if (!work) return;
  if (done.error) {
    completions_.failed(*work, *std::move(done.error));
  } else {
    completions_.done(*work);
  }
}

void SimDomain::receive(LinkClosed& closed) {
  auto node = links_.extract(closed.link);
  if (node.empty()) return;
  Link& link = *node.mapped();
  const Error down = sim_error(ErrorCode::kPeerDown, "write",
                               link.gate->cut.load() ? "a NIC of the link is down" : "the peer ended the link");
  end_posted(link, down);
  completions_.link_down(closed.link, down);
}

// Delivers the run. Returns the number of copied bytes.
uint64_t SimDomain::deliver(const Arrival& arrival) {
  Batch& batch = *arrival.batch;
  Gate& gate = *batch.gate;
  const auto sender = static_cast<size_t>(batch.sender);
  const LinkId link = gate.link[1 - sender];
  const PageRun run = batch.runs[arrival.run].pages;
  const uint64_t bytes = run.pages * batch.page_bytes;
  {
    const std::lock_guard lock(gate.mutex);
    if (!gate.open) return 0;  // its sender was notified, or will find LinkClosed
    if (!batch.message.empty()) {
      completions_.message(link, batch.slot, batch.message);
      return batch.message.size();
    }
    if (std::optional<Error> failed = copy(batch, run)) {
      if (!batch.error) batch.error = std::move(failed);
    } else if (batch.counted) {
      completions_.immediate(link, Immediate::with_multiplicity(batch.immediate, run.pages));
    }
    // The WorkDone is put under the lock, so that a thread that closes the gate later finds it. After the last run the
    // batch belongs to its sender.
    if (--batch.runs_left == 0) gate.inbox[sender]->put(WorkDone{gate.link[sender], batch.slot, false, batch.error});
  }
  for (const auto& nic : gate.nic) fabric_->carried(*nic, run.pages);
  return bytes;
}

std::optional<Error> SimDomain::copy(const Batch& batch, const PageRun& run) {
  if (batch.page_bytes == 0) return std::nullopt;  // an immediate alone
  const Registration* const region = regions_.find(batch.rkey);
  if (region == nullptr) {
    return sim_error(ErrorCode::kUnknownRegion, "write", "the peer knows no region with this key, or has revoked it");
  }
  const uint64_t bytes = run.pages * batch.page_bytes;
  if (!region->contains(run.target_offset, bytes)) {
    return sim_error(ErrorCode::kOutOfRange, "write",
                     std::to_string(bytes) + " bytes at offset " + std::to_string(run.target_offset) +
                         " lie outside the peer's region of " + std::to_string(region->bytes) + " bytes");
  }
  std::memcpy(region->base + run.target_offset, run.source, bytes);
  return std::nullopt;
}

bool SimDomain::prepare_sleep() {
  if (arrivals_.empty()) {
    timer_.arm(std::nullopt);
  } else {
    const TimerFd::Clock::time_point due{std::chrono::nanoseconds(arrivals_.front().due_ns)};
    if (due <= TimerFd::Clock::now()) return false;
    timer_.arm(due);
  }
  return inbox_->prepare_sleep();
}

}  // namespace kvc::sim
