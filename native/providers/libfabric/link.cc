#include "providers/libfabric/link.h"

#include <rdma/fi_cm.h>
#include <rdma/fi_errno.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <type_traits>
#include <utility>

#include "providers/libfabric/efa.h"

namespace kvc::libfabric {
namespace {

// Batches on one link without a completion: the engine keeps 8 MiB in flight, which are 8 of its largest batches and 32
// full ones of 4 KiB pages.
constexpr size_t kMaxBatches = 128;
// Messages that are being sent at a time: control messages are rare.
constexpr size_t kSends = 8;
// User messages that the peer's engine has not taken.
constexpr size_t kMaxUntaken = 8;
// Receives: the peer's user messages, its sends under way, and as many answers again. Where immediates use up receives
// (FI_RX_CQ_DATA) all that there are, which is 1 MiB of buffers; a sender that finds none is made to wait by the device.
constexpr size_t kMessageReceives = kMaxUntaken + 2 * kSends;
// Immediates that the peer has not read from its queue, at most: a device's queue that overflows is broken, and EFA
// does not watch over it. 2,048 single pages of 4 KiB are the engine's 8 MiB.
constexpr uint64_t kImmediateWindow = 2048;
// How often we say what we have read: four times in a window, so that a sender does not come to rest.
constexpr uint64_t kReportEvery = kImmediateWindow / 4;
constexpr size_t kQueueEntries = kImmediateWindow + kTransmits + kReceives;
// Reads of the completion queue in one poll(): 4 x 64 entries of 0.1 us each, and what a provider without threads
// copies in them.
constexpr int kReadsPerPoll = 4;
// How long a link that ends reads completions while its peer may still be writing.
constexpr std::chrono::milliseconds kDrainLimit{5};

// How long a fence waits for Bye to leave: a round trip, with a connection to be made.
constexpr std::chrono::milliseconds kByeLimit{50};

// Access rights of message buffers.
constexpr uint64_t kMessageAccess = FI_SEND | FI_RECV;

}  // namespace

// --- Opening

Result<std::unique_ptr<Link>> Link::create(Shared& shared, LinkId id, uint64_t secret) {
  static_assert(offsetof(Slot, context) == 0 && std::is_standard_layout_v<Slot>);
  std::unique_ptr<Link> link(new Link(shared, id, secret));
  if (Status started = link->start(); !started) return started.error();
  return link;
}

Link::~Link() {
  if (cq_ != nullptr) close(link_down("close", "the domain was closed"));
}

Status Link::start() {
  Device& device = shared_.device;
  if (Status opened = open_queue(); !opened) return opened;
  fid_ep* endpoint = nullptr;
  int result = fi_endpoint(&device.domain(), &device.info(), &endpoint, nullptr);
  if (result != 0) return fabric_error("open link", "fi_endpoint", result);
  endpoint_.reset(endpoint);
  result = fi_ep_bind(endpoint, &av_->fid, 0);
  if (result == 0) result = fi_ep_bind(endpoint, &cq_->fid, FI_TRANSMIT | FI_RECV);
  if (result != 0) return fabric_error("open link", "fi_ep_bind", result);
  if (device.is_efa()) configure_efa(*endpoint);
  result = fi_enable(endpoint);
  if (result != 0) {
    Error error = fabric_error("open link", "fi_enable", result);
    // Its queue below is as long as a link's times this, which can be more than the NIC has (Soft-RoCE: 32,767).
    if (device.provider().ends_with("ofi_rxm")) error.message += ": set FI_UNIVERSE_SIZE=8 in the environment";
    return error;
  }
  enabled_ = true;
  if (device.is_efa()) {
    if (Status checked = check_efa(device, *endpoint); !checked) return checked;
  }
  return open_messages();
}

Status Link::open_queue() {
  Device& device = shared_.device;
  Result<Fid<fid_cq>> queue = device.open_queue(kQueueEntries);
  if (!queue) return queue.error();
  cq_ = std::move(queue.value());
  if (device.waits_by_descriptor()) {
    if (const int result = fi_control(&cq_->fid, FI_GETWAIT, &fd_); result != 0) {
      return fabric_error("open link", "FI_GETWAIT", result);
    }
  }
  fi_av_attr attributes{};
  attributes.type = FI_AV_TABLE;
  attributes.count = 1;
  fid_av* vector = nullptr;
  if (const int result = fi_av_open(&device.domain(), &attributes, &vector, nullptr); result != 0) {
    return fabric_error("open link", "fi_av_open", result);
  }
  av_.reset(vector);
  return {};
}

Status Link::open_messages() {
  const Device& device = shared_.device;
  const size_t receives =
      std::min(device.info().rx_attr->size, device.immediates_take_receives() ? kReceives : kMessageReceives);
  buffers_.resize((kSends + receives) * kMaxMessageSize);
  send_slots_.resize(kSends);
  receive_slots_.resize(receives);
  std::byte* buffer = buffers_.data();
  for (MessageSlot& slot : send_slots_) {
    slot.kind = Slot::Kind::kSend;
    slot.buffer = std::exchange(buffer, buffer + kMaxMessageSize);
    free_sends_.push_back(&slot);
  }
  for (MessageSlot& slot : receive_slots_) {
    slot.kind = Slot::Kind::kReceive;
    slot.buffer = std::exchange(buffer, buffer + kMaxMessageSize);
  }
  write_slots_.resize(std::max(device.info().tx_attr->size, kSends + 1) - kSends);
  for (WriteSlot& slot : write_slots_) free_writes_.push_back(&slot);
  if (device.needs(FI_MR_LOCAL)) {
    auto memory = device.register_memory(buffers_.data(), buffers_.size(), kMessageAccess, endpoint_.get());
    if (!memory) return memory.error();
    messages_memory_ = std::move(memory.value());
  }
  for (MessageSlot& slot : receive_slots_) repost(slot);
  if (broken_) return *broken_;
  return {};
}

Result<Card> Link::card() {
  Card card;
  const fi_info& info = shared_.device.info();
  card.provider = shared_.device.provider();
  card.protocol = info.ep_attr->protocol;
  card.protocol_version = info.ep_attr->protocol_version;
  card.address_format = info.addr_format;
  card.secret = secret_;
  card.machine = Machine::current();
  card.pid = static_cast<uint32_t>(::getpid());
  size_t length = kMaxAddressBytes;
  card.address.resize(length);
  if (const int result = fi_getname(&endpoint_->fid, card.address.data(), &length); result != 0) {
    return fabric_error("offer", "fi_getname", result);
  }
  card.address.resize(length);
  fid_mr* memory = shared_.doorbell_memory.get();
  if (memory == nullptr) {
    auto own = shared_.device.register_memory(shared_.doorbell.data(), shared_.doorbell.size(), kRegionAccess,
                                              endpoint_.get());
    if (!own) return own.error();
    doorbell_memory_ = std::move(own.value());
    memory = doorbell_memory_.get();
  }
  Result<RemoteMemory> doorbell = shared_.device.describe(*memory, shared_.doorbell.data(), shared_.doorbell.size());
  if (!doorbell) return doorbell.error();
  card.doorbell = std::move(doorbell.value());
  return card;
}

Status Link::meet(const Card& peer, bool says_hello) {
  // Providers read as much as their kind of address has, or to the end of a string, whatever a peer has sent.
  Bytes address = peer.address;
  address.resize(kMaxAddressBytes + 1);
  const int inserted = fi_av_insert(av_.get(), address.data(), 1, &peer_, 0, nullptr);
  if (inserted != 1) return fabric_error("connect", "fi_av_insert", inserted < 0 ? inserted : -FI_EADDRNOTAVAIL);
  if (Status mapped = map(peer.doorbell, doorbell_); !mapped) return mapped;
  met_ = true;
  up_ = says_hello;
  last_heard_ = Clock::now();
  if (says_hello) enqueue(MessageKind::kHello);
  const auto own = static_cast<uint32_t>(::getpid());
  if (peer.pid != own && Machine::current().shares_processes(peer.machine)) {
    pidfd_ = open_pidfd(static_cast<pid_t>(peer.pid));
  }
  return {};
}

// --- Posting

Posted Link::post(const WriteBatch& batch) {
  std::optional<Error> error;
  if (ended_) {
    error = link_down("write", "the link was fenced or broke");
  } else if (batch.pages.empty() || batch.pages.size() > Immediate::kMaxMultiplicity) {
    error = fabric_error(ErrorCode::kInvalidArgument, "write", "a batch has 1 to 64 pages");
  } else if (batch.counted && Immediate::decode(batch.immediate).multiplicity != batch.pages.size()) {
    error =
        fabric_error(ErrorCode::kInvalidArgument, "write", "the immediate does not stand for the pages of its batch");
  } else if (batch.page_bytes > shared_.device.max_write()) {
    error = fabric_error(ErrorCode::kInvalidArgument, "write",
                         shared_.device.provider() + " writes at most " + std::to_string(shared_.device.max_write()) +
                             " bytes at a time: use smaller pages");
  }
  if (error) {
    shared_.sink.on_complete(batch.work, &*error);
    return Posted::kYes;
  }
  if (batch.page_bytes == 0 && !batch.counted) {
    shared_.sink.on_complete(batch.work, nullptr);  // nothing to write and nothing to raise
    return Posted::kYes;
  }
  if (free_batches_.empty()) {
    if (batches_.size() >= kMaxBatches) return Posted::kBusy;
    free_batches_.push_back(&batches_.emplace_back());
  }
  Batch& queued = *free_batches_.back();
  free_batches_.pop_back();
  queued.active = true;
  queued.work = batch.work;
  queued.rkey = batch.rkey;
  queued.target = nullptr;
  queued.page_bytes = batch.page_bytes;
  queued.counted = batch.counted;
  queued.immediate = batch.immediate;
  queued.runs_count = 0;
  queued.next_run = 0;
  queued.in_flight = 0;
  queued.error.reset();
  for_each_run(batch, shared_.device.max_write(),
               [&queued](const PageRun& run) { queued.runs[queued.runs_count++] = run; });
  queue_.push_back(&queued);
  push_writes();
  return Posted::kYes;
}

Posted Link::send(WorkId work, std::span<const std::byte> message) {
  std::optional<Error> error;
  if (ended_) {
    error = link_down("send", "the link was fenced or broke");
  } else if (message.empty() || message.size() > kMaxMessageBytes) {
    error = fabric_error(ErrorCode::kInvalidArgument, "send",
                         "a message has 1 to " + std::to_string(kMaxMessageBytes) + " bytes");
  }
  if (error) {
    shared_.sink.on_complete(work, &*error);
    return Posted::kYes;
  }
  if (untaken_.size() >= kMaxUntaken) return Posted::kBusy;
  const uint32_t number = next_message_++;
  untaken_.emplace(number, work);
  Bytes body = encode_number(number);
  body.insert(body.end(), message.begin(), message.end());
  enqueue(MessageKind::kUser, std::move(body));
  push_messages();
  return Posted::kYes;
}

bool Link::poll() {
  if (cq_ == nullptr) return false;
  bool any = read_completions();
  any |= offer_held();
  any |= push_messages();
  any |= push_writes();
  any |= push_messages();  // what the writes asked for
  return any;
}

bool Link::may_sleep() {
  if (cq_ == nullptr) return true;
  if (next_entry_ < entries_count_) return false;
  if (fd_ < 0) return true;
  fid* queue = &cq_->fid;
  return fi_trywait(&shared_.device.fabric(), &queue, 1) == FI_SUCCESS;
}

bool Link::push_writes() {
  bool any = false;
  if (!up_ || ended_) return any;
  while (!queue_.empty()) {
    Batch& batch = *queue_.front();
    if (!resolve(batch)) return any;
    while (!batch.error && batch.next_run < batch.runs_count) {
      const ssize_t result = write(batch, batch.runs[batch.next_run]);
      if (result == -FI_EAGAIN) return any;
      if (result != 0) {
        if (!batch.error) break_with(fabric_error("write", "fi_writemsg", result));
        if (broken_) return true;
        break;
      }
      ++batch.next_run;
      ++batch.in_flight;
      any = true;
    }
    any = true;
    queue_.pop_front();
    batch.next_run = batch.runs_count;
    if (batch.in_flight == 0) end_batch(batch);
  }
  return any;
}

bool Link::resolve(Batch& batch) {
  if (batch.error || batch.target != nullptr) return true;
  if (batch.page_bytes == 0) {
    batch.target = &doorbell_;
    return true;
  }
  const auto [entry, is_new] = targets_.try_emplace(batch.rkey);
  Target& target = entry->second;
  if (is_new) {
    target.serial = next_serial_++;
    enqueue(MessageKind::kAsk, Ask{target.serial, batch.rkey}.encode());
  }
  if (target.state == Target::State::kAsked) return false;
  if (target.state == Target::State::kRevoked) {
    batch.error = fabric_error(ErrorCode::kUnknownRegion, "write", "the peer has revoked this key");
    return true;
  }
  for (uint32_t i = 0; i < batch.runs_count; ++i) {
    const uint64_t length = batch.runs[i].pages * batch.page_bytes;
    if (length <= target.bytes && batch.runs[i].target_offset <= target.bytes - length) continue;
    batch.error = fabric_error(ErrorCode::kOutOfRange, "write",
                               "offset " + std::to_string(batch.runs[i].target_offset) +
                                   " lies outside the peer's region of " + std::to_string(target.bytes) + " bytes");
    return true;
  }
  batch.target = &target;
  return true;
}

ssize_t Link::write(Batch& batch, const PageRun& run) {
  if (free_writes_.empty()) return -FI_EAGAIN;
  if (batch.counted && immediates_posted_ - immediates_seen_by_peer_ >= kImmediateWindow) return -FI_EAGAIN;
  const std::byte* from = run.source;
  uint64_t length = run.pages * batch.page_bytes;
  Region* source = nullptr;
  fid_mr* memory = nullptr;
  if (batch.page_bytes == 0) {
    from = shared_.doorbell.data();
    length = 1;  // every provider can write a byte; a write of none is a special case in several
    memory = doorbell_memory_ != nullptr ? doorbell_memory_.get() : shared_.doorbell_memory.get();
  } else {
    source = shared_.regions.holding(from, length);
    if (source == nullptr) {
      batch.error = fabric_error(ErrorCode::kInvalidArgument, "write", "the source lies in no registered region");
      return -FI_EINVAL;
    }
    Result<fid_mr*> registered = memory_of(*source);
    if (!registered) {
      batch.error = registered.error();
      return -FI_EINVAL;
    }
    memory = registered.value();
  }
  WriteSlot& slot = *free_writes_.back();
  const Target& target = *batch.target;
  void* descriptor = fi_mr_desc(memory);
  const uint64_t to = target.address + (batch.page_bytes == 0 ? 0 : run.target_offset);
  // Flags in words: a layered endpoint does not pass its default flags on ("net" 1.17 then completes what has left).
  const iovec local{const_cast<std::byte*>(from), length};
  const fi_rma_iov remote{to, length, target.key};
  fi_msg_rma message{};
  message.msg_iov = &local;
  message.desc = &descriptor;
  message.iov_count = 1;
  message.addr = peer_;
  message.rma_iov = &remote;
  message.rma_iov_count = 1;
  message.context = &slot.context;
  message.data = batch.counted ? Immediate::with_multiplicity(batch.immediate, run.pages) : 0;
  const ssize_t result =
      fi_writemsg(endpoint_.get(), &message, kOperationFlags | (batch.counted ? FI_REMOTE_CQ_DATA : 0));
  if (result != 0) return result;
  free_writes_.pop_back();
  slot.batch = &batch;
  slot.source = source;
  if (source != nullptr) ++source->reads;
  ++batch.target->writes;
  if (batch.counted) ++immediates_posted_;
  return 0;
}

// --- Completions

bool Link::read_completions() {
  bool any = false;
  for (int read = 0; read < kReadsPerPoll; ++read) {
    while (next_entry_ < entries_count_) {
      any = true;
      handle(entries_[next_entry_++]);
    }
    if (cq_ == nullptr) return any;
    const ssize_t got = fi_cq_read(cq_.get(), entries_.data(), entries_.size());
    if (got == -FI_EAGAIN || got == 0) return any;
    if (got == -FI_EAVAIL) {
      if (!handle_error()) return any;
      any = true;
    } else if (got < 0) {
      break_with(fabric_error("poll", "fi_cq_read", got));
      return true;
    } else {
      next_entry_ = 0;
      entries_count_ = static_cast<size_t>(got);
    }
  }
  while (next_entry_ < entries_count_) {
    any = true;
    handle(entries_[next_entry_++]);
  }
  return any;
}

void Link::drain() {
  // The queue of an endpoint that was never enabled must not be read: ofi_rxm 1.17 crashes (seen over rxe, where
  // fi_enable refuses its queue's size).
  if (!enabled_) return;
  const Clock::time_point limit = Clock::now() + kDrainLimit;
  while (read_completions() && (endpoint_ == nullptr || Clock::now() < limit)) {
  }
}

void Link::handle(const fi_cq_data_entry& entry) {
  auto* const slot = static_cast<Slot*>(entry.op_context);
  // A write's own completion may carry the flag as well.
  if ((entry.flags & FI_REMOTE_CQ_DATA) != 0 && (entry.flags & (FI_WRITE | FI_SEND)) == 0) {
    if (slot != nullptr && shared_.device.immediates_take_receives()) repost(*static_cast<MessageSlot*>(slot));
    return count(static_cast<uint32_t>(entry.data));
  }
  if (slot == nullptr) return;
  switch (slot->kind) {
    case Slot::Kind::kWrite:
      heard_ = true;
      return finish(*static_cast<WriteSlot*>(slot), nullptr);
    case Slot::Kind::kSend:
      return free_sends_.push_back(static_cast<MessageSlot*>(slot));
    case Slot::Kind::kReceive:
      return receive(*static_cast<MessageSlot*>(slot), entry.len);
  }
}

bool Link::handle_error() {
  // The library may be newer than our headers, and its fi_cq_err_entry longer.
  struct {
    fi_cq_err_entry entry{};
    std::byte later_fields[64]{};
  } failed;
  if (fi_cq_readerr(cq_.get(), &failed.entry, 0) != 1) return false;
  const fi_cq_err_entry& entry = failed.entry;
  auto* const slot = static_cast<Slot*>(entry.op_context);
  if (ended_) {  // cancelled with the endpoint; a provider has no words any more either (ofi_rxm 1.17 crashes)
    if (slot != nullptr && slot->kind == Slot::Kind::kWrite) finish(*static_cast<WriteSlot*>(slot), nullptr);
    return true;
  }
  std::string words = shared_.device.library().strerror(entry.err);
  std::array<char, 256> text{};
  const char* own = fi_cq_strerror(cq_.get(), entry.prov_errno, entry.err_data, text.data(), text.size());
  if (own != nullptr && *own != '\0' && words != own) words += std::string(" (") + own + ")";
  const char* operation = "receive";
  if (slot != nullptr && slot->kind == Slot::Kind::kWrite) operation = "write";
  if (slot != nullptr && slot->kind == Slot::Kind::kSend) operation = "send";
  const Error error = link_down(operation, shared_.device.provider() + ": " + words);
  if (slot != nullptr && slot->kind == Slot::Kind::kWrite) finish(*static_cast<WriteSlot*>(slot), &error);
  break_with(error);
  return true;
}

void Link::finish(WriteSlot& slot, const Error* error) {
  if (Region* source = std::exchange(slot.source, nullptr)) --source->reads;
  free_writes_.push_back(&slot);
  Batch* const batch = std::exchange(slot.batch, nullptr);
  if (batch == nullptr) return;
  Target& target = *batch->target;
  --target.writes;
  --batch->in_flight;
  if (target.state == Target::State::kRevoked && target.writes == 0) release(batch->rkey, target);
  if (error != nullptr && !batch->error) batch->error = *error;
  if (batch->in_flight == 0 && batch->next_run == batch->runs_count) end_batch(*batch);
}

void Link::count(uint32_t immediate) {
  heard_ = true;
  ++immediates_seen_;
  if (!ended_ && immediates_seen_ - immediates_reported_ >= kReportEvery) {
    immediates_reported_ = immediates_seen_;
    enqueue(MessageKind::kSeen, encode_number(immediates_seen_));
  }
  shared_.sink.on_immediate(id_, immediate);
}

// --- The end

void Link::look_after(Clock::time_point now, Clock::duration gap) {
  if (ended_ || broken_ || !met_) return;
  if (is_gone(pidfd_)) {
    drain();  // its last words
    if (!broken_) break_with(link_down("write", "the peer's process is gone"));
    return;
  }
  // Who was stopped himself does not blame the peer for the silence.
  if (std::exchange(heard_, false) || gap > shared_.tuning.look + shared_.tuning.ping_after) last_heard_ = now;
  const auto silence = now - last_heard_;
  if (!up_) {
    if (silence > shared_.tuning.hello) break_with(link_down("connect", "the peer did not complete the connection"));
  } else if (silence > shared_.tuning.silence) {
    break_with(
        link_down("write", "the peer has been silent for " + std::to_string(shared_.tuning.silence.count()) + " ms"));
  } else if (silence >= shared_.tuning.ping_after) {
    enqueue(MessageKind::kPing);
  }
}

void Link::break_with(Error error) {
  if (broken_ || ended_) return;
  // Which call finds out that the peer is gone depends on the provider and the moment ("sockets" says "No such file or
  // directory" in fi_writemsg() or fi_sendmsg()); to those who posted on the link it is one thing. Without a peer, the
  // link is still being opened, and its error is that.
  if (met_) error.code = ErrorCode::kPeerDown;
  broken_ = std::move(error);
}

void Link::end_batch(Batch& batch) {
  const WorkId work = batch.work;
  const std::optional<Error> error = std::exchange(batch.error, std::nullopt);
  batch.active = false;
  free_batches_.push_back(&batch);
  shared_.sink.on_complete(work, error ? &*error : nullptr);
}

void Link::end_posted(const Error& error) {
  if (std::exchange(ended_, true)) return;
  queue_.clear();
  std::erase_if(outgoing_, [](const Outgoing& message) { return message.kind == MessageKind::kUser; });
  held_.clear();
  for (WriteSlot& slot : write_slots_) slot.batch = nullptr;
  for (Batch& batch : batches_) {
    if (!batch.active) continue;
    if (!batch.error) batch.error = error;
    end_batch(batch);
  }
  for (const auto& [number, work] : std::exchange(untaken_, {})) shared_.sink.on_complete(work, &error);
}

bool Link::leave(const Error& error) {
  if (!ended_) {
    end_posted(error);
    if (met_ && !bye_received_) leaving_until_ = Clock::now() + kByeLimit;
  }
  if (!leaving_until_ || Clock::now() >= *leaving_until_) return true;
  push_messages();
  // Bye goes last, when the peer has everything else: messages arrive in any order.
  if (!outgoing_.empty() || free_sends_.size() < send_slots_.size()) return false;
  if (std::exchange(bye_sent_, true)) return true;
  enqueue(MessageKind::kBye);
  push_messages();
  return false;
}

void Link::close(const Error& error) {
  if (cq_ == nullptr) return;
  drain();
  end_posted(error);
  // What the provider still carries out ends with the endpoint; what landed before that is still in the queue.
  endpoint_.reset();
  drain();
  for (WriteSlot& slot : write_slots_) {
    if (Region* source = std::exchange(slot.source, nullptr)) --source->reads;
  }
  for (auto& [rkey, target] : targets_) unmap(target);
  unmap(doorbell_);
  targets_.clear();
  shared_.regions.forget(id_);
  memories_.clear();
  doorbell_memory_.reset();
  messages_memory_.reset();
  cq_.reset();
  av_.reset();
  fd_ = -1;
  pidfd_.reset();
}

}  // namespace kvc::libfabric
