#include "engine/message_pool.h"

#include <algorithm>
#include <chrono>
#include <utility>

namespace kvc {

bool MessagePool::put(PeerId peer, std::span<const std::byte> bytes) {
  const std::lock_guard lock(mutex_);
  if (messages_.size() >= kRoom) {
    refused_ = true;
    return false;
  }
  size_t& of_peer = of_peers_[peer];
  if (of_peer >= kRoomOfOne) {
    refused_ = true;
    return false;
  }
  ++of_peer;
  messages_.push_back({peer, Bytes(bytes.begin(), bytes.end())});
  changed_.notify_one();
  ready_.update(true);
  return true;
}

bool MessagePool::room_again() {
  const std::lock_guard lock(mutex_);
  return std::exchange(room_again_, false);
}

Message MessagePool::pop(bool& wake) {
  Message message = std::move(messages_.front());
  messages_.pop_front();
  const auto of_peer = of_peers_.find(message.peer);
  if (--of_peer->second == 0) of_peers_.erase(of_peer);
  if (refused_) {
    refused_ = false;
    room_again_ = true;
  }
  wake |= room_again_;
  return message;
}

std::vector<Message> MessagePool::take(size_t max, bool& wake) {
  const std::lock_guard lock(mutex_);
  std::vector<Message> taken;
  taken.reserve(std::min(max, messages_.size()));
  while (taken.size() < max && !messages_.empty()) taken.push_back(pop(wake));
  ready_.update(!messages_.empty());
  return taken;
}

Result<Message> MessagePool::wait(Timeout timeout, bool& wake) {
  // A deadline beyond the range of the clock would overflow into the past.
  const auto deadline = std::chrono::steady_clock::now() + std::min<Timeout>(timeout, std::chrono::hours(24 * 365));
  std::unique_lock lock(mutex_);
  if (!changed_.wait_until(lock, deadline, [this] { return !messages_.empty(); })) {
    return Error{ErrorCode::kTimeout, {}, {}, "wait_message", "no message yet"};
  }
  Message message = pop(wake);
  ready_.update(!messages_.empty());
  return message;
}

int MessagePool::fd() {
  const std::lock_guard lock(mutex_);
  return ready_.fd(!messages_.empty());
}

}  // namespace kvc
