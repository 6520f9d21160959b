#include "providers/verbs/send_queue.h"

#include <cerrno>

namespace kvc::verbs {

Result<uint32_t> SendQueue::post(abi::ibv_send_wr* first, uint32_t count, Sent sent) {
  abi::ibv_send_wr* refused = nullptr;
  const int error = pair_->post(first, &refused);
  uint32_t taken = count;
  if (error != 0) {
    taken = 0;
    for (const abi::ibv_send_wr* request = first; request != refused && request != nullptr; request = request->next) {
      ++taken;
    }
    if (refused == nullptr) taken = 0;
  }
  used_ += taken;
  *credits_ -= taken;
  sent.sequence = sequence_;
  sequence_ = (sequence_ + 1) & WorkRequestId::kSequenceMask;
  if (taken == count) {
    sent.slots = taken + std::exchange(unsignalled_, 0);
    posted_.push_back(sent);
    return taken;
  }
  unsignalled_ += taken;
  // Some libraries return -1 and set errno. Others return the error itself.
  if (const int number = error < 0 ? errno : error; number != ENOMEM && number != EAGAIN) {
    return verbs_error(ErrorCode::kPeerDown, "write", "ibv_post_send", number);
  }
  return taken;
}

std::optional<Sent> SendQueue::completed(uint32_t sequence) {
  if (posted_.empty() || posted_.front().sequence != sequence) return std::nullopt;
  const Sent sent = posted_.front();
  posted_.pop_front();
  used_ -= sent.slots;
  *credits_ += sent.slots;
  return sent;
}

std::deque<Sent> SendQueue::give_up() {
  *credits_ += std::exchange(used_, 0);
  unsignalled_ = 0;
  return std::exchange(posted_, {});
}

}  // namespace kvc::verbs
