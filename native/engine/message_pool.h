// MessagePool: received messages on their way from the transfer thread to the user. Bounded: a message without room
// stays with its domain, and beyond that with its sender.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <mutex>
#include <span>
#include <unordered_map>
#include <vector>

#include "base/ready_fd.h"
#include "engine/transfer_engine.h"

namespace kvc {

class MessagePool {
 public:
  // 1 MiB of messages in all, and a quarter of that for one peer, so that a flood of one peer leaves room for the
  // others.
  static constexpr size_t kRoom = 256;
  static constexpr size_t kRoomOfOne = kRoom / 4;

  Status open() { return ready_.open(); }

  // --- The transfer thread.

  // Adds a message. Returns false if there is no room for a message of this peer now.
  bool put(PeerId peer, std::span<const std::byte> bytes);
  // True if room has become free since put() refused a message; resets the flag. The caller must poll the domains
  // before it sleeps.
  bool room_again();

  // --- Any thread. `wake` is set to true if the transfer thread may sleep although a waiting message has room now.

  std::vector<Message> take(size_t max, bool& wake);
  // Blocks until a message arrives, or returns kTimeout after `timeout`.
  Result<Message> wait(Timeout timeout, bool& wake);
  // Readable while take() would return a message.
  int fd();

 private:
  Message pop(bool& wake);

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Message> messages_;                 // oldest first
  std::unordered_map<PeerId, size_t> of_peers_;  // messages by peer; no entry for 0
  bool refused_ = false;
  bool room_again_ = false;
  ReadyFd ready_;
};

}  // namespace kvc
