// Endpoint: the libfabric objects of one link: an endpoint, its completion queue and address vector, the buffers of its
// messages, and the doorbell.
//
// Made and closed on the control thread. In between, only the driving thread uses it, except for close() and bind().
// Providers run their own progress on any thread that looks at any queue of the same device. So this rule concerns only
// the calls to this class.
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

// An operation that the provider is carrying out. The provider owns `context` meanwhile, and a completion leads back to
// it.
struct Operation {
  enum class Kind : uint8_t { kWrite, kSend, kReceive };
  fi_context2 context{};  // must be the first member
  Kind kind = Kind::kWrite;
};
// An operation on a message.
struct MessageBuffer : Operation {
  std::byte* bytes = nullptr;  // kMaxMessageSize bytes
};

// Returns an Error of a link that does not work any more.
inline Error link_error(std::string operation, std::string message) {
  return fabric_error(ErrorCode::kPeerDown, std::move(operation), std::move(message));
}

class Endpoint final : public LinkEnd {
 public:
  // The most immediates that the peer has not read from its queue. A device's queue that overflows is broken, and EFA
  // does not guard against that. 2,048 single pages of 4 KiB are the transfer engine's 8 MiB.
  static constexpr uint64_t kImmediateWindow = 2048;

  // --- For the control thread.

  // Opens and enables an endpoint and posts its receives. No peer knows its address yet. Blocks.
  static Result<std::unique_ptr<Endpoint>> open(std::shared_ptr<const Device> device, uint64_t secret);
  ~Endpoint() override;

  // Returns our end, for the peer.
  Result<Card> card() const;
  // Records the peer's end. May block.
  Status meet(const Card& peer, bool is_offerer);

  // Registers memory with this endpoint, for devices on which each endpoint has its own registrations. kPeerDown once
  // the endpoint is closed. Blocks.
  Result<Memory> bind(std::byte* base, uint64_t bytes);

  // Closes the endpoint. Once closed(), nothing lands any more and nothing is read from our memory. Completions of what
  // landed before stay in the queue until this object ends. Bound memory has to be closed first. Any thread; may block,
  // and waits for another thread that closes it. If a provider is busy with it for too long, it is not closed, and
  // close() has to be called again.
  void close();
  // Whether close() has failed that way since the last call.
  bool take_busy() noexcept { return busy_.exchange(false, std::memory_order_acq_rel); }

  // --- For any thread.

  bool closed() const noexcept { return closed_.load(std::memory_order_acquire); }
  uint64_t secret() const noexcept { return secret_; }
  bool is_offerer() const noexcept { return is_offerer_; }
  // A descriptor that is readable once the peer's process is gone; empty if the kernel offers none.
  const UniqueFd& pidfd() const noexcept { return pidfd_; }
  // A descriptor that is readable when the completion queue has an entry, after may_sleep(). -1: the queue has to be
  // polled.
  int fd() const noexcept { return fd_; }
  // Returns the number of writes that the provider takes beside the sends.
  size_t writes() const noexcept;

  // --- For the driving thread; nothing blocks. Results are libfabric's: 0, -FI_EAGAIN (later), or another error.

  std::span<MessageBuffer> sends() noexcept { return sends_; }
  // Reads completions and returns their number. -FI_EAVAIL: one of them is a failure, see failure().
  ssize_t read(std::span<fi_cq_data_entry> entries);
  struct Failure {
    Operation* operation;  // may be null
    std::string words;     // empty once closed()
  };
  // Returns the failed operation, or nothing if none has failed after all.
  std::optional<Failure> failure();
  // Writes to the peer's `target` at `offset`. The operation's completion means that the bytes are in place there.
  // `immediate`, if given, arrives at the peer after them.
  ssize_t write(Operation& operation, const std::byte* from, uint64_t bytes, fid_mr* memory, const PeerMemory& target,
                uint64_t offset, std::optional<uint32_t> immediate);
  // Writes an immediate without pages.
  ssize_t ring(Operation& operation, uint32_t immediate);
  // Sends the first `length` bytes of one of sends().
  ssize_t send(MessageBuffer& buffer, size_t length);
  // Posts a receive.
  ssize_t receive(MessageBuffer& buffer);
  // Returns false if a completion waits.
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
  // Declared before the members that must be closed after the endpoint.
  std::mutex closing_;
  std::atomic<bool> closed_ = false;
  std::atomic<bool> busy_ = false;
  int fd_ = -1;

  std::vector<std::byte> buffers_;
  std::vector<MessageBuffer> sends_;
  std::vector<MessageBuffer> receives_;
  // The peer writes immediates without pages here. The bytes are never read.
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
