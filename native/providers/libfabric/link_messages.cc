// The conversation of a link's two ends: messages and what they are about, foremost keys.
#include <rdma/fi_errno.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "providers/libfabric/link.h"

namespace kvc::libfabric {
namespace {

// Answers that wait to be sent: a peer that asks without listening is broken.
constexpr size_t kMaxOutgoing = 1024;

}  // namespace

// --- Messages

bool Link::push_messages() {
  bool any = false;
  while (endpoint_ != nullptr && met_ && !outgoing_.empty() && !free_sends_.empty()) {
    const Outgoing& message = outgoing_.front();
    if (message.kind == MessageKind::kUser && !up_) return any;
    MessageSlot& slot = *free_sends_.back();
    Header header;
    header.secret = secret_;
    header.bytes = static_cast<uint32_t>(message.body.size());
    header.kind = message.kind;
    std::memcpy(slot.buffer, &header, sizeof(header));
    if (!message.body.empty()) std::memcpy(slot.buffer + sizeof(header), message.body.data(), message.body.size());
    void* descriptor = messages_memory_ == nullptr ? nullptr : fi_mr_desc(messages_memory_.get());
    const iovec local{slot.buffer, sizeof(header) + message.body.size()};
    fi_msg sent{};
    sent.msg_iov = &local;
    sent.desc = &descriptor;
    sent.iov_count = 1;
    sent.addr = peer_;
    sent.context = &slot.context;
    const ssize_t result = fi_sendmsg(endpoint_.get(), &sent, kOperationFlags);
    if (result == -FI_EAGAIN) return any;
    if (result != 0) {
      break_with(fabric_error("send", "fi_sendmsg", result));
      return true;
    }
    free_sends_.pop_back();
    outgoing_.pop_front();
    any = true;
  }
  return any;
}

void Link::enqueue(MessageKind kind, Bytes body) {
  if (outgoing_.size() >= kMaxOutgoing) {
    return break_with(
        link_down("send", "the peer takes no messages, and " + std::to_string(kMaxOutgoing) + " are waiting"));
  }
  outgoing_.push_back({kind, std::move(body)});
}

void Link::repost(MessageSlot& slot) {
  if (endpoint_ == nullptr) return;
  void* const descriptor = messages_memory_ == nullptr ? nullptr : fi_mr_desc(messages_memory_.get());
  const ssize_t result =
      fi_recv(endpoint_.get(), slot.buffer, kMaxMessageSize, descriptor, FI_ADDR_UNSPEC, &slot.context);
  if (result != 0 && !ended_) break_with(fabric_error("receive", "fi_recv", result));
}

void Link::receive(MessageSlot& slot, size_t length) {
  Header header;
  std::memcpy(&header, slot.buffer, sizeof(header));
  if (length < sizeof(header) || header.secret != secret_ || ended_) return repost(slot);  // a stranger's, or too late
  heard_ = true;
  if (header.bytes > kMaxBodyBytes || header.bytes > length - sizeof(header)) {
    return break_with(fabric_error(ErrorCode::kPeerDown, "receive", "the peer sent a message that is none"));
  }
  if (header.kind == MessageKind::kUser) {
    if (!take(slot)) held_.push_back(&slot);
    return;
  }
  obey(header.kind, {slot.buffer + sizeof(header), header.bytes});
  repost(slot);
}

// Offers a user message to the sink. False: it has no room now.
bool Link::take(MessageSlot& slot) {
  Header header;
  std::memcpy(&header, slot.buffer, sizeof(header));
  const std::span<const std::byte> body(slot.buffer + sizeof(header), header.bytes);
  if (body.size() <= sizeof(uint32_t)) {
    break_with(link_down("receive", "the peer sent a message that is none"));
    return true;
  }
  if (!shared_.sink.on_message(id_, body.subspan(sizeof(uint32_t)))) return false;
  if (endpoint_ == nullptr) return true;  // the sink has fenced us
  enqueue(MessageKind::kTaken, Bytes(body.begin(), body.begin() + sizeof(uint32_t)));
  repost(slot);
  return true;
}

bool Link::offer_held() {
  bool any = false;
  while (!held_.empty() && !ended_) {
    MessageSlot& slot = *held_.front();
    if (!take(slot)) return any;
    if (!held_.empty()) held_.pop_front();
    any = true;
  }
  return any;
}

void Link::obey(MessageKind kind, std::span<const std::byte> body) {
  bool understood = true;
  switch (kind) {
    case MessageKind::kHello:
      up_ = true;
      break;
    case MessageKind::kPing:
      enqueue(MessageKind::kPong);
      break;
    case MessageKind::kPong:
      break;
    case MessageKind::kBye:
      bye_received_ = true;
      break_with(link_down("write", "the peer ended the link"));
      break;
    case MessageKind::kAsk:
      if (const Result<Ask> ask = Ask::decode(body); ask) {
        tell(ask.value());
      } else {
        understood = false;
      }
      break;
    case MessageKind::kTell:
      if (const Result<Tell> told = Tell::decode(body); told) {
        learn(told.value());
      } else {
        understood = false;
      }
      break;
    case MessageKind::kRevoke:
    case MessageKind::kRevoked: {
      const auto rkey = decode_number<uint64_t>(body);
      understood = rkey.has_value();
      if (!understood) break;
      if (kind == MessageKind::kRevoke) {
        withdraw(*rkey);
      } else if (Region* region = shared_.regions.find(*rkey); region != nullptr && region->revoked) {
        region->told.erase(id_);
      }
      break;
    }
    case MessageKind::kTaken: {
      const auto number = decode_number<uint32_t>(body);
      const auto sent = number ? untaken_.find(*number) : untaken_.end();
      understood = sent != untaken_.end();
      if (!understood) break;
      const WorkId work = sent->second;
      untaken_.erase(sent);
      shared_.sink.on_complete(work, nullptr);
      break;
    }
    case MessageKind::kSeen: {
      const auto seen = decode_number<uint64_t>(body);
      understood = seen && *seen <= immediates_posted_;
      // Messages arrive in any order: an older one says less.
      if (understood) immediates_seen_by_peer_ = std::max(immediates_seen_by_peer_, *seen);
      break;
    }
    default:
      understood = false;
  }
  if (!understood) break_with(link_down("receive", "the peer sent a message that is none"));
}

// --- Keys

Result<fid_mr*> Link::memory_of(Region& region) {
  if (region.memory != nullptr) return region.memory.get();
  // FI_MR_ENDPOINT: this endpoint's registration of the region, made at its first use.
  const auto [entry, is_new] = memories_.try_emplace(&region);
  if (is_new) {
    auto memory = shared_.device.register_memory(region.base, region.bytes, kRegionAccess, endpoint_.get());
    if (!memory) {
      memories_.erase(entry);
      return memory.error();
    }
    entry->second = std::move(memory.value());
  }
  return entry->second.get();
}

void Link::forget_memory(Region& region) { memories_.erase(&region); }

void Link::tell(const Ask& ask) {
  Tell answer{ask.serial, ask.rkey, false, {}};
  Region* const region = shared_.regions.find(ask.rkey);
  if (region != nullptr && !region->revoked) {
    const Result<fid_mr*> memory = memory_of(*region);
    Result<RemoteMemory> described =
        memory ? shared_.device.describe(*memory.value(), region->base, region->bytes) : memory.error();
    if (!described) return break_with(described.error());
    answer.known = true;
    answer.memory = std::move(described.value());
    region->told.insert(id_);
  }
  enqueue(MessageKind::kTell, answer.encode());
}

Status Link::map(const RemoteMemory& memory, Target& target) {
  target.state = Target::State::kKnown;
  target.address = memory.address;
  target.bytes = memory.bytes;
  if (memory.key.size() == sizeof(target.key)) {
    std::memcpy(&target.key, memory.key.data(), sizeof(target.key));
    return {};
  }
  Bytes raw = memory.key;
  const int result = fi_mr_map_raw(&shared_.device.domain(), memory.address, reinterpret_cast<uint8_t*>(raw.data()),
                                   raw.size(), &target.key, 0);
  if (result != 0) return fabric_error("write", "fi_mr_map_raw", result);
  target.mapped = true;
  return {};
}

void Link::unmap(Target& target) {
  if (std::exchange(target.mapped, false)) fi_mr_unmap_key(&shared_.device.domain(), target.key);
}

void Link::learn(const Tell& told) {
  const auto found = targets_.find(told.rkey);
  if (found == targets_.end() || found->second.state != Target::State::kAsked || found->second.serial != told.serial) {
    return;  // an answer to a question that is none any more
  }
  if (!told.known) {
    targets_.erase(found);
    fail_queued(told.rkey, "the peer knows no region with this key, or has revoked it");
    return;
  }
  if (Status mapped = map(told.memory, found->second); !mapped) break_with(mapped.error());
}

void Link::withdraw(uint64_t rkey) {
  const auto found = targets_.find(rkey);
  if (found == targets_.end()) return enqueue(MessageKind::kRevoked, encode_number(rkey));
  found->second.state = Target::State::kRevoked;
  fail_queued(rkey, "the peer has revoked this key");
  if (found->second.writes == 0) release(rkey, found->second);
}

void Link::release(uint64_t rkey, Target& target) {
  unmap(target);
  targets_.erase(rkey);
  enqueue(MessageKind::kRevoked, encode_number(rkey));
}

void Link::fail_queued(uint64_t rkey, const char* why) {
  for (Batch* batch : queue_) {
    if (batch->rkey != rkey || batch->page_bytes == 0 || batch->error) continue;
    batch->error = fabric_error(ErrorCode::kUnknownRegion, "write", why);
  }
}

void Link::revoke(uint64_t rkey) { enqueue(MessageKind::kRevoke, encode_number(rkey)); }

}  // namespace kvc::libfabric
