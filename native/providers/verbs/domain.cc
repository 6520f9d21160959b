#include "providers/verbs/domain.h"

#include <sys/epoll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <string>
#include <utility>

namespace kvc::verbs {

namespace {

using Kind = WorkRequestId::Kind;

// A domain that never sleeps reads the device's events once in this many polls: every few milliseconds.
constexpr uint32_t kPollsPerLook = 1 << 15;
// Events read by one poll(). Each takes a system call, so all take about 25 us.
constexpr uint32_t kEventsPerPoll = 64;

Error peer_down(const char* operation, std::string message) {
  return verbs_error(ErrorCode::kPeerDown, operation, std::move(message));
}

}  // namespace

// --- Opening and closing

Result<std::unique_ptr<Domain>> VerbsDomain::create(DomainResources& resources, ControlQueue& control) {
  UniqueFd epoll(::epoll_create1(EPOLL_CLOEXEC));
  if (!epoll) return system_error("verbs", "epoll_create1", errno);
  Result<TimerFd> timer = TimerFd::create("verbs");
  if (!timer) return timer.error();
  for (const int fd : {resources.channel->fd, resources.device->context()->async_fd, timer.value().fd()}) {
    epoll_event event{.events = EPOLLIN, .data = {.fd = fd}};
    if (::epoll_ctl(epoll.get(), EPOLL_CTL_ADD, fd, &event) != 0) return system_error("verbs", "epoll_ctl", errno);
  }
  return std::unique_ptr<Domain>(new VerbsDomain(resources, control, std::move(epoll), std::move(timer.value())));
}

VerbsDomain::VerbsDomain(DomainResources& resources, ControlQueue& control, UniqueFd epoll, TimerFd timer)
    : context_(resources, control), epoll_(std::move(epoll)), timer_(std::move(timer)) {}

VerbsDomain::~VerbsDomain() {
  // The peers' NICs acknowledge a goodbye in microseconds, unless they are gone.
  const Clock::time_point deadline = Clock::now() + context_.resources.tuning.close_timeout;
  const auto parting = [this] { return std::ranges::any_of(ending_, &Link::parting); };
  while (parting() && Clock::now() < deadline) {
    if (!poll()) ::usleep(50);
  }
}

VerbsDomain::Held VerbsDomain::held() const noexcept {
  return {links_.size(), context_.resources.credits - context_.credits,
          context_.resources.tuning.message_buffers - context_.resources.buffers->free()};
}

// --- Links

Link* VerbsDomain::find(LinkId id) const noexcept {
  Link* const link = links_.find(id);
  return link == nullptr || link->fenced ? nullptr : link;
}

void VerbsDomain::attach(LinkId id, std::unique_ptr<LinkEnd> end) {
  const Tuning& tuning = context_.resources.tuning;
  const auto& connection = static_cast<const Connection&>(*end);
  if (links_.size() == 0) ask_at_ = Clock::now() + tuning.ask_interval;
  Link& link = links_.add(std::make_unique<Link>(context_, id, connection));
  if (const int event = context_.resources.failed_by.load(std::memory_order_relaxed);
      event != DomainResources::kSound) {
    return break_link(link, event_error(context_.resources, event));
  }
  if (connection.offering()) {
    owing_.push_back(&link);
    say_owed();
  } else {
    waiting_.push_back({id, Clock::now() + tuning.connect_timeout});
  }
}

bool VerbsDomain::fence(LinkId id) {
  Link* const link = find(id);
  if (link == nullptr) return true;
  link->down.reset();
  end(*link, peer_down("write", "the link was fenced on this side"), true);
  // Then its queue pair for writes is destroyed, and the peer cannot write over the one for messages.
  if (!link->closed()) return false;
  link->fenced = true;
  if (link->over()) links_.erase(*link);
  return true;
}

void VerbsDomain::break_link(Link& link, const Error& why, bool goodbye) {
  if (!link.ending()) link.down = why;
  end(link, why, goodbye);
}

void VerbsDomain::end(Link& link, const Error& why, bool goodbye) {
  if (!link.ending()) ending_.push_back(&link);
  link.end(why, goodbye, Clock::now());
}

void VerbsDomain::check(Link& link) {
  if (link.fault && !link.ending()) break_link(link, *std::exchange(link.fault, std::nullopt));
}

bool VerbsDomain::step_ends() {
  if (ending_.empty()) return false;
  bool any = false;
  bool closed_one = false;  // closing one link ends up to 512 batches, which is enough for one poll()
  const Clock::time_point now = Clock::now();
  std::erase_if(ending_, [&](Link* link) {
    if (closed_one) return false;
    const bool was_closed = link->closed();
    any |= link->step(now, completions_);
    closed_one = link->closed() && !was_closed;
    if (link->closed() && link->down) completions_.link_down(link->id(), *std::exchange(link->down, std::nullopt));
    if (!link->over()) return false;
    if (link->fenced) links_.erase(*link);
    return true;
  });
  return any;
}

// --- Data path

Posted VerbsDomain::post(LinkId id, const WriteBatch& batch) {
  Link* const link = find(id);
  if (link == nullptr || link->closed()) return refuse(batch.work, peer_down("write", "the link was fenced or broke"));
  if (batch.page_bytes > 0 && !link->knows_key(batch.rkey)) {
    return refuse(batch.work, verbs_error(ErrorCode::kUnknownRegion, "write",
                                          "not a key of the domain at the other end of this link"));
  }
  const Posted posted = link->post(batch);
  if (posted == Posted::kYes && link->has_rest()) with_rest_.push_back(link);
  check(*link);
  return posted;
}

Posted VerbsDomain::send(LinkId id, WorkId work, std::span<const std::byte> message) {
  Link* const link = find(id);
  if (link == nullptr || link->closed()) return refuse(work, peer_down("send", "the link was fenced or broke"));
  const Posted posted = link->send(work, message);
  check(*link);
  return posted;
}

void VerbsDomain::take(LinkId id, uint32_t slot) {
  Link* const link = find(id);
  if (link == nullptr) return;
  const bool owed = link->owes();
  link->take(slot);
  if (!owed && link->owes()) owing_.push_back(link);
}

bool VerbsDomain::poll() {
  bool any = take_completions(context_.resources.tuning.poll_completions);
  context_.resources.write_receives->refill();
  context_.resources.message_receives->refill();
  any |= say_owed();
  any |= continue_rests();
  const bool look = ++polls_ % kPollsPerLook == 0;
  if (look || !ending_.empty()) any |= read_events();
  if (look) ask_peers();
  any |= step_ends();
  any |= expire();
  return any;
}

bool VerbsDomain::say_owed() {
  return std::erase_if(owing_, [this](Link* link) {
           const bool said = link->ending() || link->say_owed();
           check(*link);
           return said;
         }) > 0;
}

bool VerbsDomain::continue_rests() {
  bool any = false;
  std::erase_if(with_rest_, [&](Link* link) {
    if (link->can_continue()) any |= link->continue_rest();
    check(*link);
    return link->ending() || !link->has_rest();
  });
  return any;
}

// --- Completions

bool VerbsDomain::take_completions(uint32_t limit) {
  uint32_t taken = 0;
  while (taken < limit) {
    const std::span<const abi::ibv_wc> batch = context_.completions.take();
    for (const abi::ibv_wc& completion : batch) handle(completion);
    taken += static_cast<uint32_t>(batch.size());
    if (batch.size() < Completions::kBatch) break;
  }
  return taken > 0;
}

void VerbsDomain::handle(const abi::ibv_wc& completion) {
  // The id is the only valid field to decide by: after an error the opcode means nothing.
  const WorkRequestId request = WorkRequestId::decode(completion.wr_id);
  if (request.kind == Kind::kWrite || request.kind == Kind::kMessage) {
    sent(request, completion);
  } else {
    received(request, completion);
  }
}

void VerbsDomain::sent(const WorkRequestId& request, const abi::ibv_wc& completion) {
  Link* const link = links_.find(request.link);
  if (link == nullptr) return;
  if (completion.status == abi::IBV_WC_SUCCESS) {
    const std::optional<Sent> done = link->completed(request);
    if (!done) {
      break_link(*link, verbs_error(ErrorCode::kSystem, "write", "the NIC completed a request that was not posted"));
    } else if (done->work) {
      completions_.done(*done->work);
    }
    return;
  }
  if (link->ending()) {  // after the first error, or the link's end, the remaining requests are flushed
    if (request.kind == Kind::kMessage) link->fall_silent();
    return;
  }
  ErrorCode code = ErrorCode::kPeerDown;
  std::string hint;
  switch (completion.status) {
    case abi::IBV_WC_REM_ACCESS_ERR:
      code = ErrorCode::kUnknownRegion;
      hint = ": the peer knows no region with this key and range, or has revoked it";
      break;
    case abi::IBV_WC_LOC_PROT_ERR:
    case abi::IBV_WC_LOC_LEN_ERR:
      code = ErrorCode::kInvalidArgument;
      hint = ": the source is not registered memory";
      break;
    case abi::IBV_WC_RETRY_EXC_ERR:
      hint = ": the peer's NIC does not answer";
      break;
    default:
      break;
  }
  const Error error = verbs_error(code, request.kind == Kind::kWrite ? "write" : "send",
                                  std::string(context_.resources.device->library().wc_status_str(completion.status)) +
                                      " (vendor code " + std::to_string(completion.vendor_err) + ")" + hint);
  link->failed(request, error);
  break_link(*link, error);
}

void VerbsDomain::received(const WorkRequestId& request, const abi::ibv_wc& completion) {
  const bool is_message = request.kind == Kind::kMessageReceive;
  ReceiveQueue& receives = is_message ? *context_.resources.message_receives : *context_.resources.write_receives;
  const uint32_t slot = request.sequence;
  Link* const link = links_.by_number(completion.qp_num);
  if (link != nullptr && !link->closed()) {
    if (completion.status != abi::IBV_WC_SUCCESS) {
      const char* const words = context_.resources.device->library().wc_status_str(completion.status);
      if (!link->ending()) break_link(*link, peer_down("receive", words));
    } else if (is_message) {
      message_arrived(*link, completion, receives.bytes(slot, completion.byte_len));
    } else {
      write_arrived(*link, completion);
    }
  }
  receives.give_back(slot);
}

void VerbsDomain::write_arrived(Link& link, const abi::ibv_wc& completion) {
  if (completion.opcode != abi::IBV_WC_RECV_RDMA_WITH_IMM) {
    return break_link(link, peer_down("receive", "the peer sent a message where writes belong"));
  }
  link.count_landed();
  completions_.immediate(link.id(), big_endian(completion.imm_data));
}

void VerbsDomain::message_arrived(Link& link, const abi::ibv_wc& completion, std::span<const std::byte> bytes) {
  const bool says = (completion.wc_flags & abi::IBV_WC_WITH_IMM) != 0;
  if (says && hear(link, Control::decode(big_endian(completion.imm_data)), bytes)) return;
  break_link(link, peer_down("receive", "the peer sent an unexpected message"));
}

bool VerbsDomain::hear(Link& link, const Control& control, std::span<const std::byte> bytes) {
  switch (control.kind) {
    case Control::Kind::kHello:
      return link.hear_hello();
    case Control::Kind::kMessage:
      if (bytes.empty() || !link.arrived(control.value)) return false;
      completions_.message(link.id(), control.value, bytes);
      return true;
    case Control::Kind::kTaken:
      return link.hear_taken(control.value, completions_);
    case Control::Kind::kGoodbye:
      link.hear_goodbye(control.value);
      // without a goodbye, which the peer does not need
      break_link(link, peer_down("write", "the peer ended the link"), false);
      return true;
  }
  return false;
}

// --- Sleeping, events, deadlines

bool VerbsDomain::prepare_sleep() {
  ask_peers();
  if (std::ranges::any_of(with_rest_, &Link::can_continue)) return false;
  if (std::ranges::any_of(owing_, &Link::can_say)) return false;
  if (!context_.completions.arm() && read_events()) return false;
  if (take_completions(Completions::kBatch)) return false;
  timer_.arm(next_deadline());
  return completions_.empty();
}

bool VerbsDomain::read_events() {
  DomainResources& resources = context_.resources;
  for (uint32_t read = 0; read < kEventsPerPoll; ++read) {
    const std::optional<DeviceEvent> event = next_event(resources);
    if (!event) return read > 0;
    switch (event->kind) {
      case DeviceEvent::Kind::kQueuePairFailed:
        if (Link* const link = links_.by_number(event->number)) break_link(*link, event_error(resources, event->type));
        break;
      case DeviceEvent::Kind::kLastReceive:
        if (Link* const link = links_.by_number(event->number)) link->note_last_receive(event->number);
        break;
      case DeviceEvent::Kind::kPortDown:
        if (event->number == resources.device->spec().port)
          port_deadline_ = Clock::now() + resources.tuning.port_timeout;
        break;
      case DeviceEvent::Kind::kPortUp:
        if (event->number == resources.device->spec().port) port_deadline_.reset();
        break;
      case DeviceEvent::Kind::kDeviceFailed:
        resources.failed_by.store(event->type, std::memory_order_relaxed);
        links_.each([&](Link& link) { break_link(link, event_error(resources, event->type)); });
        break;
      case DeviceEvent::Kind::kOther:
        break;
    }
  }
  return true;
}

bool VerbsDomain::expire() {
  if (waiting_.empty() && !port_deadline_) return false;
  const Clock::time_point now = Clock::now();
  bool any = false;
  if (port_deadline_ && *port_deadline_ <= now) {
    port_deadline_.reset();
    any = true;
    const Error error = peer_down("write", context_.resources.device->spec().name + "'s port is down");
    links_.each([&](Link& link) { break_link(link, error); });
  }
  std::erase_if(waiting_, [&](const Waiting& waiting) {
    Link* const link = find(waiting.link);
    if (link == nullptr || link->up() || link->ending()) return true;
    if (waiting.deadline > now) return false;
    break_link(*link, peer_down("connect", "the peer was not ready after " +
                                               std::to_string(context_.resources.tuning.connect_timeout.count()) +
                                               " ms: do the two NICs reach each other?"));
    return any = true;
  });
  return any;
}

void VerbsDomain::ask_peers() {
  if (links_.size() == 0) return;
  const Clock::time_point now = Clock::now();
  if (now < ask_at_) return;
  ask_at_ = now + context_.resources.tuning.ask_interval;
  links_.each([this](Link& link) {
    link.ask();
    check(link);
  });
}

std::optional<Clock::time_point> VerbsDomain::next_deadline() const {
  std::optional<Clock::time_point> earliest = port_deadline_;
  const auto consider = [&](std::optional<Clock::time_point> when) {
    if (when && (!earliest || *when < *earliest)) earliest = when;
  };
  for (const Link* link : ending_) consider(link->deadline());
  for (const Waiting& waiting : waiting_) consider(waiting.deadline);
  if (links_.size() > 0) consider(ask_at_);
  return earliest;
}

}  // namespace kvc::verbs
