// Messages: the conversation of a link's two ends. What is said in it, and what comes of it, is the link's.
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

// The driving thread; nothing blocks.
class Messages {
 public:
  explicit Messages(Endpoint& endpoint) : endpoint_(endpoint) {
    for (MessageBuffer& buffer : endpoint.sends()) free_.push_back(&buffer);
  }

  // --- What is said.

  void enqueue(MessageKind kind, Bytes body = {}) { outgoing_.push_back({kind, std::move(body)}); }
  // Posts what was enqueued, as far as there are buffers. True if anything was.
  Result<bool> push();
  // The provider has done with it, and so the peer has it.
  void sent(MessageBuffer& buffer) { free_.push_back(&buffer); }
  // Something waits to be posted.
  bool waits() const noexcept { return !outgoing_.empty(); }
  // Nothing waits, and the peer has everything.
  bool idle() const noexcept { return outgoing_.empty() && free_.size() == endpoint_.sends().size(); }

  // --- What comes.

  struct Received {
    MessageKind kind;
    std::span<const std::byte> body;  // in the buffer
  };
  // Nothing if it is a stranger's.
  Result<std::optional<Received>> read(const MessageBuffer& buffer, size_t length) const;

  // --- Messages of the engines, each in a slot of its sender's until the receiver's engine has taken it.

  // kBusy while all slots are in use.
  Posted send(WorkId work, std::span<const std::byte> message);
  // The peer's engine has taken the message of this slot: its work.
  Result<WorkId> taken(std::span<const std::byte> body);
  struct UserMessage {
    uint32_t slot;
    std::span<const std::byte> bytes;
  };
  // A message of the peer's engine.
  Result<UserMessage> arrived(std::span<const std::byte> body);
  // Ours has taken it.
  void take(uint32_t slot);
  // What has not been posted will not be: only the answers that the peer waits for.
  void stop_sending() {
    std::erase_if(outgoing_, [](const Outgoing& message) { return message.kind == MessageKind::kUser; });
  }
  // The link has ended: calls `use(WorkId)` for what the peer's engine has not taken.
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
  uint32_t untaken_ = 0;  // slots of the peer's whose messages our engine has not taken, a bit each
};

// What breaks a link whose peer does not keep to the rules.
inline Error nonsense() { return link_error("receive", "the peer sent a malformed message"); }

}  // namespace kvc::libfabric
