#include "providers/nvlink/pieces.h"

#include <algorithm>
#include <array>
#include <iterator>
#include <span>
#include <string>
#include <utility>

namespace kvc::nvlink {

using same_host::Message;
using same_host::MessageKind;
using same_host::Sent;

// --- PieceSender

void PieceSender::forget(uint32_t memory) {
  const auto found =
      std::find_if(untold_.begin(), untold_.end(), [&](const Untold& entry) { return entry.memory == memory; });
  const bool heard_of = found == untold_.end() || found->next > 0;
  if (found != untold_.end()) {
    if (found == untold_.begin()) exported_.reset();
    untold_.erase(found);
  }
  if (heard_of) forgotten_.push_back(memory);
}

bool PieceSender::advance(const cuda::Driver& driver, const same_host::Connection& connection, uint64_t taken) {
  if (!has_work(taken)) return false;
  Message message;
  if (!forgotten_.empty()) {
    message = {.kind = MessageKind::kForget, .memory = forgotten_.front()};
  } else {
    const Untold& first = untold_.front();
    const cuda::Piece& piece = (*first.pieces)[first.next];
    if (!exported_) {
      if (Result<UniqueFd> exported = cuda::export_piece(driver, piece.address))
        exported_ = std::move(exported.value());
    }
    message = {.kind = MessageKind::kMemory, .memory = first.memory, .bytes = exported_ ? piece.bytes : 0};
  }
  const std::array descriptors{exported_.get()};
  const bool carries = message.kind == MessageKind::kMemory && exported_;
  switch (connection.send(message, std::span(descriptors).first(carries ? 1 : 0))) {
    case Sent::kLater:
      return false;
    case Sent::kBroken:
      close();  // the peer has hung up, which the link will read
      return false;
    case Sent::kYes:
      break;
  }
  if (message.kind == MessageKind::kForget) {
    forgotten_.pop_front();
    return true;
  }
  ++sent_;
  Untold& first = untold_.front();
  if (!std::exchange(exported_, {}) || ++first.next == first.pieces->size()) untold_.pop_front();
  return true;
}

void PieceSender::close() noexcept {
  untold_.clear();
  forgotten_.clear();
  exported_.reset();
}

// --- PiecedAllocation

bool PiecedAllocation::unmap_part() noexcept {
  if (mapping_.empty()) return false;
  mapping_.remove_last();
  return true;
}

// --- PieceReceiver

bool PieceReceiver::hear(const Message& message, UniqueFd descriptor) {
  if (message.memory == 0 || inbox_.size() >= kUntakenPieces) return false;
  if ((message.bytes == 0) == static_cast<bool>(descriptor)) return false;
  inbox_.push_back({message.memory, message.bytes, std::move(descriptor)});
  return true;
}

bool PieceReceiver::map_next(const std::shared_ptr<cuda::Context>& context, const Board& board) {
  Arrival arrival = std::move(inbox_.front());
  inbox_.pop_front();
  ++taken_;
  auto found = memories_.find(arrival.memory);
  if (found == memories_.end()) {
    // Its region is on the board: it is written there first. If not, it was there, and a kForget is on the way.
    uint64_t rkey = 0;
    const auto entry = std::find_if(std::begin(board.regions), std::end(board.regions), [&](const RegionEntry& region) {
      rkey = region.rkey.load(std::memory_order_acquire);
      return rkey != 0 && region.memory.load(std::memory_order_relaxed) == arrival.memory;
    });
    if (entry == std::end(board.regions)) return true;
    if (memories_.size() >= kMaxRegions) return false;
    Memory memory = begin(context, *entry, rkey);
    // The place may have gone to another region since, and what was read of it is of no use then.
    if (entry->rkey.load(std::memory_order_relaxed) != rkey) return true;
    found = memories_.emplace(arrival.memory, std::move(memory)).first;
    if (found->second.failed && !mapped_any_) cannot_map_ = found->second.failed;
  }
  Memory& memory = found->second;
  if (memory.failed) return true;
  if (!arrival.descriptor) {
    fail(memory,
         kLane.error(ErrorCode::kRefused, "accept",
                     "the peer could not export its GPU memory: it may be out of file descriptors (ulimit -n)"));
    return true;
  }
  if (!memory.allocation->mapping().has_room(arrival.bytes)) return false;
  if (Status mapped = memory.allocation->mapping().append(arrival.descriptor.get(), arrival.bytes); !mapped) {
    fail(memory, cannot_be_mapped(mapped.error()));
    return true;
  }
  mapped_any_ = true;
  return true;
}

PieceReceiver::Memory PieceReceiver::begin(const std::shared_ptr<cuda::Context>& context, const RegionEntry& entry,
                                           uint64_t rkey) {
  Memory memory{.rkey = rkey, .allocation = {}};
  Result<cuda::PieceMapping> mapping =
      cuda::PieceMapping::reserve(context, entry.pieces_bytes.load(std::memory_order_acquire));
  if (mapping) {
    memory.allocation = std::make_shared<PiecedAllocation>(std::move(mapping.value()));
  } else {
    memory.failed = kLane.named(mapping.error());
  }
  return memory;
}

void PieceReceiver::fail(Memory& memory, Error error) {
  if (!mapped_any_) cannot_map_ = error;
  memory.failed = std::move(error);
}

const PieceReceiver::Memory* PieceReceiver::find(uint32_t memory) const noexcept {
  const auto found = memories_.find(memory);
  return found == memories_.end() ? nullptr : &found->second;
}

std::optional<PieceReceiver::Memory> PieceReceiver::forget(uint32_t memory) {
  taken_ += std::erase_if(inbox_, [&](const Arrival& arrival) { return arrival.memory == memory; });
  auto found = memories_.extract(memory);
  return found ? std::optional(std::move(found.mapped())) : std::nullopt;
}

std::vector<PieceReceiver::Memory> PieceReceiver::close() {
  std::vector<Memory> memories;
  memories.reserve(memories_.size());
  for (auto& [name, memory] : memories_) memories.push_back(std::move(memory));
  memories_.clear();
  inbox_.clear();
  return memories;
}

}  // namespace kvc::nvlink
