#include "providers/verbs/domain.h"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <ctime>
#include <utility>

namespace kvc::verbs {

namespace {

using Kind = WorkRequestId::Kind;

// Events read before they are acknowledged together, which takes a lock.
constexpr unsigned kEventsAcknowledged = 1024;
// A domain that never sleeps looks for the device's events every so many polls: some milliseconds.
constexpr uint32_t kPollsPerAsyncLook = 1 << 15;

// Why no peer could carry out this batch; nullopt if one might.
std::optional<Error> impossible(const WriteBatch& batch) {
  const auto invalid = [](const char* message) { return verbs_error(ErrorCode::kInvalidArgument, "write", message); };
  if (batch.pages.empty() || batch.pages.size() > Immediate::kMaxMultiplicity) {
    return invalid("a batch has 1 to 64 pages");
  }
  if (batch.page_bytes == 0 && !batch.counted) return invalid("neither bytes nor an immediate");
  if (batch.counted && Immediate::decode(batch.immediate).multiplicity != batch.pages.size()) {
    return invalid("the immediate does not stand for the pages of its batch");
  }
  return std::nullopt;
}

void nonblocking(int fd) { ::fcntl(fd, F_SETFL, ::fcntl(fd, F_GETFL) | O_NONBLOCK); }

}  // namespace

// --- Opening and closing

Result<std::unique_ptr<VerbsDomain>> VerbsDomain::open(const DomainConfig& config, DomainSink& sink,
                                                       const Library& library, const Tuning& tuning) {
  Result<DeviceSpec> spec = DeviceSpec::parse(config.device);
  if (!spec) return spec.error();
  Result<std::unique_ptr<Device>> device = Device::open(library, spec.value());
  if (!device) return device.error();
  std::unique_ptr<VerbsDomain> domain(new VerbsDomain(sink, std::move(device.value()), tuning));
  if (Status started = domain->start(); !started) return started.error();
  return domain;
}

VerbsDomain::VerbsDomain(DomainSink& sink, std::unique_ptr<Device> device, const Tuning& tuning)
    : sink_(sink), shared_{.device = std::move(device), .tuning = tuning} {}

VerbsDomain::~VerbsDomain() {
  // The engine has fenced every link by now. The peers' NICs acknowledge a goodbye in microseconds, unless they are
  // gone.
  const Clock::time_point deadline = Clock::now() + shared_.tuning.close_timeout;
  while (!leaving_.empty() && Clock::now() < deadline) {
    if (!take_completions(shared_.tuning.poll_completions)) ::usleep(50);
    write_receives_->refill();
    message_receives_->refill();
  }
  leaving_.clear();
  links_.clear();
  if (unacknowledged_ > 0) shared_.device->library().ack_cq_events(completions_.get(), unacknowledged_);
}

Status VerbsDomain::start() {
  if (Status made = make_completion_queue(); !made) return made;
  const Tuning& tuning = shared_.tuning;
  auto writes =
      ReceiveQueue::create(*shared_.device, Kind::kWriteReceive, tuning.write_receives, 0, tuning.receive_batch);
  if (!writes) return writes.error();
  write_receives_ = std::move(writes.value());
  auto messages = ReceiveQueue::create(*shared_.device, Kind::kMessageReceive, tuning.message_receives,
                                       kMaxMessageBytes, tuning.receive_batch / 8);
  if (!messages) return messages.error();
  message_receives_ = std::move(messages.value());
  const uint32_t receives = write_receives_->slots() + message_receives_->slots();
  if (credits_ <= receives) {
    return verbs_error(ErrorCode::kResources, "open",
                       "a completion queue of " + std::to_string(credits_) + " entries is too small");
  }
  credits_ -= receives;
  shared_.credits = credits_;
  auto buffers = SendBuffers::create(*shared_.device, tuning.message_buffers);
  if (!buffers) return buffers.error();
  shared_.buffers = std::move(buffers.value());

  epoll_ = UniqueFd(::epoll_create1(EPOLL_CLOEXEC));
  timer_ = UniqueFd(::timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC));
  if (!epoll_ || !timer_) return system_error("verbs", "open", errno);
  nonblocking(channel_->fd);
  nonblocking(shared_.device->context()->async_fd);
  for (const int fd : {channel_->fd, shared_.device->context()->async_fd, timer_.get()}) {
    if (Status watched = watch(fd); !watched) return watched;
  }
  return {};
}

