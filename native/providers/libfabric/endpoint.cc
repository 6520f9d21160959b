#include "providers/libfabric/endpoint.h"

#include <rdma/fi_cm.h>
#include <rdma/fi_errno.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <type_traits>
#include <utility>

#include "base/process.h"
#include "providers/libfabric/efa.h"
#include "providers/libfabric/listener.h"
#include "providers/libfabric/region.h"

namespace kvc::libfabric {
namespace {

// Messages that are being sent at a time. More than one, so that none waits for a round trip; control messages are
// rare.
constexpr size_t kSends = 8;
// Receives for the peer's user messages that our transfer engine has not taken, its sends in flight, and as many
// answers again. So nothing waits in the provider while this process is busy elsewhere. A buffer is free again once it
// was read. If immediates use up receives (FI_RX_CQ_DATA), all receives of the device are posted, which is 1 MiB of
// buffers. A sender that finds none is made to wait by the device.
constexpr size_t kMessageReceives = kMessageSlots + 2 * kSends;
constexpr size_t kQueueEntries = Endpoint::kImmediateWindow + kTransmits + kReceives;

// Access rights of message buffers.
constexpr uint64_t kMessageAccess = FI_SEND | FI_RECV;
// Every operation completes once the bytes are in the peer's memory. The flags are passed with each operation, because
// a layered endpoint ignores its default flags. ("net" 1.17 then completes writes that have only left.)
constexpr uint64_t kOperationFlags = FI_COMPLETION | FI_DELIVERY_COMPLETE;

void* descriptor_of(const Memory& memory) { return memory == nullptr ? nullptr : fi_mr_desc(memory.get()); }

}  // namespace

// --- Opening

Result<std::unique_ptr<Endpoint>> Endpoint::open(std::shared_ptr<const Device> device, uint64_t secret) {
  static_assert(offsetof(Operation, context) == 0 && std::is_standard_layout_v<Operation>);
  std::unique_ptr<Endpoint> endpoint(new Endpoint(std::move(device), secret));
  if (Status started = endpoint->start(); !started) return started.error();
  return endpoint;
}

Status Endpoint::start() {
  if (Status opened = open_queue(); !opened) return opened;
  if (Status opened = open_endpoint(); !opened) return opened;
  return open_buffers();
}

Status Endpoint::open_endpoint() {
  const auto turn = device_->turn();
  fid_ep* endpoint = nullptr;
  int result = fi_endpoint(&device_->domain(), &device_->info(), &endpoint, nullptr);
  if (result != 0) return fabric_error("open link", "fi_endpoint", result);
  endpoint_.reset(endpoint);
  result = fi_ep_bind(endpoint, &av_->fid, 0);
  if (result == 0) result = fi_ep_bind(endpoint, &cq_->fid, FI_TRANSMIT | FI_RECV);
  if (result != 0) return fabric_error("open link", "fi_ep_bind", result);
  if (device_->is_efa()) configure_efa(*endpoint);
  result = fi_enable(endpoint);
  if (result != 0) {
    Error error = fabric_error("open link", "fi_enable", result);
    // ofi_rxm's inner queue is as long as a link's times this variable. That can be more than the NIC has (Soft-RoCE:
    // 32,767).
    if (device_->provider().ends_with("ofi_rxm")) error.message += ": set FI_UNIVERSE_SIZE=8 in the environment";
    return error;
  }
  return device_->is_efa() ? check_efa(*device_, *endpoint) : Status();
}

Status Endpoint::open_queue() {
  const auto turn = device_->turn();
  Result<Fid<fid_cq>> queue = device_->open_queue(kQueueEntries);
  if (!queue) return queue.error();
  cq_ = std::move(queue.value());
  if (device_->waits_by_descriptor()) {
    if (const int result = fi_control(&cq_->fid, FI_GETWAIT, &fd_); result != 0) {
      return fabric_error("open link", "FI_GETWAIT", result);
    }
  }
  fi_av_attr attributes{};
  attributes.type = FI_AV_TABLE;
  attributes.count = 1;
  fid_av* vector = nullptr;
  if (const int result = fi_av_open(&device_->domain(), &attributes, &vector, nullptr); result != 0) {
    return fabric_error("open link", "fi_av_open", result);
  }
  av_.reset(vector);
  return {};
}

Status Endpoint::open_buffers() {
  auto doorbell = device_->register_memory(doorbell_.data(), doorbell_.size(), kRegionAccess, endpoint_.get());
  if (!doorbell) return doorbell.error();
  doorbell_memory_ = std::move(doorbell.value());
  const size_t receives =
      std::min(device_->info().rx_attr->size, device_->immediates_take_receives() ? kReceives : kMessageReceives);
  buffers_.resize((kSends + receives) * kMaxMessageSize);
  if (device_->needs(FI_MR_LOCAL)) {
    auto memory = device_->register_memory(buffers_.data(), buffers_.size(), kMessageAccess, endpoint_.get());
    if (!memory) return memory.error();
    buffers_memory_ = std::move(memory.value());
  }
  sends_.resize(kSends);
  receives_.resize(receives);
  std::byte* bytes = buffers_.data();
  for (MessageBuffer& buffer : sends_) {
    buffer.kind = Operation::Kind::kSend;
    buffer.bytes = std::exchange(bytes, bytes + kMaxMessageSize);
  }
  for (MessageBuffer& buffer : receives_) {
    buffer.kind = Operation::Kind::kReceive;
    buffer.bytes = std::exchange(bytes, bytes + kMaxMessageSize);
    if (const ssize_t result = receive(buffer); result != 0) return fabric_error("open link", "fi_recv", result);
  }
  return {};
}

Result<Bytes> Endpoint::address() const {
  size_t length = kMaxAddressBytes;
  Bytes address(length);
  if (const int result = fi_getname(&endpoint_->fid, address.data(), &length); result != 0) {
    return fabric_error("open link", "fi_getname", result);
  }
  address.resize(length);
  return address;
}

Result<Card> Endpoint::card() const {
  Card card;
  const fi_info& info = device_->info();
  card.provider = device_->provider();
  card.protocol = info.ep_attr->protocol;
  card.protocol_version = info.ep_attr->protocol_version;
  card.address_format = info.addr_format;
  card.secret = secret_;
  card.machine = Machine::current();
  card.pid = static_cast<uint32_t>(::getpid());
  Result<Bytes> own = address();
  if (!own) return own.error();
  card.address = std::move(own.value());
  Result<RemoteMemory> doorbell = device_->describe(*doorbell_memory_, doorbell_.data(), doorbell_.size());
  if (!doorbell) return doorbell.error();
  card.doorbell = std::move(doorbell.value());
  return card;
}

Status Endpoint::meet(const Card& peer, bool is_offerer) {
  // Providers read as many bytes as their kind of address has, or to the end of a string, whatever a peer has sent.
  Bytes address = peer.address;
  address.resize(kMaxAddressBytes + 1);
  int inserted = 0;
  {
    const auto turn = device_->turn();
    inserted = fi_av_insert(av_.get(), address.data(), 1, &peer_, 0, nullptr);
  }
  if (inserted != 1) return fabric_error("connect", "fi_av_insert", inserted < 0 ? inserted : -FI_EADDRNOTAVAIL);
  Result<PeerMemory> doorbell = device_->map(peer.doorbell);
  if (!doorbell) return doorbell.error();
  peer_doorbell_ = std::move(doorbell.value());
  is_offerer_ = is_offerer;
  if (Machine::current().shares_processes(peer.machine)) pidfd_ = open_pidfd(static_cast<pid_t>(peer.pid));
  return {};
}

// --- The end

Endpoint::~Endpoint() {
  close();
  buffers_memory_.reset();
  doorbell_memory_.reset();
  const auto turn = device_->turn();
  endpoint_.reset();
  av_.reset();
  cq_.reset();
}

Result<Memory> Endpoint::bind(std::byte* base, uint64_t bytes) {
  const std::lock_guard lock(closing_);
  if (closed()) return link_error("register_memory", "the link has ended");
  return device_->register_memory(base, bytes, kRegionAccess, endpoint_.get());
}

void Endpoint::close() {
  const std::lock_guard lock(closing_);
  if (closed()) return;
  if (device_->needs(FI_MR_ENDPOINT)) {  // "there must be no opened endpoints associated with the MR", nor the reverse
    doorbell_memory_.reset();
    buffers_memory_.reset();
  }
  if (endpoint_ != nullptr && device_->leaves_half_open()) hang_up();
  if (endpoint_ != nullptr && !device_->close(endpoint_->fid)) {
    busy_.store(true, std::memory_order_release);
    return;
  }
  // NOLINTNEXTLINE(bugprone-unused-return-value): it was closed above
  static_cast<void>(endpoint_.release());
  closed_.store(true, std::memory_order_release);
}

// Closes the connections that have not identified themselves (Device::leaves_half_open()), before the endpoint is
// closed.
void Endpoint::hang_up() {
  Result<Bytes> own = address();
  if (!own) return;
  const Listener listener(std::move(own.value()));
  const auto progress = [this] {
    const auto turn = device_->turn();
    fi_cq_read(cq_.get(), nullptr, 0);
  };
  listener.stop();
  progress();  // waits for a thread that is about to accept a connection
  const size_t descriptors = listener.hang_up_on_the_silent();
  // Each call takes up to 128 events (1,024 before 1.18), and those that have waited longest first. So all descriptors
  // are counted that may have an event, including connections that identified themselves meanwhile.
  constexpr size_t kEvents = 128;
  for (size_t done = 0; done <= descriptors; done += kEvents) progress();
}

// --- Data path

size_t Endpoint::writes() const noexcept { return std::max(device_->info().tx_attr->size, kSends + 1) - kSends; }

ssize_t Endpoint::read(std::span<fi_cq_data_entry> entries) {
  const auto turn = device_->turn();
  return fi_cq_read(cq_.get(), entries.data(), entries.size());
}

std::optional<Endpoint::Failure> Endpoint::failure() {
  // The library may be newer than our headers, and its fi_cq_err_entry longer.
  struct {
    fi_cq_err_entry entry{};
    std::byte later_fields[64]{};
  } failed;
  if (fi_cq_readerr(cq_.get(), &failed.entry, 0) != 1) return std::nullopt;
  const fi_cq_err_entry& entry = failed.entry;
  Failure failure{static_cast<Operation*>(entry.op_context), {}};
  if (closed()) return failure;  // cancelled; a provider offers no text any more either (ofi_rxm 1.17 crashes)
  failure.words = device_->library().strerror(entry.err);
  std::array<char, 256> text{};
  const char* own = fi_cq_strerror(cq_.get(), entry.prov_errno, entry.err_data, text.data(), text.size());
  if (own != nullptr && *own != '\0' && failure.words != own) failure.words += std::string(" (") + own + ")";
  return failure;
}

ssize_t Endpoint::write(Operation& operation, const std::byte* from, uint64_t bytes, fid_mr* memory,
                        const PeerMemory& target, uint64_t offset, std::optional<uint32_t> immediate) {
  void* descriptor = fi_mr_desc(memory);
  const iovec local{const_cast<std::byte*>(from), bytes};
  const fi_rma_iov remote{target.address + offset, bytes, target.key};
  fi_msg_rma message{};
  message.msg_iov = &local;
  message.desc = &descriptor;
  message.iov_count = 1;
  message.addr = peer_;
  message.rma_iov = &remote;
  message.rma_iov_count = 1;
  message.context = &operation.context;
  message.data = immediate.value_or(0);
  const auto turn = device_->turn();
  return fi_writemsg(endpoint_.get(), &message, kOperationFlags | (immediate ? FI_REMOTE_CQ_DATA : 0));
}

ssize_t Endpoint::ring(Operation& operation, uint32_t immediate) {
  // Every provider can write a byte. A write of 0 bytes is a special case in several.
  return write(operation, doorbell_.data(), 1, doorbell_memory_.get(), peer_doorbell_, 0, immediate);
}

ssize_t Endpoint::send(MessageBuffer& buffer, size_t length) {
  void* descriptor = descriptor_of(buffers_memory_);
  const iovec local{buffer.bytes, length};
  fi_msg message{};
  message.msg_iov = &local;
  message.desc = &descriptor;
  message.iov_count = 1;
  message.addr = peer_;
  message.context = &buffer.context;
  const auto turn = device_->turn();
  return fi_sendmsg(endpoint_.get(), &message, kOperationFlags);
}

ssize_t Endpoint::receive(MessageBuffer& buffer) {
  const auto turn = device_->turn();
  return fi_recv(endpoint_.get(), buffer.bytes, kMaxMessageSize, descriptor_of(buffers_memory_), FI_ADDR_UNSPEC,
                 &buffer.context);
}

bool Endpoint::may_sleep() {
  if (fd_ < 0) return true;
  fid* queue = &cq_->fid;
  return fi_trywait(&device_->fabric(), &queue, 1) == FI_SUCCESS;
}

}  // namespace kvc::libfabric
