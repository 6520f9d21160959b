// Request: one entry of the closed set of things that a stream posts, yielding its pages a batch at a time.
//
// A request keeps its place, so that the worker can post a part of it, serve others, and come back; and it can give
// any batch that was posted once more, should a link break under it. Everything was checked against both regions
// before a Request exists; nothing here can fail.
//
// Made by any thread; from its submission on the worker's alone, which counts the references to it without atomics.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <variant>
#include <vector>

#include "base/intrusive_list.h"
#include "engine/memory_region.h"
#include "engine/transfer_engine.h"
#include "lane/domain.h"

namespace kvc {

class Request;

// Counts a request's references; the last one frees it.
class RequestRef {
 public:
  RequestRef() = default;
  // Takes over a reference: the first of one that was just made, or one that release() gave.
  explicit RequestRef(Request* counted) noexcept : request_(counted) {}
  // One more.
  static RequestRef share(Request& request) noexcept;
  RequestRef(const RequestRef& other) noexcept;
  RequestRef(RequestRef&& other) noexcept : request_(std::exchange(other.request_, nullptr)) {}
  RequestRef& operator=(RequestRef other) noexcept {
    std::swap(request_, other.request_);
    return *this;
  }
  ~RequestRef();

  Request* get() const noexcept { return request_; }
  Request* operator->() const noexcept { return request_; }
  Request& operator*() const noexcept { return *request_; }
  explicit operator bool() const noexcept { return request_ != nullptr; }
  // The reference itself, for a list that keeps it.
  Request* release() noexcept { return std::exchange(request_, nullptr); }

 private:
  static void free(Request* request) noexcept;  // out of line: what runs each time is a count

  Request* request_ = nullptr;
};

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
  bool ends_parts = false;  // of a write in parts
};

// A message: kUserHeaderBytes of room, then the user's bytes. No regions.
struct MessageWrite {
  Bytes bytes;
};

// Batches of other requests once more, after a link broke: each as it was, but uncounted.
struct Rewrite {
  struct Batch {
    RequestRef request;
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
  Request(const Request&) = delete;
  Request& operator=(const Request&) = delete;

  template <typename... Args>
  static RequestRef make(Args&&... args) {
    return RequestRef(new Request(std::forward<Args>(args)...));
  }

  // A SingleWrite that has ended, once more: other offsets and another length (0: its immediate alone).
  void again(uint64_t source_offset, uint64_t target_offset, uint64_t bytes) {
    page_bytes_ = bytes;
    part_bytes_ = 0;
    at_end_.reset();
    position_ = 0;
    end_ = 1;
    auto* const single = std::get_if<SingleWrite>(&body_);
    if (bytes == 0) {
      body_ = ImmediateOnly{};
    } else if (single != nullptr) {
      *single = SingleWrite{source_offset, target_offset};
    } else {
      body_ = SingleWrite{source_offset, target_offset};
    }
  }

  std::optional<uint32_t> immediate() const { return immediate_; }
  // The local domain that has to carry it, if it can.
  std::optional<uint32_t> domain() const;
  // Bytes of a SingleWrite that is not in parts; 0 for anything else.
  uint64_t splittable() const {
    return std::holds_alternative<SingleWrite>(body_) && part_bytes_ == 0 ? page_bytes_ : 0;
  }
  // What the source pages of a SingleWrite or a TableWrite count from; null for anything else.
  const std::byte* first_source() const;
  // Before anything of it was posted: posts the single write in parts of `part_bytes`, the last one shorter, each a
  // batch of its own.
  void split(uint64_t part_bytes);
  bool in_parts() const { return part_bytes_ > 0; }
  // It is the immediate at the end of one in parts.
  bool ends_parts() const {
    const auto* only = std::get_if<ImmediateOnly>(&body_);
    return only != nullptr && only->ends_parts;
  }

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