Status VerbsDomain::make_completion_queue() {
  const Library& library = shared_.device->library();
  abi::ibv_context* const context = shared_.device->context();
  channel_ = owned(library.create_comp_channel(context), library.destroy_comp_channel);
  if (!channel_) return verbs_error(ErrorCode::kResources, "open", "ibv_create_comp_channel", errno);
  credits_ = std::min(shared_.tuning.completions, static_cast<uint32_t>(shared_.device->limits().max_cqe));
  completions_ =
      owned(library.create_cq(context, static_cast<int>(credits_), nullptr, channel_.get(), 0), library.destroy_cq);
  if (!completions_) return verbs_error(ErrorCode::kResources, "open", "ibv_create_cq", errno);
  return {};
}

Status VerbsDomain::watch(int fd) {
  epoll_event event{.events = EPOLLIN, .data = {.fd = fd}};
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0) return system_error("verbs", "epoll_ctl", errno);
  return {};
}

VerbsDomain::Held VerbsDomain::held() const noexcept {
  return {links_.size(), leaving_.size(), shared_.regions.size(), credits_ - shared_.credits,
          shared_.tuning.message_buffers - shared_.buffers->free()};
}

// --- Memory

Result<uint64_t> VerbsDomain::register_region(std::byte* base, uint64_t bytes, int /*memfd*/,
                                              uint64_t /*memfd_offset*/) {
  return shared_.regions.add(*shared_.device, base, bytes);
}

// --- Links

Link* VerbsDomain::find(LinkId id) noexcept {
  const auto found = links_.find(id);
  return found == links_.end() ? nullptr : found->second.get();
}

Link* VerbsDomain::find_by_number(uint32_t queue_pair) noexcept {
  const auto found = by_number_.find(queue_pair);
  return found == by_number_.end() ? nullptr : found->second;
}

Result<std::unique_ptr<Link>> VerbsDomain::make_link(LinkId id) {
  if (failed_) return *failed_;
  if (find(id) != nullptr) {
    return verbs_error(ErrorCode::kInvalidArgument, "connect", "this link exists already");
  }
  const Tuning& tuning = shared_.tuning;
  Result<QueuePair> writes = QueuePair::create(*shared_.device, {completions_.get(), write_receives_->srq()}, tuning,
                                               tuning.write_slots, abi::IBV_ACCESS_REMOTE_WRITE, shared_.credits);
  if (!writes) return writes.error();
  // Nothing can be written over the queue pair for messages: it may outlive the link to say goodbye.
  Result<QueuePair> messages = QueuePair::create(*shared_.device, {completions_.get(), message_receives_->srq()},
                                                 tuning, tuning.message_slots, 0, shared_.credits);
  if (!messages) return messages.error();
  return std::make_unique<Link>(shared_, id, std::move(writes.value()), std::move(messages.value()));
}

void VerbsDomain::add(std::unique_ptr<Link> link) {
  if (links_.empty()) ask_at_ = Clock::now() + shared_.tuning.ask_interval;
  by_number_[link->queue(Kind::kWrite).number()] = link.get();
  by_number_[link->queue(Kind::kMessage).number()] = link.get();
  links_.emplace(link->id(), std::move(link));
}

Result<Bytes> VerbsDomain::offer(LinkId id) {
  Result<std::unique_ptr<Link>> link = make_link(id);
  if (!link) return link.error();
  Bytes bytes = link.value()->endpoint(id, shared_.device->address()).encode();
  add(std::move(link.value()));
  return bytes;
}

Result<Bytes> VerbsDomain::accept(LinkId id, std::span<const std::byte> offer) {
  Result<Endpoint> peer = Endpoint::decode(offer, "accept");
  if (!peer) return peer.error();
  Result<Address> address = shared_.device->address_for(peer.value().address);
  if (!address) return address.error();
  Result<Path> path = shared_.device->path_to(peer.value().address);
  if (!path) return path.error();
  Result<std::unique_ptr<Link>> link = make_link(id);
  if (!link) return link.error();
  // Ready to take in before the peer learns where to send.
  if (Status accepted = link.value()->accept(path.value(), peer.value()); !accepted) return accepted.error();
  waiting_.push_back({id, Clock::now() + shared_.tuning.connect_timeout});
  Bytes bytes = link.value()->endpoint(peer.value().link, address.value()).encode();
  add(std::move(link.value()));
  return bytes;
}

