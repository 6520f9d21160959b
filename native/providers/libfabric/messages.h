// Messages: the messages between a link's two ends. The link decides their contents and acts on them.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <vector>

#include "lane/domain.h"
#include "lane/work_slots.h"
#include "providers/libfabric/endpoint.h"
#include "providers/libfabric/wire.h"

namespace kvc::libfabric {

// Used on the driving thread only; nothing blocks.
class Messages {
 public:
  explicit Messages(Endpoint& endpoint) : endpoint_(endpoint) {
    for (MessageBuffer& buffer : endpoint.sends()) free_.push_back(&buffer);
  }

  // --- Sending.

  void enqueue(MessageKind kind, Bytes body = {}) { outgoing_.push_back({kind, std::move(body)}); }
  // Posts enqueued messages, as far as buffers are free. Returns true if any was posted.
  Result<bool> push();
  // Frees the buffer of a completed send, which the peer has.
  void sent(MessageBuffer& buffer) { free_.push_back(&buffer); }
  // Whether a message waits to be posted.
  bool waits() const noexcept { return !outgoing_.empty(); }
  // Whether no message waits and the peer has all that were sent.
  bool idle() const noexcept { return outgoing_.empty() && free_.size() == endpoint_.sends().size(); }

  // --- Receiving.

  struct Received {
    MessageKind kind;
    std::span<const std::byte> body;  // lies in the buffer
  };
  // Decodes a message. Returns nothing if it comes from a stranger.
  Result<std::optional<Received>> read(const MessageBuffer& buffer, size_t length) const;

  // --- Messages of the engines. Each occupies a slot of its sender until the receiver's engine has taken it.

  // Enqueues a message. Returns kBusy while all slots are in use.
  Posted send(WorkId work, std::span<const std::byte> message);
  // Returns the work of the message that the peer's transfer engine has taken.
  Result<WorkId> taken(std::span<const std::byte> body);
  struct UserMessage {
    uint32_t slot;
    std::span<const std::byte> bytes;
  };
  // Decodes a message of the peer's transfer engine.
  Result<UserMessage> arrived(std::span<const std::byte> body);
  // Acknowledges a message that our transfer engine has taken.
  void take(uint32_t slot);
  // Drops the messages that are not posted yet. Only the answers that the peer waits for stay.
  void stop_sending() {
    std::erase_if(outgoing_, [](const Outgoing& message) { return message.kind == MessageKind::kUser; });
  }
  // Called when the link has ended: calls `use(WorkId)` for each message that the peer's transfer engine has not taken.
  template <typename Use>
  void clear(Use&& use) {
    sent_.clear(static_cast<Use&&>(use));
  }

 private:
  struct Outgoing {
    MessageKind kind;
    Bytes body;
  };

  Endpoint& endpoint_;
  std::vector<MessageBuffer*> free_;
  std::deque<Outgoing> outgoing_;
  SentMessages sent_;
  uint32_t untaken_ = 0;  // the peer's slots whose messages our transfer engine has not taken, a bit each
};

// Returns the error that breaks a link whose peer violates the protocol.
inline Error nonsense() { return link_error("receive", "the peer sent a malformed message"); }

}  // namespace kvc::libfabric
