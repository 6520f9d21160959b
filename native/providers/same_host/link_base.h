// LinkBase: what the links of all lanes of one machine have: the socket, both rings, messages, waiting batches, and the end.
//
// A lane's Link says what a control message means to its memory, writes the batches, and accounts for writes under way.
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

// What all links of a domain share. It need not be there any more when a link ends.
struct LinkContext {
  LinkEvents& events;
  CompletionQueue& completions;
  ControlQueue& control;
};

// The domain's thread; nothing here blocks.
class LinkBase {
 public:
  LinkBase(const LinkBase&) = delete;
  LinkBase& operator=(const LinkBase&) = delete;

  // The socket has something to say, or takes something again: reads a bounded number of messages, and returns how many.
  uint32_t service();
  // Hands on a bounded number of arrived immediates and messages, and completes the messages that the peer has taken;
  // true if there was one.
  bool receive();
  // Completes what is queued with `error`, revokes the peer's right to write and stops listening to it. Idempotent.
  void close(const Error& error);
  // The same, and says so.
  void break_down(const Error& error);
  bool closed() const noexcept { return closed_.has_value(); }

 protected:
  // `connection` is one of `lane`; `in` and `out` are its two directions. `queue_depth`: batches that may wait, a power of
  // two.
  LinkBase(const Lane& lane, LinkId id, const LinkContext& context, const std::shared_ptr<Connection>& connection,
           const Direction& in, const Direction& out, size_t queue_depth);
  ~LinkBase() = default;

  // A control message of the peer's. False: it makes no sense, and the link ends.
  virtual bool handle(const Message& message, Connection::Descriptors& descriptors) = 0;
  // The peer's right to write was revoked just now: notes which of its writes may still be landing.
  virtual void note_writes_at_close() noexcept = 0;

  // Once, before anything else: listens to the peer and lets it write.
  void begin();
  bool met() const noexcept { return connection_->met(); }
  // The socket takes no more: service() follows when it does.
  void wait_for_room();
  // The peer is gone.
  void lose_peer(const Error& error);

  Error peer_down(std::string_view operation, std::string message) const;
  Error overwritten(std::string_view operation) const;

  const Lane& lane_;
  const LinkId id_;
  const LinkContext context_;
  const std::shared_ptr<Connection> connection_;
  ReceiverWords& admission_;  // the peer's, to write here
  ImmediateRing ring_;
  MessageSlots messages_;
  BatchQueue queue_;
  bool socket_full_ = false;
  bool wake_due_ = false;  // there is something that a sleeping peer has not been told of
  std::optional<Error> closed_;
};

}  // namespace kvc::same_host