Status VerbsDomain::complete(LinkId id, std::span<const std::byte> answer) {
  Link* const link = find(id);
  if (link == nullptr) return verbs_error(ErrorCode::kUnknownPeer, "complete", "the link was fenced or broke");
  Result<Endpoint> peer = Endpoint::decode(answer, "complete");
  if (!peer) return peer.error();
  if (peer.value().link != id || link->state() != Link::State::kOffered) {
    return verbs_error(ErrorCode::kInvalidArgument, "complete", "not the answer to this link's offer");
  }
  Result<Path> path = shared_.device->path_to(peer.value().address);
  if (!path) return path.error();
  return link->complete(path.value(), peer.value());
}

bool VerbsDomain::fence(LinkId id) {
  Link* const link = find(id);
  if (link != nullptr) {
    const bool up = link->state() == Link::State::kUp;
    end(*link, verbs_error(ErrorCode::kPeerDown, "write", "the link was fenced on this side"), up);
  }
  // Its queue pair for writes is destroyed, and over the one for messages nothing can be written.
  return true;
}

// --- Ending links

void VerbsDomain::break_link(Link& link, Error error, std::optional<WorkRequestId> request) {
  if (!link.broken) link.broken = Link::Broken{std::move(error), request};
  broken_.push_back(link.id());
}

bool VerbsDomain::end_broken() {
  bool any = false;
  while (!broken_.empty()) {
    const LinkId id = broken_.back();
    broken_.pop_back();
    Link* const link = find(id);
    if (link == nullptr) continue;
    any = true;
    const Error error = link->broken->error;
    // The others' fate is the link's.
    Error others = error;
    others.code = ErrorCode::kPeerDown;
    // The queue pair for messages may still be sound: then the peer learns of it now, not at its next write.
    const bool by_message = link->broken->request && link->broken->request->kind == Kind::kMessage;
    end(*link, others, link->state() == Link::State::kUp && !by_message && !link->broken->by_peer);
    sink_.on_link_down(id, error, true);
  }
  return any;
}

void VerbsDomain::end(Link& link, const Error& error, bool goodbye) {
  const LinkId id = link.id();
  link.queue(Kind::kWrite).stop();
  if (!goodbye) link.queue(Kind::kMessage).stop();
  // What arrived or completed until now counts: destroying a queue pair may take its completions out of the queue.
  // Another link's traffic cannot keep us here: one round of the queue at most.
  take_completions(credits_ + write_receives_->slots());

  auto taken = links_.extract(id);
  if (taken.empty()) return;  // by a callback
  std::unique_ptr<Link> ended = std::move(taken.mapped());
  by_number_.erase(ended->queue(Kind::kWrite).number());
  by_number_.erase(ended->queue(Kind::kMessage).number());
  std::erase(with_rest_, ended.get());
  ended->destroy(Kind::kWrite, error, sink_);
  ended->give_up_messages(error, sink_);
  if (goodbye && ended->say_goodbye().ok()) {
    leaving_.push_back({std::move(ended), Clock::now() + shared_.tuning.goodbye_timeout});
  } else {
    ended->destroy(Kind::kMessage, error, sink_);
  }
}

// --- Data path

Posted VerbsDomain::post(LinkId id, const WriteBatch& batch) {
  Link* const link = find(id);
  std::optional<Error> error = impossible(batch);
  Region* source = nullptr;
  if (link == nullptr) {
    error = verbs_error(ErrorCode::kPeerDown, "write", "the link was fenced or broke");
  } else if (!error && batch.page_bytes > 0 && link->state() != Link::State::kOffered && !link->knows_key(batch.rkey)) {
    error = verbs_error(ErrorCode::kUnknownRegion, "write", "not a key of the domain at the other end of this link");
  } else if (!error && batch.page_bytes > 0) {
    const auto [first, last] =
        std::minmax_element(batch.pages.begin(), batch.pages.end(),
                            [](const PageWrite& left, const PageWrite& right) { return left.source < right.source; });
    source = shared_.regions.find(first->source, last->source + batch.page_bytes);
    if (source == nullptr) {
      error = verbs_error(ErrorCode::kInvalidArgument, "write", "the source is not in one registered region");
    }
  }
  if (error) {
    sink_.on_complete(batch.work, &*error);
    return Posted::kYes;
  }
  const Posted posted = link->post(batch, source);
  if (link->has_rest() && posted == Posted::kYes) with_rest_.push_back(link);
  if (link->broken) broken_.push_back(id);
  return posted;
}

