#include "providers/nvlink/piece_sender.h"

#include <algorithm>
#include <array>
#include <span>
#include <utility>

#include "cuda/virtual_memory.h"

namespace kvc::nvlink {

using same_host::Message;
using same_host::MessageKind;

namespace {

// Control messages that a turn sends. A message with a descriptor takes 2 us.
constexpr uint32_t kSendsPerTurn = 16;

}  // namespace

uint64_t PieceSender::forget(uint64_t key) {
  const auto found =
      std::find_if(untold_.begin(), untold_.end(), [key](const Untold& entry) { return entry.key == key; });
  if (found != untold_.end()) {
    if (found == untold_.begin()) exported_.reset();
    untold_.erase(found);
  }
  forgotten_.push_back(key);
  return ++forgets_;
}

bool PieceSender::has_work(uint64_t taken) const noexcept {
  if (!forgotten_.empty()) return true;
  if (exported_ != nullptr) return exported_->done.load(std::memory_order_acquire);
  return !untold_.empty() && sent_ - taken < kUntakenPieces;
}

PieceSender::Sent PieceSender::advance(const cuda::Driver& driver, const same_host::Connection& connection,
                                       uint64_t taken, ControlQueue& control) {
  Sent sent = Sent::kNothing;
  for (uint32_t i = 0; i < kSendsPerTurn && has_work(taken); ++i) {
    Message message;
    std::array<int, 1> descriptors{-1};
    if (!forgotten_.empty()) {
      message = {.kind = MessageKind::kForget, .memory = place_of(forgotten_.front())};
    } else if (exported_ == nullptr) {
      export_next(driver, kUntakenPieces - (sent_ - taken), control);
      continue;
    } else {
      const Untold& first = untold_.front();
      descriptors[0] = exported_->descriptors.front().get();
      message = {.kind = MessageKind::kMemory,
                 .memory = place_of(first.key),
                 .bytes = descriptors[0] >= 0 ? (*first.pieces)[first.next].bytes : 0,
                 .key = first.key};
    }
    // Not kYes: the socket is full, or the peer has hung up, which the link reads.
    if (connection.send(message, std::span(descriptors).first(descriptors[0] >= 0 ? 1 : 0)) != same_host::Sent::kYes) {
      return Sent::kFull;
    }
    sent = Sent::kSome;
    if (message.kind == MessageKind::kForget) {
      forgotten_.pop_front();
      continue;
    }
    ++sent_;
    exported_->descriptors.pop_front();
    if (descriptors[0] < 0 || ++untold_.front().next == untold_.front().pieces->size()) {
      untold_.pop_front();
      exported_.reset();
    } else if (exported_->descriptors.empty()) {
      exported_.reset();
    }
  }
  return sent;
}

void PieceSender::export_next(const cuda::Driver& driver, uint64_t pieces, ControlQueue& control) {
  const Untold& first = untold_.front();
  const size_t end = std::min(first.pieces->size(), first.next + pieces);
  exported_ = std::make_shared<Exported>();
  control.run([&driver, pieces = first.pieces, next = first.next, end, exported = exported_] {
    for (size_t i = next; i < end; ++i) {
      Result<UniqueFd> piece = cuda::export_piece(driver, (*pieces)[i].address);
      exported->descriptors.push_back(piece ? std::move(piece.value()) : UniqueFd());
      if (!piece) break;
    }
    exported->done.store(true, std::memory_order_release);
  });
}

}  // namespace kvc::nvlink