  // What one post takes: `steps` of the request's positions.
  struct Batch {
    size_t steps = 0;
    size_t pages = 0;  // written into `room`
    uint64_t page_bytes = 0;
    LocalMemory* source = nullptr;         // null: nothing is read
    const RemoteRegion* target = nullptr;  // null: nothing is written
    const Bytes* message = nullptr;        // a message, and no pages
    uint64_t bytes() const { return message == nullptr ? pages * page_bytes : message->size(); }
  };
  // The batch at `position`, of `max_bytes` (but one page at least) and room.size() pages. Takes nothing: the same
  // comes again until advance(), and later too, given the same room.
  Batch batch(size_t position, std::span<PageWrite> room, uint64_t max_bytes) const {
    const auto* single = std::get_if<SingleWrite>(&body_);
    return single != nullptr ? batch(*single, position, room) : batch_of_many(position, room, max_bytes);
  }

  // A message that has no number yet gets one when it is posted for the first time.
  bool needs_number() const { return !numbered_ && std::holds_alternative<MessageWrite>(body_); }
  void number(uint32_t sequence);

  // The worker's: batches of it that are in flight, its place among its stream's requests, and for a slice of an armed list
  // its value plus one.
  uint32_t in_flight = 0;
  uint64_t released_by = 0;
  ListHook<Request> hook{};

 private:
  friend class RequestRef;

  // In line, as the calls are a third of what it takes.
  Batch batch(const SingleWrite& write, size_t position, std::span<PageWrite> room) const {
    const uint64_t offset = position * part_bytes_;
    const uint64_t bytes = part_bytes_ == 0 ? page_bytes_ : std::min(part_bytes_, page_bytes_ - offset);
    room[0] = {source_->base + write.source_offset + offset, target_->offset + write.target_offset + offset};
    return Batch{1, 1, bytes, source_->memory.get(), target_.get()};
  }
  Batch batch_of_many(size_t position, std::span<PageWrite> room, uint64_t max_bytes) const;

  static size_t steps_of(const SingleWrite&) { return 1; }
  static size_t steps_of(const TableWrite& write) { return write.table->source.indices.size(); }
  static size_t steps_of(const ImmediateOnly& only) { return only.count; }
  static size_t steps_of(const MessageWrite&) { return 1; }
  static size_t steps_of(const Rewrite& rewrite) { return rewrite.batches.size(); }

  const std::shared_ptr<LocalRegion> source_;
  const std::shared_ptr<const RemoteRegion> target_;
  uint64_t page_bytes_;
  const std::optional<uint32_t> immediate_;
  uint64_t part_bytes_ = 0;         // of a split write
  std::optional<uint32_t> at_end_;  // see count_at_end()
  bool numbered_ = false;
  uint32_t references_ = 1;
  size_t position_ = 0;
  size_t end_;
  Body body_;
};

inline RequestRef RequestRef::share(Request& request) noexcept {
  ++request.references_;
  return RequestRef(&request);
}
inline RequestRef::RequestRef(const RequestRef& other) noexcept : request_(other.request_) {
  if (request_ != nullptr) ++request_->references_;
}
inline RequestRef::~RequestRef() {
  if (request_ != nullptr && --request_->references_ == 0) free(request_);
}

// Requests that wait to be posted, in order. Holds a reference to each.
class RequestQueue {
 public:
  RequestQueue() = default;
  RequestQueue(const RequestQueue&) = delete;
  RequestQueue& operator=(const RequestQueue&) = delete;
  ~RequestQueue() { clear(); }

  bool empty() const noexcept { return list_.empty(); }
  Request& front() const noexcept { return *list_.front(); }
  void push_back(RequestRef request) noexcept { list_.push_back(*request.release()); }
  void push_front(RequestRef request) noexcept { list_.push_front(*request.release()); }
  // The first one, with the list's reference.
  RequestRef pop_front() noexcept { return RequestRef(list_.pop_front()); }
  void clear() noexcept {
    while (!empty()) pop_front();
  }

 private:
  IntrusiveList<Request, &Request::hook> list_;
};

}  // namespace kvc
