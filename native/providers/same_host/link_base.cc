#include "providers/same_host/link_base.h"

#include <utility>

namespace kvc::same_host {

LinkBase::LinkBase(const Lane& lane, LinkId id, const LinkContext& context,
                   const std::shared_ptr<Connection>& connection, const Direction& in, const Direction& out,
                   size_t queue_depth)
    : lane_(lane),
      id_(id),
      context_(context),
      connection_(connection),
      admission_(*in.receiver),
      ring_(id, context.completions, in, out),
      messages_(id, context.completions, in, out),
      queue_(queue_depth) {}

void LinkBase::begin() {
  if (Status added = context_.events.add(lane_, id_, *connection_); !added) return break_down(added.error());
  admission_.admit(Admission::kOpen);
  connection_->send({.kind = MessageKind::kWake});  // the peer may have batches that wait for the admission
}

uint32_t LinkBase::service() {
  if (closed_) return 0;
  if (std::exchange(socket_full_, false)) context_.events.watch_room(id_, *connection_, false);
  uint32_t messages = 0;
  const Received last = connection_->receive([&](const Message& message, Connection::Descriptors& descriptors) {
    ++messages;
    return handle(message, descriptors);
  });
  if (last == Received::kClosed) lose_peer(connection_->what_ended(last));
  if (last == Received::kMalformed) break_down(connection_->what_ended(last));
  return messages;
}

void LinkBase::wait_for_room() {
  socket_full_ = true;
  context_.events.watch_room(id_, *connection_, true);
}

bool LinkBase::receive() {
  if (closed_) return false;
  const Taken immediates = ring_.receive();
  if (immediates == Taken::kSome && ring_.starves_peer()) connection_->send({.kind = MessageKind::kWake});
  const Taken messages = messages_.receive();
  const bool completed = messages_.complete();
  if (immediates == Taken::kOverwritten || messages == Taken::kOverwritten) break_down(overwritten("receive"));
  return immediates != Taken::kNothing || messages != Taken::kNothing || completed;
}

void LinkBase::close(const Error& error) {
  if (closed_) return;
  closed_ = error;
  admission_.admit(Admission::kRevoked);
  note_writes_at_close();
  context_.events.remove(*connection_);
  messages_.complete();
  messages_.fail(error);
  for (; !queue_.empty(); queue_.pop()) context_.completions.failed(queue_.front().work, error);
}

void LinkBase::break_down(const Error& error) {
  if (closed_) return;
  close(error);
  context_.completions.link_down(id_, error);
}

// All that the peer did before its end counts: messages that it has taken, pages that it has written, and messages that
// it has sent.
void LinkBase::lose_peer(const Error& error) {
  messages_.receive();
  break_down(error);
}

Error LinkBase::peer_down(std::string_view operation, std::string message) const {
  return lane_.error(ErrorCode::kPeerDown, operation, std::move(message));
}

Error LinkBase::overwritten(std::string_view operation) const {
  return peer_down(operation, "the peer has overwritten the link's control words");
}

}  // namespace kvc::same_host