Posted VerbsDomain::send(LinkId id, WorkId work, std::span<const std::byte> message) {
  Link* const link = find(id);
  std::optional<Error> error;
  if (message.empty() || message.size() > kMaxMessageBytes) {
    error = verbs_error(ErrorCode::kInvalidArgument, "send",
                        "a message has 1 to " + std::to_string(kMaxMessageBytes) + " bytes");
  } else if (link == nullptr) {
    error = verbs_error(ErrorCode::kPeerDown, "send", "the link was fenced or broke");
  }
  if (error) {
    sink_.on_complete(work, &*error);
    return Posted::kYes;
  }
  const Posted posted = link->send(work, message);
  if (link->broken) broken_.push_back(id);
  return posted;
}

bool VerbsDomain::poll() {
  bool any = deliver_held();
  any |= take_completions(shared_.tuning.poll_completions);
  write_receives_->refill();
  message_receives_->refill();
  any |= say_taken();
  for (size_t i = 0; i < with_rest_.size();) {
    Link& link = *with_rest_[i];
    if (link.can_continue()) any |= link.continue_rest();
    if (link.broken) broken_.push_back(link.id());
    if (link.has_rest()) {
      ++i;
    } else {
      with_rest_[i] = with_rest_.back();
      with_rest_.pop_back();
    }
  }
  if (++polls_ % kPollsPerAsyncLook == 0) {
    any |= read_async_event();
    ask_peers();
  }
  any |= expire();
  any |= end_broken();
  return any;
}

bool VerbsDomain::take_completions(uint32_t limit) {
  bool any = false;
  uint32_t taken = 0;
  do {
    // A callback may end a link, which comes here again: so what was taken and not handled yet stays in members.
    while (next_completion_ < taken_completions_) {
      const abi::ibv_wc completion = completion_batch_[next_completion_++];
      any = true;
      handle(completion);
    }
    if (taken >= limit || (taken > 0 && taken_completions_ < kPollBatch)) break;
    taken += poll_completions();
  } while (taken_completions_ > 0);
  return any;
}

uint32_t VerbsDomain::poll_completions() {
  const int count = shared_.device->context()->ops.poll_cq(completions_.get(), kPollBatch, completion_batch_.data());
  next_completion_ = 0;
  taken_completions_ = static_cast<uint32_t>(std::max(count, 0));  // an error of the queue itself has its own event
  return taken_completions_;
}

void VerbsDomain::handle(const abi::ibv_wc& completion) {
  // By our own id alone: after an error the opcode means nothing.
  const WorkRequestId request = WorkRequestId::decode(completion.wr_id);
  switch (request.kind) {
    case Kind::kWrite:
    case Kind::kMessage:
      sent(request, completion);
      break;
    case Kind::kWriteReceive:
      write_arrived(request.sequence, completion);
      break;
    case Kind::kMessageReceive:
      message_arrived(request.sequence, completion);
      break;
  }
}

void VerbsDomain::sent(const WorkRequestId& request, const abi::ibv_wc& completion) {
  Link* const link = find(request.link);
  if (link == nullptr) {
    // A goodbye that was heard, or never will be; or the last words of a queue pair that is gone.
    const auto found = std::find_if(leaving_.begin(), leaving_.end(),
                                    [&](const Leaving& leaving) { return leaving.link->id() == request.link; });
    if (found == leaving_.end() || request.kind != Kind::kMessage) return;
    if (completion.status == abi::IBV_WC_SUCCESS) {
      if (const std::optional<Sent> done = found->link->completed(request)) found->link->release(*done);
      if (!found->link->queue(Kind::kMessage).idle()) return;
    }
    found->link->destroy(Kind::kMessage, Error{}, sink_);
    leaving_.erase(found);
    return;
  }
  if (completion.status == abi::IBV_WC_SUCCESS) {
    const std::optional<Sent> done = link->completed(request);
    if (!done) {
      break_link(*link, verbs_error(ErrorCode::kSystem, "write", "the NIC completed a request that was not posted"));
      return;
    }
    link->release(*done);
    if (done->work) sink_.on_complete(*done->work, nullptr);
    return;
  }
  if (link->broken) return;  // what follows the first error is flushed
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
  break_link(*link,
             verbs_error(code, request.kind == Kind::kWrite ? "write" : "send",
                         std::string(shared_.device->library().wc_status_str(completion.status)) + " (vendor code " +
                             std::to_string(completion.vendor_err) + ")" + hint),
             request);
}

