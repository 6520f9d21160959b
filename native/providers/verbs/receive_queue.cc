#include "providers/verbs/receive_queue.h"

#include <algorithm>
#include <cerrno>

#include "providers/verbs/memory.h"

namespace kvc::verbs {

ReceiveQueue::ReceiveQueue(const Device& device, uint32_t slot_bytes, uint32_t batch)
    : device_(device), slot_bytes_(slot_bytes), batch_(batch) {}

Result<std::unique_ptr<ReceiveQueue>> ReceiveQueue::create(const Device& device, WorkRequestId::Kind kind,
                                                           uint32_t slots, uint32_t slot_bytes, uint32_t batch) {
  const Library& library = device.library();
  slots = std::min(slots, static_cast<uint32_t>(device.limits().max_srq_wr));
  std::unique_ptr<ReceiveQueue> queue(new ReceiveQueue(device, slot_bytes, std::min(batch, (slots + 3) / 4)));
  abi::ibv_srq_init_attr attr{};
  attr.attr.max_wr = slots;
  attr.attr.max_sge = 1;
  queue->srq_ = owned(library.create_srq(device.shared_pd(), &attr), library.destroy_srq);
  if (!queue->srq_) return verbs_error(ErrorCode::kResources, "open", "ibv_create_srq", errno);
  if (slot_bytes > 0) {
    const size_t bytes = size_t{slots} * slot_bytes;
    queue->memory_ = std::make_unique<std::byte[]>(bytes);
    Result<Owned<abi::ibv_mr>> mr = register_host_memory(device, queue->memory_.get(), bytes);
    if (!mr) return mr.error();
    queue->mr_ = std::move(mr.value());
  }
  queue->pieces_.resize(slots);
  queue->requests_.resize(slots);
  queue->returned_.reserve(slots);
  for (uint32_t slot = 0; slot < slots; ++slot) {
    abi::ibv_recv_wr& request = queue->requests_[slot];
    request.wr_id = WorkRequestId{kind, 0, slot}.encode();
    if (slot_bytes > 0) {
      queue->pieces_[slot] = {reinterpret_cast<uint64_t>(queue->memory_.get() + size_t{slot} * slot_bytes), slot_bytes,
                              queue->mr_->lkey};
      request.sg_list = &queue->pieces_[slot];
      request.num_sge = 1;
    }
    queue->give_back(slot);
  }
  queue->post();
  if (!queue->returned_.empty()) return verbs_error(ErrorCode::kResources, "open", "ibv_post_srq_recv refused");
  return queue;
}

std::span<const std::byte> ReceiveQueue::bytes(uint32_t slot, uint32_t bytes) const noexcept {
  return {memory_.get() + size_t{slot} * slot_bytes_, std::min(bytes, slot_bytes_)};
}

void ReceiveQueue::post() {
  for (size_t i = 0; i < returned_.size(); ++i) {
    requests_[returned_[i]].next = i + 1 < returned_.size() ? &requests_[returned_[i + 1]] : nullptr;
  }
  abi::ibv_recv_wr* const first = &requests_[returned_.front()];
  abi::ibv_recv_wr* refused = nullptr;
  if (device_.context()->ops.post_srq_recv(srq_.get(), first, &refused) == 0) {
    returned_.clear();
    return;
  }
  // The device is out of memory or room. The slots from `refused` on are posted again with the next batch.
  const auto from =
      std::find_if(returned_.begin(), returned_.end(), [&](uint32_t slot) { return &requests_[slot] == refused; });
  if (from != returned_.end()) returned_.erase(returned_.begin(), from);
}

}  // namespace kvc::verbs
