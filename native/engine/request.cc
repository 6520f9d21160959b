#include "engine/request.h"

#include <algorithm>
#include <utility>

#include "base/overloaded.h"
#include "engine/message.h"

namespace kvc {

void RequestRef::free(Request* request) noexcept { delete request; }

std::optional<uint32_t> Request::domain() const {
  const auto* single = std::get_if<SingleWrite>(&body_);
  return single == nullptr ? std::nullopt : single->domain;
}

const std::byte* Request::first_source() const {
  if (const auto* single = std::get_if<SingleWrite>(&body_)) return source_->base + single->source_offset;
  const auto* table = std::get_if<TableWrite>(&body_);
  return table == nullptr ? nullptr : source_->base + table->table->source.offset + table->source_offset;
}

void Request::split(uint64_t part_bytes) {
  part_bytes_ = part_bytes;
  end_ = (page_bytes_ + part_bytes - 1) / part_bytes;
  count_at_end(immediate_ ? 1 : 0);
}

void Request::count_at_end(uint32_t pages) { at_end_ = pages; }

Request::Batch Request::batch_of_many(size_t position, std::span<PageWrite> room, uint64_t max_bytes) const {
  const auto fitting = [&](uint64_t page_bytes) {
    const uint64_t pages = page_bytes == 0 ? room.size() : std::max<uint64_t>(max_bytes / page_bytes, 1);
    return static_cast<size_t>(std::min<uint64_t>({pages, room.size(), end_ - position}));
  };
  return std::visit(
      Overloaded{
          [&](const SingleWrite& write) { return batch(write, position, room); },
          [&](const TableWrite& write) {
            const Pages& source = write.table->source;
            const Pages& target = write.table->target;
            const std::byte* source_base = source_->base + source.offset + write.source_offset;
            const uint64_t target_base = target_->offset + target.offset + write.target_offset;
            const size_t pages = fitting(page_bytes_);
            for (size_t i = 0; i < pages; ++i) {
              room[i].source = source_base + static_cast<uint64_t>(source.indices[position + i]) * source.stride;
              room[i].target_offset = target_base + static_cast<uint64_t>(target.indices[position + i]) * target.stride;
            }
            return Batch{pages, pages, page_bytes_, source_->memory.get(), target_.get()};
          },
          [&](const ImmediateOnly&) {
            const size_t pages = fitting(0);
            std::fill_n(room.begin(), pages, PageWrite{});
            return Batch{pages, pages, 0};
          },
          [&](const MessageWrite& message) { return Batch{.steps = 1, .message = &message.bytes}; },
          [&](const Rewrite& rewrite) {
            // Its original size, whatever the limits are now, because the same pages have to be repeated.
            const Rewrite::Batch& part = rewrite.batches[position];
            Batch batch = part.request->batch(part.position, room.first(part.pages), UINT64_MAX);
            batch.steps = 1;
            return batch;
          },
      },
      body_);
}

void Request::number(uint32_t sequence) {
  auto& bytes = std::get<MessageWrite>(body_).bytes;
  bytes[0] = static_cast<std::byte>(MessageTag::kUser);
  for (size_t i = 0; i < sizeof(sequence); ++i) bytes[1 + i] = static_cast<std::byte>((sequence >> (8 * i)) & 0xFF);
  numbered_ = true;
}

}  // namespace kvc
