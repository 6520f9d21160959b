// TransferEngine: transfers and their writes.
#include <algorithm>
#include <limits>
#include <optional>
#include <string>
#include <utility>

#include "engine/engine_impl.h"

namespace kvc {

namespace {

// End of the pages of one side, without the offsets of layers: all pages lie within [offset, end). Negative indices
// become larger than all others when they are unsigned. nullopt: an index is negative, or the end exceeds 64 bits.
std::optional<uint64_t> end_of(const Pages& pages, uint64_t page_bytes) {
  uint64_t largest = 0;
  for (const int64_t index : pages.indices) largest = std::max(largest, static_cast<uint64_t>(index));
  uint64_t end = 0;
  if (largest > INT64_MAX || __builtin_mul_overflow(largest, pages.stride, &end) ||
      __builtin_add_overflow(end, pages.offset, &end) || __builtin_add_overflow(end, page_bytes, &end)) {
    return std::nullopt;
  }
  return end;
}

// Checks the pages of one side, moved by the offset of a layer, against their region. `end` is the result of end_of().
Status check_pages(const char* side, const Pages& pages, std::optional<uint64_t> end, uint64_t extra_offset,
                   uint64_t page_bytes, uint64_t region_bytes) {
  if (end && fits(extra_offset, *end, region_bytes)) return {};
  const auto negative =
      std::find_if(pages.indices.begin(), pages.indices.end(), [](int64_t index) { return index < 0; });
  const auto largest = std::max_element(pages.indices.begin(), pages.indices.end());
  return Error{ErrorCode::kOutOfRange,
               {},
               {},
               "write_pages",
               std::string(side) + " page index " +
                   std::to_string(negative != pages.indices.end() ? *negative : *largest) +
                   " lies outside the region of " + std::to_string(region_bytes) + " bytes (offset " +
                   std::to_string(pages.offset) + " + " + std::to_string(extra_offset) + ", stride " +
                   std::to_string(pages.stride) + ", page " + std::to_string(page_bytes) + " bytes)"};
}

// Checks that write_pages() and arm() share.
Status check_table(const PagedWrite& write, const char* operation) {
  if (write.page_bytes == 0) return invalid(operation, "page_bytes is 0: a page needs at least 1 byte");
  if (write.source_pages.indices.size() != write.target_pages.indices.size()) {
    return invalid(operation, std::to_string(write.source_pages.indices.size()) + " source pages for " +
                                  std::to_string(write.target_pages.indices.size()) +
                                  " target pages: give as many of both");
  }
  return {};
}

}  // namespace

// --- Lookups

Status TransferEngine::Impl::peek_regions(Ends& ends, RegionId source, RemoteRegionId target,
                                          const char* operation) const {
  ends.source = regions.peek(source);
  ends.target = remote_regions.peek(target);
  if (ends.source == nullptr) {
    return unknown_region(operation,
                          "no local region " + std::to_string(source) + ": it was deregistered or never registered");
  }
  if (ends.target == nullptr) {
    return unknown_region(
        operation, "no imported region " + std::to_string(target) + ": it was never imported, or its peer was fenced");
  }
  if (ends.target->peer != ends.transfer->peer->id) {
    return invalid(operation, "region " + std::to_string(target) + " belongs to another peer than the transfer");
  }
  return {};
}

Status TransferEngine::Impl::hold_ends(HeldEnds& held, TransferId transfer, RegionId source, RemoteRegionId target,
                                       const char* operation) {
  const std::shared_lock lock(writes_mutex);
  Ends ends;
  if (Status status = peek_ends(ends, transfer, source, target, operation); !status) return status;
  held = {ends.transfer->shared_from_this(), ends.source->shared_from_this(), ends.target->shared_from_this()};
  return {};
}

Status TransferEngine::Impl::check_single(const Ends& ends, const SingleWrite& write, uint64_t bytes,
                                          const char* operation) const {
  if (bytes == 0) return invalid(operation, "the write has 0 bytes: at least 1 byte is needed");
  const Peer& peer = *ends.transfer->peer;
  if (write.domain) {
    const Lane* const lane = lanes.find(peer.provider);
    const size_t domains = lane == nullptr ? 0 : lane->domains.size();
    if (*write.domain >= domains) {
      return invalid(operation, "domain " + std::to_string(*write.domain) + " of " + std::to_string(domains) +
                                    " in this peer's lane (" + peer.provider + "): domains are counted from 0");
    }
  }
  if (!fits(write.source_offset, bytes, ends.source->bytes) || !fits(write.target_offset, bytes, ends.target->bytes)) {
    return Error{ErrorCode::kOutOfRange,
                 {},
                 peer.name,
                 operation,
                 std::to_string(bytes) + " bytes from offset " + std::to_string(write.source_offset) +
                     " of the source region (" + std::to_string(ends.source->bytes) + " bytes) to offset " +
                     std::to_string(write.target_offset) + " of the target region (" +
                     std::to_string(ends.target->bytes) + " bytes) do not fit"};
  }
  return {};
}

Result<std::shared_ptr<Transfer>> TransferEngine::Impl::make_transfer(PeerId id, EventCallback callback,
                                                                      Transfer::Kind kind) {
  Result<std::shared_ptr<Peer>> peer = find_connected(id, "open_transfer");
  if (!peer) return peer.error();
  return std::make_shared<Transfer>(transfer_ids.next(), std::move(peer.value()), std::move(callback), kind);
}

Status TransferEngine::Impl::publish(const std::shared_ptr<Transfer>& transfer) {
  const std::unique_lock lock(writes_mutex);
  return publish_locked(transfer);
}

Status TransferEngine::Impl::publish_locked(const std::shared_ptr<Transfer>& transfer) {
  transfers.insert_locked(transfer->id, transfer);
  // Read after the insertion. When a peer goes down, the transfer thread first changes the state, and then fails every
  // transfer that it finds. Either it finds this transfer, or this thread sees the new state.
  const Peer& peer = *transfer->peer;
  const Peer::State state = peer.state.load(std::memory_order_seq_cst);
  if (state == Peer::State::kConnected) return {};
  transfers.erase_locked(transfer->id);
  return Error{ErrorCode::kPeerDown, peer.provider, peer.name, "open_transfer",
               state == Peer::State::kLeaving ? "the peer is disconnecting: no new transfer to it is possible"
                                              : "the link to this peer broke: fence the peer, then connect again"};
}

// --- Writing

Result<TransferId> TransferEngine::open_transfer(PeerId peer, EventCallback callback) {
  const Result<std::shared_ptr<Transfer>> transfer = impl_->make_transfer(peer, std::move(callback));
  if (!transfer) return transfer.error();
  if (Status status = impl_->publish(transfer.value()); !status) return status.error();
  return transfer.value()->id;
}

Status TransferEngine::write(TransferId transfer, RegionId source, uint64_t source_offset, RemoteRegionId target,
                             uint64_t target_offset, uint64_t bytes, std::optional<uint32_t> immediate,
                             std::optional<uint32_t> domain) {
  const SingleWrite write{source_offset, target_offset, domain};
  std::unique_ptr<Command> command = impl_->transfer_thread.take_command();
  {
    // Held until the command is in the queue: objects that it refers to then live until the transfer thread has run it.
    const std::shared_lock lock(impl_->writes_mutex);
    Impl::Ends ends;
    if (Status status = impl_->peek_ends(ends, transfer, source, target, "write"); !status) return status;
    if (Status status = impl_->check_single(ends, write, bytes, "write"); !status) return status;
    command->body.emplace<AddWrite>(AddWrite{ends.transfer, ends.source, ends.target, bytes, immediate, write});
    impl_->transfer_thread.push(std::move(command));
  }
  impl_->transfer_thread.wake();
  return {};
}

Status TransferEngine::write_pages(TransferId transfer, PagedWrite write) {
  Impl::HeldEnds ends;
  if (Status s = impl_->hold_ends(ends, transfer, write.source, write.target, "write_pages"); !s) return s;
  if (Status s = check_table(write, "write_pages"); !s) return s;
  if (write.source_pages.indices.empty()) return {};
  const auto check = [&](const char* side, const Pages& pages, uint64_t region) {
    return check_pages(side, pages, end_of(pages, write.page_bytes), 0, write.page_bytes, region);
  };
  if (Status s = check("source", write.source_pages, ends.source->bytes); !s) return s;
  if (Status s = check("target", write.target_pages, ends.target->bytes); !s) return s;
  auto table =
      std::make_shared<const PageTable>(PageTable{std::move(write.source_pages), std::move(write.target_pages)});
  impl_->transfer_thread.submit<AddRequest>(
      std::move(ends.transfer),
      Request::make(std::move(ends.source), std::move(ends.target), write.page_bytes, write.immediate,
                    TableWrite{std::move(table), 0, 0}),
      false);
  return {};
}

Status TransferEngine::arm(TransferId transfer, std::shared_ptr<LayerSignal> signal, PagedWrite pages,
                           std::vector<ArmedLayer> layers) {
  Impl::HeldEnds ends;
  if (Status s = impl_->hold_ends(ends, transfer, pages.source, pages.target, "arm"); !s) return s;
  if (signal == nullptr) return invalid("arm", "no signal given");
  if (Status s = check_table(pages, "arm"); !s) return s;
  if (pages.source_pages.indices.empty() || layers.empty()) return {};
  const std::optional<uint64_t> source_end = end_of(pages.source_pages, pages.page_bytes);
  const std::optional<uint64_t> target_end = end_of(pages.target_pages, pages.page_bytes);
  for (const ArmedLayer& layer : layers) {
    if (Status s = check_pages("source", pages.source_pages, source_end, layer.source_offset, pages.page_bytes,
                               ends.source->bytes);
        !s) {
      return s;
    }
    if (Status s = check_pages("target", pages.target_pages, target_end, layer.target_offset, pages.page_bytes,
                               ends.target->bytes);
        !s) {
      return s;
    }
  }
  const auto table =
      std::make_shared<const PageTable>(PageTable{std::move(pages.source_pages), std::move(pages.target_pages)});
  std::stable_sort(layers.begin(), layers.end(),
                   [](const ArmedLayer& a, const ArmedLayer& b) { return a.signal_value < b.signal_value; });
  auto plan = std::make_unique<ArmedPlan>(
      ArmedPlan{std::move(ends.transfer), ControlOwned<LayerSignal>(impl_->control, std::move(signal)), {}});
  plan->items.reserve(layers.size());
  for (const ArmedLayer& layer : layers) {
    plan->items.push_back(
        {layer.signal_value, Request::make(ends.source, ends.target, pages.page_bytes, layer.immediate,
                                           TableWrite{table, layer.source_offset, layer.target_offset})});
  }
  impl_->transfer_thread.submit<Arm>(std::move(plan));
  return {};
}

Status TransferEngine::arm_slices(TransferId transfer, std::shared_ptr<LayerSignal> signal,
                                  std::vector<ArmedSlice> slices) {
  constexpr const char* kOperation = "arm_slices";
  if (signal == nullptr) return invalid(kOperation, "no signal given");
  const Result<std::shared_ptr<Transfer>> found = impl_->find_transfer(transfer, kOperation);
  if (!found) return found.error();
  if (slices.empty()) return {};
  // Reserved before any slice is built. Slices that are not armed in the end are given back.
  const auto count = static_cast<uint32_t>(std::min<size_t>(slices.size(), kMaxArmedSlices + 1));
  std::atomic<uint32_t>& armed = found.value()->armed_slices;
  struct Reserved {
    std::atomic<uint32_t>& armed;
    uint32_t count;
    ~Reserved() { armed.fetch_sub(count, std::memory_order_relaxed); }
  } reserved{armed, count};
  if (armed.fetch_add(count, std::memory_order_relaxed) + count > kMaxArmedSlices) {
    return Error{ErrorCode::kResources,
                 {},
                 {},
                 kOperation,
                 "at most " + std::to_string(kMaxArmedSlices) +
                     " slices of a transfer may be armed or in flight: call wait_drained() first"};
  }
  std::stable_sort(slices.begin(), slices.end(),
                   [](const ArmedSlice& a, const ArmedSlice& b) { return a.signal_value < b.signal_value; });
  auto plan = std::make_unique<ArmedPlan>(
      ArmedPlan{found.value(), ControlOwned<LayerSignal>(impl_->control, std::move(signal)), {}});
  plan->items.reserve(slices.size());
  Impl::Ends ends{.transfer = plan->transfer.get()};
  for (const ArmedSlice& slice : slices) {
    const SingleWrite write{slice.source_offset, slice.target_offset};
    Impl::HeldEnds held;
    {
      // One lock per slice: under one lock, 65,536 slices keep the transfer thread from ending transfers for 15 ms.
      const std::shared_lock lock(impl_->writes_mutex);
      if (Status s = impl_->peek_regions(ends, slice.source, slice.target, kOperation); !s) return s;
      held = {nullptr, ends.source->shared_from_this(), ends.target->shared_from_this()};
    }
    if (Status s = impl_->check_single(ends, write, slice.bytes, kOperation); !s) return s;
    if (slice.signal_value == std::numeric_limits<uint64_t>::max())
      return invalid(kOperation, "signal_value is too large: the limit is 2^64 - 2");
    RequestRef request =
        Request::make(std::move(held.source), std::move(held.target), slice.bytes, slice.immediate, write);
    request->released_by = slice.signal_value + 1;
    plan->items.push_back({slice.signal_value, std::move(request)});
  }
  reserved.count = 0;
  impl_->transfer_thread.submit<Arm>(std::move(plan));
  return {};
}

Status TransferEngine::wait_drained(TransferId id, uint64_t signal_value, Timeout timeout) {
  const Result<std::shared_ptr<Transfer>> found = impl_->find_transfer(id, "wait_drained");
  if (!found) return found.error();
  const std::shared_ptr<Transfer>& transfer = found.value();
  return impl_->transfer_thread.call_until(
      "wait_drained",
      [transfer, signal_value]() -> std::optional<Status> {
        if (transfer->stream.error) return *transfer->stream.error;
        if (transfer->stream.drained(signal_value)) return Status();
        if (transfer->stream.ended) {
          return Error{ErrorCode::kCancelled, {}, {}, "wait_drained", "the transfer was cancelled"};
        }
        return std::nullopt;
      },
      timeout, "slices of transfer " + std::to_string(id) + " are armed or in flight");
}

Status TransferEngine::seal(TransferId transfer) {
  Result<std::shared_ptr<Transfer>> found = impl_->find_transfer(transfer, "seal");
  if (!found) return found.error();
  impl_->transfer_thread.submit<Seal>(std::move(found.value()));
  return {};
}

Status TransferEngine::cancel(TransferId transfer) {
  if (std::optional<Impl::Submission> submission = impl_->find_submission(transfer)) {
    return impl_->transfer_thread.call("cancel", [&]() -> Status {
      // The submission may have ended meanwhile, and its run may be in use for another one.
      if (submission->run->id() == transfer) impl_->group.scheduler().cancel(*submission->run);
      return {};
    });
  }
  Result<std::shared_ptr<Transfer>> found = impl_->find_transfer(transfer, "cancel");
  if (!found) return found.error();
  return impl_->transfer_thread.call("cancel", [&]() -> Status {
    if (found.value()->stream.ended) return invalid("cancel", "transfer " + std::to_string(transfer) + " has ended");
    impl_->group.scheduler().cancel(*found.value());
    return {};
  });
}

Status TransferEngine::quiesce(TransferId id, Timeout timeout) {
  const Result<std::shared_ptr<Transfer>> found = impl_->find_transfer(id, "quiesce");
  if (!found) return found.error();
  const std::shared_ptr<Transfer>& transfer = found.value();
  return impl_->transfer_thread.call_until(
      "quiesce",
      [transfer]() -> std::optional<Status> {
        if (!transfer->stream.idle()) return std::nullopt;
        return transfer->stream.error ? Status(*transfer->stream.error) : Status();
      },
      timeout, "writes of transfer " + std::to_string(id) + " are still in flight");
}

Result<TransferProgress> TransferEngine::progress(TransferId transfer) {
  const Result<std::shared_ptr<Transfer>> found = impl_->find_transfer(transfer, "progress");
  if (!found) return found.error();
  const Progress& progress = found.value()->progress;
  return TransferProgress{
      progress.pages_posted.load(std::memory_order_relaxed), progress.bytes_posted.load(std::memory_order_relaxed),
      progress.pages_done.load(std::memory_order_relaxed), progress.bytes_done.load(std::memory_order_relaxed)};
}

Result<TransferId> TransferEngine::write_one(PeerId peer, RegionId source, uint64_t source_offset,
                                             RemoteRegionId target, uint64_t target_offset, uint64_t bytes,
                                             std::optional<uint32_t> immediate, EventCallback callback,
                                             std::optional<uint32_t> domain) {
  const Result<std::shared_ptr<Transfer>> transfer = impl_->make_transfer(peer, std::move(callback));
  if (!transfer) return transfer.error();
  const TransferId id = transfer.value()->id;
  const SingleWrite write{source_offset, target_offset, domain};
  std::unique_ptr<Command> command = impl_->transfer_thread.take_command();
  {
    // As in write(), but exclusive, because the transfer is added to the registry.
    const std::unique_lock lock(impl_->writes_mutex);
    Impl::Ends ends{.transfer = transfer.value().get()};
    if (Status status = impl_->peek_regions(ends, source, target, "write_one"); !status) return status.error();
    if (Status status = impl_->check_single(ends, write, bytes, "write_one"); !status) return status.error();
    if (Status status = impl_->publish_locked(transfer.value()); !status) return status.error();
    command->body.emplace<WriteOne>(WriteOne{{ends.transfer, ends.source, ends.target, bytes, immediate, write}});
    impl_->transfer_thread.push(std::move(command));
  }
  impl_->transfer_thread.wake();
  return id;
}

}  // namespace kvc
