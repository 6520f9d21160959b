#include "providers/sim/domain.h"

#include <sys/epoll.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <utility>

#include "engine/byte_codec.h"
#include "engine/immediate.h"

namespace kvc::sim {

namespace {

// Batches on one link without a completion. Small, so that tests meet kBusy.
constexpr size_t kMaxPosted = 32;
// Messages on one link that the peer's sink has not taken: what a peer that does not read its messages can make us
// hold is 32 x 4 KiB a link. Apart from kMaxPosted: unread messages must not stop writes.
constexpr size_t kMaxMessages = 32;

// What one poll() delivers at most: 1 MiB is 100 us at 10 GB/s, a page's bookkeeping about 0.4 us.
constexpr uint64_t kPollBytes = 1 << 20;
constexpr uint64_t kPollRuns = 256;

int64_t now_ns() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1'000'000'000LL + now.tv_nsec;
}

Error error(ErrorCode code, std::string operation, std::string message) {
  return Error{code, "sim", {}, std::move(operation), std::move(message)};
}

}  // namespace

SimDomain::SimDomain(const DomainConfig& config, DomainSink& sink, std::shared_ptr<Inbox> inbox, UniqueFd timer,
                     UniqueFd epoll)
    : name_(config.fabric),
      fabric_(Fabric::get(config.fabric)),
      number_(fabric_->next_domain()),
      // One that has no name is the domain's own, and ends with it.
      nic_(config.device.empty() ? std::make_shared<Nic>() : fabric_->nic(config.device)),
      sink_(sink),
      inbox_(std::move(inbox)),
      timer_(std::move(timer)),
      epoll_(std::move(epoll)),
      max_delay_us_(config.max_delay_us),
      random_(config.seed + number_) {}

SimDomain::~SimDomain() {
  // The engine has fenced every link before it destroys its domains; this is for one that had no time to.
  for (auto& [id, link] : links_) end_link(link);
  inbox_->close();
}

std::string SimDomain::description() const { return "sim " + name_; }

// --- Memory

Result<uint64_t> SimDomain::register_region(std::byte* base, uint64_t bytes, int /*memfd*/, uint64_t /*memfd_offset*/) {
  const uint64_t rkey = random_u64();
  regions_[rkey] = Region{base, bytes};
  return rkey;
}

bool SimDomain::deregister_region(uint64_t rkey) {
  // Pages are copied by this thread: none is landing now, and none will find the key again.
  regions_.erase(rkey);
  return true;
}

// --- Links

Result<Bytes> SimDomain::offer(LinkId id) {
  if (!nic_->up.load()) return error(ErrorCode::kSystem, "offer", "the NIC " + nic_->device + " is down");
  Link link;
  link.gate = std::make_shared<Gate>();
  link.gate->inbox[0] = inbox_;
  link.gate->nic[0] = nic_;
  link.gate->link[0] = id;
  link.side = 0;
  link.secret = random_u64();
  fabric_->publish(link.secret, link.gate);
  ByteWriter writer;
  writer.number(fabric_->token());
  writer.number(link.secret);
  links_.emplace(id, std::move(link));
  return writer.take();
}

Result<Bytes> SimDomain::accept(LinkId id, std::span<const std::byte> offer) {
  ByteReader reader(offer);
  const auto token = reader.number<uint64_t>();
  const auto secret = reader.number<uint64_t>();
  if (!reader.complete()) return error(ErrorCode::kInvalidArgument, "accept", "not an offer of a sim domain");
  if (token != fabric_->token()) {
    return error(ErrorCode::kNotReachable, "accept", "the peer is in another fabric than " + name_);
  }
  std::shared_ptr<Gate> gate = fabric_->take(secret);
  if (gate == nullptr) return error(ErrorCode::kRefused, "accept", "this offer was used already, or withdrawn");
  {
    const std::lock_guard lock(gate->mutex);
    gate->inbox[1] = inbox_;
    gate->link[1] = id;
    gate->nic[1] = nic_;
  }
  if (!fabric_->join(gate)) return error(ErrorCode::kSystem, "accept", "a NIC is down, here or at the peer");
  Link link;
  link.gate = std::move(gate);
  link.side = 1;
  link.answered = true;
  links_.emplace(id, std::move(link));
  ByteWriter writer;
  writer.number(secret);
  return writer.take();
}

Status SimDomain::complete(LinkId id, std::span<const std::byte> answer) {
  const auto found = links_.find(id);
  if (found == links_.end()) return error(ErrorCode::kPeerDown, "complete", "the link ended before its answer came");
  ByteReader reader(answer);
  const auto secret = reader.number<uint64_t>();
  if (!reader.complete() || secret != found->second.secret) {
    return error(ErrorCode::kInvalidArgument, "complete", "not the answer to this offer");
  }
  found->second.answered = true;
  return {};
}

