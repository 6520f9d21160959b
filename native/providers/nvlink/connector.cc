#include "providers/nvlink/connector.h"

#include <unistd.h>

#include <chrono>
#include <thread>
#include <utility>
#include <vector>

#include "base/random.h"
#include "cuda/gpu_memory.h"
#include "cuda/virtual_memory.h"

namespace kvc::nvlink {

using same_host::Admission;
using same_host::Received;
using same_host::to_bytes;

namespace {

// The peer's domain has the link one turn after its connector has answered, and the answer takes its time. If a peer is
// slower than this, its memory is mapped later, region by region.
constexpr auto kAdmissionWait = std::chrono::milliseconds(100);
constexpr auto kAdmissionLook = std::chrono::microseconds(50);

// Returns a random number that all domains of this process share, and no other process's.
uint64_t process_mark() {
  static const uint64_t mark = random_key();
  return mark;
}

// A control queue that runs its tasks at once. For callers that are on the control thread already.
struct AtOnce final : ControlQueue {
  void run(std::function<void()> task) override { task(); }
};

}  // namespace

NvlinkConnector::NvlinkConnector(const DomainConfig& config, std::optional<uint64_t> process)
    : process_(process.value_or(process_mark())), gpu_(config.copy_blocks) {}

Status NvlinkConnector::open() {
  const Result<const cuda::Driver*> driver = cuda::driver();
  if (!driver) return kLane.named(driver.error());
  driver_ = driver.value();
  if (cuda::kernel_image().empty()) {
    return kLane.error(
        ErrorCode::kRefused, "open",
        "this build holds no GPU kernels: nvcc was not found when it was built. Put nvcc in PATH and rebuild");
  }
  if (Status opened = rendezvous_.open(); !opened) return opened;
  board().process = process_;
  return {};
}

std::string NvlinkConnector::description() const {
  const auto& context = gpu_.context();
  return "nvlink pid " + std::to_string(getpid()) + (context ? " GPU " + std::to_string(context->device()) : "");
}

// --- Memory

Result<std::unique_ptr<Registration>> NvlinkConnector::register_memory(const MemoryRange& range) {
  constexpr std::string_view kOperation = "register_memory";
  if (Status possible = keys_.check(); !possible) return possible.error();
  const Result<cuda::Placement> placed = cuda::placement(*driver_, range.base);
  if (!placed) return kLane.named(placed.error());
  const cuda::Placement& place = placed.value();
  if (place.device < 0) {
    return kLane.error(ErrorCode::kNotReachable, kOperation,
                       "this is host memory, and the nvlink lane moves GPU memory only: use the lane host or tcp");
  }
  Result<Shared> shared = share(place, range);
  if (!shared) return shared.error();
  Result<std::shared_ptr<cuda::Copier>> copier = gpu_.adopt(place.device);
  if (!copier) return kLane.named(copier.error());
  if (peer_memory() == nullptr) {
    auto created = std::make_shared<PeerMemory>(gpu_.context());
    const std::lock_guard lock(peer_memory_mutex_);
    peer_memory_ = std::move(created);
  }
  if (place.ipc_capable) {
    const cuda::Context::Scope scope(*gpu_.context());
    if (int result = driver_->cuIpcGetMemHandle(&shared.value().handle, place.allocation); result != cuda::kSuccess) {
      Error error = kLane.named(cuda::cuda_error(kOperation, "cuIpcGetMemHandle", result));
      error.code = ErrorCode::kRefused;
      return error;
    }
  }
  if (Status synchronous = cuda::make_synchronous(range.base); !synchronous) return kLane.named(synchronous.error());
  return std::unique_ptr<Registration>(
      std::make_unique<Region>(range, keys_, pieced_, std::move(shared.value()), std::move(copier.value())));
}

// Returns how to share the range: as one allocation, which CUDA IPC can name to other processes, or in pieces. For one
// allocation, the handle is filled in later.
Result<Shared> NvlinkConnector::share(const cuda::Placement& place, const MemoryRange& range) const {
  if (!place.ipc_capable) return share_pieces(range);
  const uint64_t offset = reinterpret_cast<uint64_t>(range.base) - place.allocation;
  if (!fits(offset, range.bytes, place.allocation_bytes)) {
    return kLane.error(ErrorCode::kRefused, "register_memory",
                       "the region spans several allocations: register each as a region of its own");
  }
  return Shared{.offset = offset};
}

// Returns the range as pieces, whose descriptors the links carry. The pieces are exported when they are sent; this
// checks whether they can be.
Result<Shared> NvlinkConnector::share_pieces(const MemoryRange& range) const {
  const auto address = reinterpret_cast<uint64_t>(range.base);
  Result<std::vector<cuda::MemoryChunk>> pieces = cuda::pieces_of(*driver_, address, range.bytes);
  Status exported;
  if (pieces) {
    if (Result<UniqueFd> first = cuda::export_piece(*driver_, pieces.value().front().address); !first) {
      exported = first.error();
      exported.error().code = ErrorCode::kRefused;
    }
  }
  if (!pieces || !exported) {
    Error error = kLane.named(pieces ? exported.error() : pieces.error());
    if (error.code == ErrorCode::kRefused) {
      error.message +=
          ": turn off what places it so, as vLLM's sleep mode does, and PYTORCH_CUDA_ALLOC_CONF=expandable_segments "
          "before PyTorch 2.5";
    }
    return error;
  }
  Shared shared;
  shared.offset = address - pieces.value().front().address;
  for (const cuda::MemoryChunk& piece : pieces.value()) shared.pieces_bytes += piece.bytes;
  shared.pieces = std::make_shared<const std::vector<cuda::MemoryChunk>>(std::move(pieces.value()));
  return shared;
}

// --- Links

std::shared_ptr<PeerMemory> NvlinkConnector::peer_memory() const {
  const std::lock_guard lock(peer_memory_mutex_);
  return peer_memory_;
}

Status NvlinkConnector::check_gpu(std::string_view operation) const {
  if (peer_memory() != nullptr) return {};
  return kLane.error(ErrorCode::kInvalidArgument, operation, "register GPU memory before connecting to peers");
}

Result<Bytes> NvlinkConnector::offer(LinkId link) {
  const Result<same_host::Invitation> invitation = rendezvous_.invite(link);
  if (!invitation) return invitation.error();
  return to_bytes(Offer{invitation.value(), process_});
}

Result<Connector::Accepted> NvlinkConnector::accept(LinkId, std::span<const std::byte> bytes) {
  const Result<Offer> offer = rendezvous_.read_offer<Offer>(bytes);
  if (!offer) return offer.error();
  if (Status ready = check_gpu("accept"); !ready) return ready.error();
  Result<same_host::PeerSocket> peer = rendezvous_.dial(offer.value());
  if (!peer) return peer.error();
  Result<std::unique_ptr<Connection>> connection = rendezvous_.say_hello(std::move(peer.value()), offer.value().secret);
  if (!connection) return connection.error();
  const bool same_process = is_ours(*connection.value(), offer.value().process);
  auto meeting = std::make_unique<Meeting>(std::move(connection.value()), PeerRegions(peer_memory(), same_process));
  send_ahead(*meeting);
  return Accepted{to_bytes(Answer{}), std::move(meeting)};
}

// The mark alone would do if no peer lied. The pid is checked too, because a match makes this side write at the peer's
// addresses in its own memory.
bool NvlinkConnector::is_ours(const Connection& peer, uint64_t mark) const {
  return mark == process_ && peer.pid() == getpid();
}

// Sends the first pieces of a region, so that the peer learns before complete() whether it can map our memory.
void NvlinkConnector::send_ahead(Meeting& meeting) const {
  if (meeting.regions.same_process()) return;
  // find() returns null for a region that is not published yet, or not any more.
  const auto [key, pieces] = pieced_.find([this](uint64_t of) { return board().find(of) != nullptr; });
  if (pieces == nullptr) return;
  meeting.pieces.tell(key, pieces);
  meeting.told = key;
  AtOnce control;
  meeting.pieces.advance(*driver_, *meeting.connection, 0, control);
}

Result<std::unique_ptr<LinkEnd>> NvlinkConnector::complete(LinkId link, std::span<const std::byte> bytes) {
  const Result<Answer> answer = kLane.read_answer<Answer>(bytes);
  const Status ready = answer ? check_gpu("complete") : answer.error();
  if (!ready) {
    withdraw(link);
    return ready.error();
  }
  Result<std::unique_ptr<Connection>> connection = rendezvous_.admit(link);
  if (!connection) return connection.error();
  const bool same_process = is_ours(*connection.value(), connection.value()->board<Board>().process);
  auto meeting = std::make_unique<Meeting>(std::move(connection.value()), PeerRegions(peer_memory(), same_process));
  if (Status mapped = map_known(*meeting); !mapped) return mapped.error();
  return std::unique_ptr<LinkEnd>(std::move(meeting));
}

// Maps the regions that the peer has registered so far. Its first write finds them mapped, and a GPU out of reach is
// noticed while another lane can still be chosen. For memory in pieces, the first pieces show that.
Status NvlinkConnector::map_known(Meeting& meeting) const {
  const Connection& connection = *meeting.connection;
  const Channel& out = connection.outgoing<Segment>();
  const auto deadline = std::chrono::steady_clock::now() + kAdmissionWait;
  while (out.admitted() == Admission::kPending && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(kAdmissionLook);
  }
  if (out.admitted() != Admission::kOpen) return {};
  AtOnce control;
  const Board& board = connection.board<Board>();
  Received last = Received::kMessage;
  while (last == Received::kMessage) {
    last = connection.receive([&](const Message& message, Connection::Descriptors& descriptors) {
      switch (message.kind) {
        case MessageKind::kWake:
          return true;
        case MessageKind::kMemory:
          return meeting.regions.hear(message, std::move(descriptors[0]), board, control);
        case MessageKind::kForget:
          return meeting.regions.forget(message, 0);
        default:
          return false;
      }
    });
  }
  if (last != Received::kNothing) return connection.what_ended(last);
  for (bool more = true; more;) {
    more = meeting.regions.prefetch(board, control);
    if (const Error* why = meeting.regions.useless()) return *why;
  }
  return {};
}

}  // namespace kvc::nvlink