void VerbsDomain::write_arrived(uint32_t slot, const abi::ibv_wc& completion) {
  write_receives_->give_back(slot);
  Link* const link = find_by_number(completion.qp_num);
  if (link == nullptr) return;
  if (completion.status != abi::IBV_WC_SUCCESS) {
    break_link(*link, verbs_error(ErrorCode::kPeerDown, "receive",
                                  shared_.device->library().wc_status_str(completion.status)));
  } else if (completion.opcode != abi::IBV_WC_RECV_RDMA_WITH_IMM) {
    break_link(*link, verbs_error(ErrorCode::kPeerDown, "receive", "the peer sent a message where writes belong"));
  } else {
    sink_.on_immediate(link->id(), big_endian(completion.imm_data));
  }
}

void VerbsDomain::message_arrived(uint32_t slot, const abi::ibv_wc& completion) {
  Link* const link = find_by_number(completion.qp_num);
  if (link != nullptr && completion.status != abi::IBV_WC_SUCCESS) {
    break_link(*link, verbs_error(ErrorCode::kPeerDown, "receive",
                                  shared_.device->library().wc_status_str(completion.status)));
  } else if (link != nullptr && (completion.wc_flags & abi::IBV_WC_WITH_IMM) != 0) {
    control_arrived(*link, Control::decode(big_endian(completion.imm_data)),
                    message_receives_->bytes(slot, completion.byte_len));
  } else if (link != nullptr) {
    break_link(*link, verbs_error(ErrorCode::kPeerDown, "receive", "a message that says nothing of what it is"));
  }
  message_receives_->give_back(slot);
}

void VerbsDomain::control_arrived(Link& link, const Control& control, std::span<const std::byte> bytes) {
  switch (control.kind) {
    case Control::Kind::kHello:
      if (link.state() != Link::State::kAccepted) break;
      if (Status opened = link.open(); !opened) break_link(link, opened.error());
      return;
    case Control::Kind::kMessage: {
      const LinkId id = link.id();
      const bool of_this = std::any_of(held_.begin(), held_.end(), [&](const HeldMessage& held) {
        return held.link == id && held.slot == control.value;
      });
      if (control.value >= Link::kMessages || bytes.empty() || of_this) break;
      if (!sink_.on_message(id, bytes)) {
        held_.push_back({id, control.value, Bytes(bytes.begin(), bytes.end())});
      } else if (Link* const still = find(id)) {  // the sink may have fenced it
        took(*still, control.value);
      }
      return;
    }
    case Control::Kind::kTaken:
      link.taken(control.value, sink_);
      return;
    case Control::Kind::kGoodbye:
      break_link(link, verbs_error(ErrorCode::kPeerDown, "write", "the peer ended the link"));
      link.broken->by_peer = true;
      return;
  }
  break_link(link, verbs_error(ErrorCode::kPeerDown, "receive", "a message out of place"));
}

void VerbsDomain::took(Link& link, uint16_t slot) {
  if (!link.owes_taken()) took_.push_back(link.id());
  link.took(slot);
}

bool VerbsDomain::deliver_held() {
  bool any = false;
  // Each by itself: one that the sink has no room for must not keep others back. In a list of our own, as the sink may
  // fence a link, which takes in more.
  for (HeldMessage& held : std::exchange(held_, {})) {
    if (find(held.link) == nullptr) continue;
    if (!sink_.on_message(held.link, held.bytes)) {
      held_.push_back(std::move(held));
      continue;
    }
    any = true;
    if (Link* const link = find(held.link)) took(*link, held.slot);
  }
  return any;
}

bool VerbsDomain::say_taken() {
  return std::erase_if(took_, [this](LinkId id) {
           Link* const link = find(id);
           return link == nullptr || link->say_taken();
         }) > 0;
}

// --- Sleeping, events, deadlines

bool VerbsDomain::prepare_sleep() {
  ask_peers();
  if (!broken_.empty()) return false;
  if (std::any_of(with_rest_.begin(), with_rest_.end(), [](const Link* link) { return link->can_continue(); })) {
    return false;
  }
  if (armed_) {
    if (read_completion_event()) {
      armed_ = false;
    } else if (read_async_event()) {
      return false;  // something else woke us up
    }
  }
  if (!armed_) armed_ = shared_.device->context()->ops.req_notify_cq(completions_.get(), 0) == 0;
  // What came before the queue was armed raises no event.
  if (next_completion_ < taken_completions_ || poll_completions() > 0) return false;
  arm_timer();
  return true;
}

bool VerbsDomain::read_completion_event() {
  abi::ibv_cq* cq = nullptr;
  void* context = nullptr;
  const Library& library = shared_.device->library();
  if (library.get_cq_event(channel_.get(), &cq, &context) != 0) return false;
  if (++unacknowledged_ >= kEventsAcknowledged) {
    library.ack_cq_events(completions_.get(), std::exchange(unacknowledged_, 0));
  }
  return true;
}

