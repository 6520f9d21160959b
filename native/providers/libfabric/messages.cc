#include "providers/libfabric/messages.h"

#include <rdma/fi_errno.h>

#include <cstring>
#include <string>

namespace kvc::libfabric {
namespace {

// Answers that wait to be sent. A peer that sends requests without reading answers is broken.
constexpr size_t kMaxOutgoing = 1024;

}  // namespace

Result<bool> Messages::push() {
  if (outgoing_.size() > kMaxOutgoing) {
    return link_error("send", "the peer takes no messages, and " + std::to_string(outgoing_.size()) + " are waiting");
  }
  bool any = false;
  while (!outgoing_.empty() && !free_.empty()) {
    const Outgoing& message = outgoing_.front();
    MessageBuffer& buffer = *free_.back();
    Header header;
    header.secret = endpoint_.secret();
    header.bytes = static_cast<uint32_t>(message.body.size());
    header.kind = message.kind;
    std::memcpy(buffer.bytes, &header, sizeof(header));
    if (!message.body.empty()) std::memcpy(buffer.bytes + sizeof(header), message.body.data(), message.body.size());
    const ssize_t result = endpoint_.send(buffer, sizeof(header) + message.body.size());
    if (result == -FI_EAGAIN) break;
    if (result != 0) return fabric_error("send", "fi_sendmsg", result);
    free_.pop_back();
    outgoing_.pop_front();
    any = true;
  }
  return any;
}

Result<std::optional<Messages::Received>> Messages::read(const MessageBuffer& buffer, size_t length) const {
  Header header;
  std::memcpy(&header, buffer.bytes, sizeof(header));
  if (length < sizeof(header) || header.secret != endpoint_.secret()) return std::optional<Received>();
  if (header.bytes > kMaxBodyBytes || header.bytes > length - sizeof(header)) return nonsense();
  return std::optional<Received>({header.kind, {buffer.bytes + sizeof(header), header.bytes}});
}

Posted Messages::send(WorkId work, std::span<const std::byte> message) {
  const std::optional<uint32_t> slot = sent_.put(work);
  if (!slot) return Posted::kBusy;
  Bytes body = encode_number(*slot);
  body.insert(body.end(), message.begin(), message.end());
  enqueue(MessageKind::kUser, std::move(body));
  return Posted::kYes;
}

Result<WorkId> Messages::taken(std::span<const std::byte> body) {
  const auto slot = decode_number<uint32_t>(body);
  const std::optional<WorkId> work = slot ? sent_.take(*slot) : std::nullopt;
  if (!work) return nonsense();
  return *work;
}

Result<Messages::UserMessage> Messages::arrived(std::span<const std::byte> body) {
  if (body.size() <= sizeof(uint32_t)) return nonsense();
  const uint32_t slot = *decode_number<uint32_t>(body.first(sizeof(uint32_t)));
  if (slot >= kMessageSlots || (untaken_ & (1U << slot)) != 0) return nonsense();
  untaken_ |= 1U << slot;
  return UserMessage{slot, body.subspan(sizeof(uint32_t))};
}

void Messages::take(uint32_t slot) {
  untaken_ &= ~(1U << slot);
  enqueue(MessageKind::kTaken, encode_number(slot));
}

}  // namespace kvc::libfabric
