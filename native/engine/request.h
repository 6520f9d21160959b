// Request: one entry of the closed set of things that a transfer posts, yielding its pages a batch at a time.
//
// A request keeps its place, so that the worker can post a part of it, serve others, and come back; and it can give
// any batch that was posted once more, should a link break under it. Everything was checked against both regions
// before a Request exists; nothing here can fail.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <variant>
#include <vector>

#include "engine/domain.h"
#include "engine/memory_region.h"
#include "engine/transfer_engine.h"

namespace kvc {

class Request;

// One contiguous write: one page of any size, however many parts it is posted in. `domain`: the one of our domains
// in the peer's lane that carries it, while it works; none: split over the links, if it is large enough.
struct SingleWrite {
  uint64_t source_offset = 0;
  uint64_t target_offset = 0;
  std::optional<uint32_t> domain{};
};

// Page i goes from source_offset + source.indices[i] * source.stride to the same on the target's side. The table
// is shared by the layers of an armed plan, which differ in their offsets only.
struct PageTable {
  Pages source;
  Pages target;
};
struct TableWrite {
  std::shared_ptr<const PageTable> table;
  uint64_t source_offset = 0;
  uint64_t target_offset = 0;
};

// Raises the request's immediate by `count` and writes nothing. No regions.
struct ImmediateOnly {
  uint32_t count = 1;
};

// A message: MessageHeader's room, then the user's bytes. No regions.
struct MessageWrite {
  Bytes bytes;
};

// Batches of other requests once more, after a link broke: each as it was, but uncounted.
struct Rewrite {
  struct Batch {
    std::shared_ptr<Request> request;
    size_t position = 0;
    uint32_t pages = 0;
  };
  std::vector<Batch> batches;
};

class Request {
 public:
  using Body = std::variant<SingleWrite, TableWrite, ImmediateOnly, MessageWrite, Rewrite>;

  // `source` and `target`: null where the body says "no regions". `page_bytes` is the length of a SingleWrite.
  template <typename Kind>
  Request(std::shared_ptr<LocalRegion> source, std::shared_ptr<const RemoteRegion> target, uint64_t page_bytes,
          std::optional<uint32_t> immediate, Kind body)
      : source_(std::move(source)),
        target_(std::move(target)),
        page_bytes_(page_bytes),
        immediate_(immediate),
        end_(steps_of(body)),
        body_(std::in_place_type<Kind>, std::move(body)) {}

  std::optional<uint32_t> immediate() const { return immediate_; }
  // The local domain that has to carry it, if it can.
  std::optional<uint32_t> domain() const;
  // Bytes of a SingleWrite that may be split and was not; 0 for anything else.
  uint64_t splittable() const;
  // Before anything of it was posted: posts the single write in parts of `part_bytes`, the last one shorter, each a
  // batch of its own.
  void split(uint64_t part_bytes);
  bool in_parts() const { return part_bytes_ > 0; }

  // Counts apart from its batches: they are all uncounted, and once they have completed, `immediate` is raised by
  // `pages` (nothing where that is 0). Fabrics keep no order, so the counting write may not be posted earlier.
  void count_at_end(uint32_t pages);
  bool counted() const { return immediate_.has_value() && !at_end_; }
  // What is left to count once it is done and nothing of it is in flight.
  uint32_t pages_at_end() const { return at_end_.value_or(0); }

  // --- Its batches.

  bool done() const { return position_ == end_; }
  size_t position() const { return position_; }
  void advance(size_t steps) { position_ += steps; }
  void retreat(size_t steps) { position_ -= steps; }  // what advance() took was not posted

  // What one post takes: `steps` of the request's positions.
  struct Batch {
    size_t steps = 0;
    size_t pages = 0;  // written into `room`
    uint64_t page_bytes = 0;
    LocalRegion* source = nullptr;         // null: nothing is read
    const RemoteRegion* target = nullptr;  // null: nothing is written
    const Bytes* message = nullptr;        // a message, and no pages
    uint64_t bytes() const { return message == nullptr ? pages * page_bytes : message->size(); }
  };
  // The batch at `position`, of `max_bytes` (but one page at least) and room.size() pages. Takes nothing: the same
  // comes again until advance(), and later too, given the same room.
  Batch batch(size_t position, std::span<PageWrite> room, uint64_t max_bytes) const;

  // A message that has no number yet gets one when it is posted for the first time.
  bool needs_number() const { return !numbered_ && std::holds_alternative<MessageWrite>(body_); }
  void number(uint32_t sequence);

  // The scheduler's: batches of it that are in flight.
  uint32_t in_flight = 0;

 private:
  static size_t steps_of(const SingleWrite&) { return 1; }
  static size_t steps_of(const TableWrite& write) { return write.table->source.indices.size(); }
  static size_t steps_of(const ImmediateOnly& only) { return only.count; }
  static size_t steps_of(const MessageWrite&) { return 1; }
  static size_t steps_of(const Rewrite& rewrite) { return rewrite.batches.size(); }

  std::shared_ptr<LocalRegion> source_;
  std::shared_ptr<const RemoteRegion> target_;
  uint64_t page_bytes_;
  std::optional<uint32_t> immediate_;
  uint64_t part_bytes_ = 0;         // of a split write
  std::optional<uint32_t> at_end_;  // see count_at_end()
  bool numbered_ = false;
  size_t position_ = 0;
  size_t end_;
  Body body_;
};

}  // namespace kvc