bool SimDomain::fence(LinkId id) {
  const auto found = links_.find(id);
  if (found == links_.end()) return true;
  Link link = std::move(found->second);
  links_.erase(found);
  end_link(link);
  const Error fenced = error(ErrorCode::kPeerDown, "write", "the link was fenced on this side");
  for (const WorkId work : link.posted) sink_.on_complete(work, &fenced);
  return true;
}

void SimDomain::end_link(Link& link) {
  if (link.side == 0) fabric_->take(link.secret);
  std::shared_ptr<Inbox> other;
  LinkId other_link = 0;
  {
    const std::lock_guard lock(link.gate->mutex);
    if (!link.gate->open) return;
    link.gate->open = false;
    other = link.gate->inbox[static_cast<size_t>(link.other())];
    other_link = link.gate->link[static_cast<size_t>(link.other())];
  }
  if (other != nullptr) other->put({LinkClosed{other_link}});
}

// --- Data path

// The link, if it may carry something; null: `work` was completed with an error.
Link* SimDomain::ready_link(LinkId id, WorkId work) {
  const auto found = links_.find(id);
  if (found != links_.end() && found->second.answered) return &found->second;
  const Error down = error(ErrorCode::kPeerDown, "write", "no such link: it ended, or has no answer yet");
  sink_.on_complete(work, &down);
  return nullptr;
}

Posted SimDomain::post(LinkId id, const WriteBatch& batch) {
  Link* const ready = ready_link(id, batch.work);
  if (ready == nullptr) return Posted::kYes;
  Link& link = *ready;
  if (link.posted.size() - link.messages >= kMaxPosted) return Posted::kBusy;
  auto shared = std::make_shared<Batch>();
  shared->work = batch.work;
  shared->gate = link.gate;
  shared->sender = link.side;
  shared->rkey = batch.rkey;
  shared->page_bytes = batch.page_bytes;
  shared->counted = batch.counted;
  shared->immediate = batch.immediate;
  shared->runs.reserve(batch.pages.size());
  const int64_t now = now_ns();
  for_each_run(batch, [&](const PageRun& run) { shared->runs.push_back({run, now + delay_ns()}); });
  shared->runs_left = shared->runs.size();
  link.posted.insert(batch.work);
  // The other side's inbox was set before we were told that we may post.
  link.gate->inbox[static_cast<size_t>(link.other())]->put({BatchArrival{std::move(shared)}});
  return Posted::kYes;
}

Posted SimDomain::send(LinkId id, WorkId work, std::span<const std::byte> message) {
  Link* const link = ready_link(id, work);
  if (link == nullptr) return Posted::kYes;
  if (link->messages >= kMaxMessages) return Posted::kBusy;
  link->posted.insert(work);
  ++link->messages;
  link->gate->inbox[static_cast<size_t>(link->other())]->put(
      {MessageArrival{link->gate, link->side, work, Bytes(message.begin(), message.end()), now_ns() + delay_ns()}});
  return Posted::kYes;
}

int64_t SimDomain::delay_ns() { return static_cast<int64_t>(random_() % (uint64_t{max_delay_us_} * 1000 + 1)); }

bool SimDomain::poll() {
  std::vector<Message> messages = inbox_->take();
  bool any = !messages.empty();
  for (Message& message : messages) {
    std::visit([this](auto& m) { receive(std::move(m)); }, message);
  }
  any |= deliver_held();
  uint64_t runs = 0;
  uint64_t bytes = 0;
  const int64_t now = now_ns();
  while (!arrivals_.empty() && runs < kPollRuns && bytes < kPollBytes && arrivals_.front().due_ns <= now) {
    Arrived arrived = take_arrival();
    ++runs;
    any = true;
    if (auto* const message = std::get_if<MessageArrival>(&arrived)) {
      if (!deliver(*message)) held_.push_back(std::move(*message));
      continue;
    }
    const auto& page = std::get<PageArrival>(arrived);
    bytes += page.run.pages * page.batch->page_bytes;
    deliver(page);
  }
  return any;
}

void SimDomain::receive(const BatchArrival& arrival) {
  for (const Batch::Run& run : arrival.batch->runs) add_arrival(run.due_ns, PageArrival{arrival.batch, run.pages});
}

void SimDomain::receive(MessageArrival message) {
  const int64_t due_ns = message.due_ns;
  add_arrival(due_ns, std::move(message));
}