bool VerbsDomain::read_async_event() {
  const Library& library = shared_.device->library();
  bool any = false;
  abi::ibv_async_event event{};
  while (library.get_async_event(shared_.device->context(), &event) == 0) {
    const int type = event.event_type;
    const bool of_queue_pair =
        type == abi::IBV_EVENT_QP_FATAL || type == abi::IBV_EVENT_QP_REQ_ERR || type == abi::IBV_EVENT_QP_ACCESS_ERR;
    const uint32_t number = of_queue_pair ? event.element.qp->qp_num : 0;
    const int port = event.element.port_num;  // of the events about ports
    // Before anything is destroyed: that waits until all events about it are acknowledged.
    library.ack_async_event(&event);
    Error error = verbs_error(ErrorCode::kPeerDown, "write", library.event_type_str(type));
    if (of_queue_pair) {
      Link* const link = find_by_number(number);
      if (link == nullptr) continue;
      any = true;
      break_link(*link, std::move(error));
    } else if (type == abi::IBV_EVENT_PORT_ERR && port == shared_.device->spec().port) {
      any = true;
      port_deadline_ = Clock::now() + shared_.tuning.port_timeout;
    } else if (type == abi::IBV_EVENT_PORT_ACTIVE && port == shared_.device->spec().port) {
      any = true;
      port_deadline_.reset();
    } else if (type == abi::IBV_EVENT_DEVICE_FATAL || type == abi::IBV_EVENT_CQ_ERR || type == abi::IBV_EVENT_SRQ_ERR) {
      any = true;
      failed_ = error;
      for (const auto& [id, link] : links_) break_link(*link, error);
    }
  }
  return any;
}

bool VerbsDomain::expire() {
  if (leaving_.empty() && waiting_.empty() && !port_deadline_) return false;
  const Clock::time_point now = Clock::now();
  bool any = false;
  if (port_deadline_ && *port_deadline_ <= now) {
    port_deadline_.reset();
    any = true;
    for (const auto& [id, link] : links_) {
      break_link(*link, verbs_error(ErrorCode::kPeerDown, "write", shared_.device->spec().name + "'s port is down"));
    }
  }
  std::erase_if(leaving_, [&](Leaving& leaving) {
    if (leaving.deadline > now) return false;
    leaving.link->destroy(Kind::kMessage, Error{}, sink_);
    return any = true;
  });
  std::erase_if(waiting_, [&](const Waiting& waiting) {
    Link* const link = find(waiting.link);
    if (link == nullptr || link->state() == Link::State::kUp) return true;
    if (waiting.deadline > now) return false;
    break_link(*link,
               verbs_error(ErrorCode::kPeerDown, "connect",
                           "the peer was not ready after " + std::to_string(shared_.tuning.connect_timeout.count()) +
                               " ms: do the two NICs reach each other?"));
    return any = true;
  });
  return any;
}

void VerbsDomain::ask_peers() {
  if (links_.empty()) return;
  const Clock::time_point now = Clock::now();
  if (now < ask_at_) return;
  ask_at_ = now + shared_.tuning.ask_interval;
  for (const auto& [id, link] : links_) {
    if (link->broken) continue;
    link->ask();
    if (link->broken) broken_.push_back(id);
  }
}

void VerbsDomain::arm_timer() {
  std::optional<Clock::time_point> earliest;
  const auto consider = [&](Clock::time_point when) { earliest = earliest ? std::min(*earliest, when) : when; };
  for (const Leaving& leaving : leaving_) consider(leaving.deadline);
  for (const Waiting& waiting : waiting_) consider(waiting.deadline);
  if (port_deadline_) consider(*port_deadline_);
  if (!links_.empty()) consider(ask_at_);
  if (!earliest && !timer_armed_) return;
  itimerspec when{};  // all zeros: disarmed; setting it also makes it unreadable again
  if (earliest) {
    const auto since_boot = std::max(earliest->time_since_epoch(), Clock::duration(1));
    const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(since_boot);
    when.it_value.tv_sec = seconds.count();
    when.it_value.tv_nsec = std::chrono::nanoseconds(since_boot - seconds).count();
  }
  ::timerfd_settime(timer_.get(), TFD_TIMER_ABSTIME, &when, nullptr);
  timer_armed_ = earliest.has_value();
}

}  // namespace kvc::verbs
