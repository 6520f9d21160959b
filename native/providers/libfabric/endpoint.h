// Endpoint: what one link has of libfabric: an endpoint, its completion queue and address vector, the buffers of its
// messages, and the doorbell.
//
// Made on the control thread, which also closes it; in between the driving thread has it to itself, but for close() and
// bind(). Providers run their own progress on any thread that looks at any queue of the same device, so this is only
// about whose calls these are.
#pragma once

#include <rdma/fi_endpoint.h>
#include <rdma/fi_eq.h>
#include <rdma/fi_rma.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/unique_fd.h"
#include "lane/domain.h"
#include "providers/libfabric/device.h"
#include "providers/libfabric/wire.h"

namespace kvc::libfabric {

// An operation that the provider is carrying out. It owns `context` meanwhile, which a completion leads back to.
struct Operation {
  enum class Kind : uint8_t { kWrite, kSend, kReceive };
  fi_context2 context{};  // first
  Kind kind = Kind::kWrite;
};
// That of a message.
struct MessageBuffer : Operation {
  std::byte* bytes = nullptr;  // kMaxMessageSize
};

// An Error of a link that does not work any more.
inline Error link_error(std::string operation, std::string message) {
  return fabric_error(ErrorCode::kPeerDown, std::move(operation), std::move(message));
}

class Endpoint final : public LinkEnd {
 public:
  // Immediates that the peer has not read from its queue, at most: a device's queue that overflows is broken, and EFA
  // does not watch over it. 2,048 single pages of 4 KiB are the engine's 8 MiB.
  static constexpr uint64_t kImmediateWindow = 2048;

  // --- The control thread.

  // Opens and enables an endpoint whose receives are posted. Nobody knows its address yet. Blocks.
  static Result<std::unique_ptr<Endpoint>> open(std::shared_ptr<const Device> device, uint64_t secret);
  ~Endpoint() override;

  // Our end, for the peer.
  Result<Card> card() const;
  // The peer's end is known from now on. May block.
  Status meet(const Card& peer, bool is_offerer);

  // Memory as this endpoint has it, where each has its own. kPeerDown once the endpoint is closed. Blocks.
  Result<Memory> bind(std::byte* base, uint64_t bytes);

  // Once closed(), nothing lands any more and nothing is read from our memory; what landed before is in the queue, which
  // stays until this object ends. Memory that is bound has to be closed first. May block. Any thread: if another is about
  // it, waits for that. A provider may be busy with it for too long: then it is not closed, and has to be closed again.
  void close();
  // Whether close() has failed so since the last call.
  bool take_busy() noexcept { return busy_.exchange(false, std::memory_order_acq_rel); }

  // --- Any thread.

  bool closed() const noexcept { return closed_.load(std::memory_order_acquire); }
  uint64_t secret() const noexcept { return secret_; }
  bool is_offerer() const noexcept { return is_offerer_; }
  // Readable once the peer's process is gone; none where that cannot be told.
  const UniqueFd& pidfd() const noexcept { return pidfd_; }
  // Readable when the completion queue has something, after may_sleep(); -1: has to be looked at.
  int fd() const noexcept { return fd_; }
  // Writes that the provider takes beside the sends.
  size_t writes() const noexcept;

  // --- The driving thread; nothing blocks. What libfabric returns: 0, -FI_EAGAIN (later), or another error.

  std::span<MessageBuffer> sends() noexcept { return sends_; }
  // How many completions there were. -FI_EAVAIL: one is a failure, see failure().
  ssize_t read(std::span<fi_cq_data_entry> entries);
  struct Failure {
    Operation* operation;  // may be null
    std::string words;     // none once closed()
  };
  // Nothing: there was none after all.
  std::optional<Failure> failure();
  // Writes to the peer's `target` at `offset`; the operation's completion says that the bytes are in place there.
  // `immediate`: which then arrives there.
  ssize_t write(Operation& operation, const std::byte* from, uint64_t bytes, fid_mr* memory, const PeerMemory& target,
                uint64_t offset, std::optional<uint32_t> immediate);
  // Writes an immediate that has no pages.
  ssize_t ring(Operation& operation, uint32_t immediate);
  // Sends the first `length` bytes of one of sends().
  ssize_t send(MessageBuffer& buffer, size_t length);
  // Posts a receive.
  ssize_t receive(MessageBuffer& buffer);
  // False: there is something to read.
  bool may_sleep();

 private:
  Endpoint(std::shared_ptr<const Device> device, uint64_t secret) : device_(std::move(device)), secret_(secret) {}
  Status start();
  Status open_queue();
  Status open_endpoint();
  Status open_buffers();
  Result<Bytes> address() const;
  void hang_up();

  const std::shared_ptr<const Device> device_;
  const uint64_t secret_;
  Fid<fid_cq> cq_;
  Fid<fid_av> av_;
  // Before what must be closed after the endpoint.
  std::mutex closing_;
  std::atomic<bool> closed_ = false;
  std::atomic<bool> busy_ = false;
  int fd_ = -1;

  std::vector<std::byte> buffers_;
  std::vector<MessageBuffer> sends_;
  std::vector<MessageBuffer> receives_;
  // Where the peer writes immediates that have no pages: bytes that nobody reads.
  alignas(64) std::array<std::byte, 64> doorbell_{};

  bool is_offerer_ = false;
  fi_addr_t peer_ = FI_ADDR_UNSPEC;
  PeerMemory peer_doorbell_;
  UniqueFd pidfd_;

  Fid<fid_ep> endpoint_;
  Memory doorbell_memory_;
  Memory buffers_memory_;  // FI_MR_LOCAL
};

}  // namespace kvc::libfabric