void SimDomain::add_arrival(int64_t due_ns, Arrived what) {
  arrivals_.push_back({due_ns, random_(), std::move(what)});
  std::push_heap(arrivals_.begin(), arrivals_.end(), std::mem_fn(&Arrival::later_than));
}

SimDomain::Arrived SimDomain::take_arrival() {
  std::pop_heap(arrivals_.begin(), arrivals_.end(), std::mem_fn(&Arrival::later_than));
  Arrived what = std::move(arrivals_.back().what);
  arrivals_.pop_back();
  return what;
}

void SimDomain::receive(BatchDone done) {
  const auto found = links_.find(done.link);
  if (found == links_.end() || found->second.gate->cut.load()) return;  // fenced meanwhile, or lost with the link
  if (found->second.posted.erase(done.work) == 0) return;
  if (done.message) --found->second.messages;
  sink_.on_complete(done.work, done.error ? &*done.error : nullptr);
}

void SimDomain::receive(LinkClosed closed) {
  const auto found = links_.find(closed.link);
  if (found == links_.end()) return;
  Link link = std::move(found->second);
  links_.erase(found);
  const Error down = error(ErrorCode::kPeerDown, "write",
                           link.gate->cut.load() ? "a NIC of the link is down" : "the peer ended the link");
  for (const WorkId work : link.posted) sink_.on_complete(work, &down);
  sink_.on_link_down(closed.link, down, true);
}

void SimDomain::deliver(const PageArrival& page) {
  Batch& batch = *page.batch;
  Gate& gate = *batch.gate;
  const auto sender = static_cast<size_t>(batch.sender);
  {
    const std::lock_guard lock(gate.mutex);
    if (!gate.open) return;  // its sender was told, or will find LinkClosed
    if (std::optional<Error> failed = copy(page)) {
      if (!batch.error) batch.error = std::move(failed);
    } else if (batch.counted) {
      sink_.on_immediate(gate.link[1 - sender], Immediate::with_multiplicity(batch.immediate, page.run.pages));
    }
  }
  if (--batch.runs_left == 0) gate.inbox[sender]->put({BatchDone{gate.link[sender], batch.work, false, batch.error}});
  for (const auto& nic : gate.nic) fabric_->carried(*nic, page.run.pages);
}

// False: the sink has no room for it now.
bool SimDomain::deliver(const MessageArrival& message) {
  Gate& gate = *message.gate;
  const auto sender = static_cast<size_t>(message.sender);
  {
    const std::lock_guard lock(gate.mutex);
    if (!gate.open) return true;  // it ended with its link
  }
  // Outside the lock: the sink may fence this very link.
  if (!sink_.on_message(gate.link[1 - sender], message.bytes)) return false;
  gate.inbox[sender]->put({BatchDone{gate.link[sender], message.work, true, std::nullopt}});
  return true;
}

bool SimDomain::deliver_held() {
  return std::erase_if(held_, [this](const MessageArrival& message) { return deliver(message); }) > 0;
}

std::optional<Error> SimDomain::copy(const PageArrival& page) {
  const Batch& batch = *page.batch;
  if (batch.page_bytes == 0) return std::nullopt;  // an immediate alone
  const auto found = regions_.find(batch.rkey);
  if (found == regions_.end()) {
    return error(ErrorCode::kUnknownRegion, "write", "the peer knows no region with this key, or has revoked it");
  }
  const Region& region = found->second;
  const uint64_t bytes = page.run.pages * batch.page_bytes;
  if (bytes > region.bytes || page.run.target_offset > region.bytes - bytes) {
    return error(ErrorCode::kOutOfRange, "write",
                 std::to_string(bytes) + " bytes at offset " + std::to_string(page.run.target_offset) +
                     " lie outside the peer's region of " + std::to_string(region.bytes) + " bytes");
  }
  std::memcpy(region.base + page.run.target_offset, page.run.source, bytes);
  return std::nullopt;
}

bool SimDomain::prepare_sleep() {
  const int64_t due = arrivals_.empty() ? 0 : arrivals_.front().due_ns;
  if (due != 0 && due <= now_ns()) return false;
  if (due != timer_due_ns_) {
    // Also makes a timer that has expired unreadable again; zero only does that.
    itimerspec when{};
    when.it_value.tv_sec = due / 1'000'000'000;
    when.it_value.tv_nsec = due % 1'000'000'000;
    timerfd_settime(timer_.get(), TFD_TIMER_ABSTIME, &when, nullptr);
    timer_due_ns_ = due;
  }
  return inbox_->prepare_sleep();
}

}  // namespace kvc::sim
