// LinkBase: the parts that links of all same-machine lanes share: the socket, both rings, messages, waiting batches,
// and the end.
//
// A lane's Link handles the control messages about its memory, writes the batches, and accounts for writes in flight.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "base/error.h"
#include "lane/completion_queue.h"
#include "lane/control_queue.h"
#include "providers/same_host/batch_queue.h"
#include "providers/same_host/channel.h"
#include "providers/same_host/connection.h"
#include "providers/same_host/immediate_ring.h"
#include "providers/same_host/lane.h"
#include "providers/same_host/link_events.h"
#include "providers/same_host/message_slots.h"

namespace kvc::same_host {

// References that all links of a domain share. They may be invalid when a link is destroyed.
struct LinkContext {
  LinkEvents& events;
  CompletionQueue& completions;
  ControlQueue& control;
};

// Used on the domain's thread only; nothing here blocks.
class LinkBase {
 public:
  LinkBase(const LinkBase&) = delete;
  LinkBase& operator=(const LinkBase&) = delete;

  // Reads a bounded number of messages and returns their number. Called when the socket is readable, or writable again.
  uint32_t service();
  // Reports a bounded number of arrived immediates and messages, and completes the messages that the peer has taken.
  // Returns true if there was one.
  bool receive();
  // Completes with `error` what is queued, revokes the peer's right to write and stops reading its socket. Idempotent.
  void close(const Error& error);
  // As close(), and reports the link as down.
  void break_down(const Error& error);
  bool closed() const noexcept { return closed_.has_value(); }

 protected:
  // `connection` belongs to `lane`. `in` and `out` are its two directions. `queue_depth` is the number of batches that
  // may wait, a power of two.
  LinkBase(const Lane& lane, LinkId id, const LinkContext& context, const std::shared_ptr<Connection>& connection,
           const Direction& in, const Direction& out, size_t queue_depth);
  ~LinkBase() = default;

  // Handles a control message of the peer. Returns false if the message is malformed, which ends the link.
  virtual bool handle(const Message& message, Connection::Descriptors& descriptors) = 0;
  // Called when the peer's right to write was revoked: notes which of its writes may still be landing.
  virtual void note_writes_at_close() noexcept = 0;

  // Starts to read the peer's socket and admits its writes. Call it once, before anything else.
  void begin();
  bool met() const noexcept { return connection_->met(); }
  // Requests a service() once the socket takes messages again.
  void wait_for_room();
  // Ends the link because the peer is gone.
  void lose_peer(const Error& error);

  Error peer_down(std::string_view operation, std::string message) const;
  Error overwritten(std::string_view operation) const;

  const Lane& lane_;
  const LinkId id_;
  const LinkContext context_;
  const std::shared_ptr<Connection> connection_;
  ReceiverWords& admission_;  // lies in memory that the peer reads and this side writes
  ImmediateRing ring_;
  MessageSlots messages_;
  BatchQueue queue_;
  bool socket_full_ = false;
  bool wake_due_ = false;  // a sleeping peer has not been notified of something new
  std::optional<Error> closed_;
};

}  // namespace kvc::same_host
