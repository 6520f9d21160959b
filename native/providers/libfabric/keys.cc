#include "providers/libfabric/keys.h"

#include <utility>

namespace kvc::libfabric {
namespace {

// Requests for keys that wait for memory. A peer requests each region once.
constexpr size_t kMaxWaiting = 1024;

}  // namespace

// --- The peer's regions

Keys::Target& Keys::target(uint64_t rkey) {
  const auto [entry, is_new] = targets_.try_emplace(rkey);
  if (is_new) {
    entry->second.serial = next_serial_++;
    messages_.enqueue(MessageKind::kAsk, Ask{entry->second.serial, rkey}.encode());
  }
  return entry->second;
}

void Keys::written(uint64_t rkey, Target& target) {
  --target.writes;
  if (target.state == Target::State::kRevoked && target.writes == 0) release(rkey);
}

Result<std::optional<uint64_t>> Keys::learn(std::span<const std::byte> tell) {
  const Result<Tell> told = Tell::decode(tell);
  if (!told) return nonsense();
  const uint64_t rkey = told.value().rkey;
  const auto found = targets_.find(rkey);
  if (found == targets_.end() || found->second.state != Target::State::kAsked ||
      found->second.serial != told.value().serial) {
    return std::optional<uint64_t>();  // the answer to a request that is not open any more
  }
  if (!told.value().known) {
    targets_.erase(found);
    return std::optional(rkey);
  }
  Result<PeerMemory> memory = device_.map(told.value().memory);
  if (!memory) return memory.error();
  found->second.memory = std::move(memory.value());
  found->second.state = Target::State::kKnown;
  return std::optional<uint64_t>();
}

Result<std::optional<uint64_t>> Keys::lose(std::span<const std::byte> rkey) {
  const auto key = decode_number<uint64_t>(rkey);
  if (!key) return nonsense();
  const auto found = targets_.find(*key);
  if (found != targets_.end()) found->second.state = Target::State::kRevoked;
  if (found == targets_.end() || found->second.writes == 0) release(*key);
  return key;
}

void Keys::release(uint64_t rkey) {
  targets_.erase(rkey);
  messages_.enqueue(MessageKind::kRevoked, encode_number(rkey));
}

// --- Our regions

Status Keys::answer(std::span<const std::byte> ask) {
  const Result<Ask> asked = Ask::decode(ask);
  if (!asked || waiting_.size() >= kMaxWaiting) return nonsense();
  waiting_.push_back(asked.value());
  return {};
}

Result<bool> Keys::push() {
  size_t left = 0;
  for (const Ask& ask : waiting_) {
    const Result<bool> told = tell(ask);
    if (!told) return told.error();
    if (!told.value()) waiting_[left++] = ask;
  }
  const bool any = left < waiting_.size();
  waiting_.resize(left);
  return any;
}

Result<bool> Keys::tell(const Ask& ask) {
  Tell answer{ask.serial, ask.rkey, false, {}};
  if (auto* const region = static_cast<Region*>(regions_.find(ask.rkey))) {
    const Result<fid_mr*> memory = memories_.of(*region);
    if (!memory) return memory.error();
    if (memory.value() == nullptr) return false;
    Result<RemoteMemory> described = device_.describe(*memory.value(), region->base, region->bytes);
    if (!described) return described.error();
    answer.known = true;
    answer.memory = std::move(described.value());
    if (told_.emplace(ask.rkey, region).second) ++region->landing;
  }
  messages_.enqueue(MessageKind::kTell, answer.encode());
  return true;
}

void Keys::revoke(const Region& region) {
  if (told_.contains(region.key)) messages_.enqueue(MessageKind::kRevoke, encode_number(region.key));
}

Status Keys::let_go(std::span<const std::byte> rkey) {
  const auto key = decode_number<uint64_t>(rkey);
  if (!key) return nonsense();
  const auto found = told_.find(*key);
  if (found == told_.end() || !found->second->revoked) return {};
  --found->second->landing;
  told_.erase(found);
  return {};
}

void Keys::clear() {
  for (const auto& [rkey, region] : told_) --region->landing;
  told_.clear();
}

}  // namespace kvc::libfabric
