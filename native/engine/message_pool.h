// MessagePool: received messages on their way from the worker to whoever takes them. Bounded: what has no room stays with
// its domain, and after that with its sender.
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
  // 1 MiB of messages in all, and of one peer a quarter: a peer that floods us leaves room for the others.
  static constexpr size_t kRoom = 256;
  static constexpr size_t kRoomOfOne = kRoom / 4;

  Status open() { return ready_.open(); }

  // --- The worker.

  // False: no room for a message of this peer now.
  bool put(PeerId peer, std::span<const std::byte> bytes);
  // There is room since put() said no: the domains are to be polled before the worker sleeps. Asking takes it back.
  bool room_again();

  // --- Any thread. True in `wake`: the worker may sleep over messages that have room now.

  std::vector<Message> take(size_t max, bool& wake);
  // Blocks until there is a message, or `timeout` (kTimeout).
  Result<Message> wait(Timeout timeout, bool& wake);
  // Readable while take() would return something.
  int fd();

 private:
  Message pop(bool& wake);

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Message> messages_;                 // oldest first
  std::unordered_map<PeerId, size_t> of_peers_;  // how many of them; no entry for none
  bool refused_ = false;
  bool room_again_ = false;
  ReadyFd ready_;
};

}  // namespace kvc
