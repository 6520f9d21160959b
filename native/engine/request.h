// Request: an entry of a stream (a closed set of kinds) that yields its pages one batch at a time.
//
// A request remembers its position, so that the transfer thread can post a part of it, serve others, and come back. It
// can also give any posted batch once more, if a link breaks under it. Everything is checked against both regions
// before a Request exists, so nothing here can fail.
//
// Any thread creates a request. After its submission it belongs to the transfer thread, which counts its references
// without atomics.
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

// A counted reference to a request. The last one frees the request.
class RequestRef {
 public:
  RequestRef() = default;
  // Takes over a reference: the first one of a new request, or one from release().
  explicit RequestRef(Request* counted) noexcept : request_(counted) {}
  // Adds a reference.
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
  // Gives up the reference without ending it, for a list that keeps it.
  Request* release() noexcept { return std::exchange(request_, nullptr); }

 private:
  static void free(Request* request) noexcept;  // out of line: the frequent part is the count

  Request* request_ = nullptr;
};

// One contiguous write. It is one page of any size, whatever the number of parts. `domain` pins it to a local domain of
// the peer's lane, as long as that domain works. No value: a large write is split over the links.
struct SingleWrite {
  uint64_t source_offset = 0;
  uint64_t target_offset = 0;
  std::optional<uint32_t> domain{};
};

// Page i goes from source_offset + source.indices[i] * source.stride to the corresponding place of the target. The
// layers of an armed plan share the table and differ in their offsets only.
struct PageTable {
  Pages source;
  Pages target;
};
struct TableWrite {
  std::shared_ptr<const PageTable> table;
  uint64_t source_offset = 0;
  uint64_t target_offset = 0;
};

// Raises the request's immediate by `count` and writes nothing. It has no regions.
struct ImmediateOnly {
  uint32_t count = 1;
  bool ends_parts = false;  // counts a write that was posted in parts
};

// A message: kUserHeaderBytes of room, then the user's bytes. It has no regions.
struct MessageWrite {
  Bytes bytes;
};

// Repeats batches of other requests after a link broke. Each is as before, but uncounted.
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

  // `source` and `target` are null for bodies without regions. `page_bytes` is the length of a SingleWrite.
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

  // Reuses a SingleWrite that has ended, with new offsets and a new length. Length 0: its immediate alone.
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
  // The local domain that must carry the request, if that domain works.
  std::optional<uint32_t> domain() const;
  // Bytes of a SingleWrite that is not in parts; 0 for any other request.
  uint64_t splittable() const {
    return std::holds_alternative<SingleWrite>(body_) && part_bytes_ == 0 ? page_bytes_ : 0;
  }
  // The address that the source pages of a SingleWrite or TableWrite count from; null for any other request.
  const std::byte* first_source() const;
  // Splits a single write into parts of `part_bytes` (the last one may be shorter), each a batch. Call it before any
  // part was posted.
  void split(uint64_t part_bytes);
  bool in_parts() const { return part_bytes_ > 0; }
  // True if this is the immediate that counts a write in parts.
  bool ends_parts() const {
    const auto* only = std::get_if<ImmediateOnly>(&body_);
    return only != nullptr && only->ends_parts;
  }

  // Makes all batches uncounted. When they have completed, the request's immediate is raised by `pages` (not at all if
  // 0). Fabrics keep no order, so the counting write must not be posted earlier.
  void count_at_end(uint32_t pages);
  bool counted() const { return immediate_.has_value() && !at_end_; }
  // Pages to count once the request is done and none of its batches is in flight.
  uint32_t pages_at_end() const { return at_end_.value_or(0); }

  // --- The batches of the request.

  bool done() const { return position_ == end_; }
  size_t position() const { return position_; }
  void advance(size_t steps) { position_ += steps; }

  // What one post takes. `steps` is the number of the request's positions in it.
  struct Batch {
    size_t steps = 0;
    size_t pages = 0;  // number of pages written into `room`
    uint64_t page_bytes = 0;
    LocalMemory* source = nullptr;         // null: nothing is read
    const RemoteRegion* target = nullptr;  // null: nothing is written
    const Bytes* message = nullptr;        // not null: a message without pages
    uint64_t bytes() const { return message == nullptr ? pages * page_bytes : message->size(); }
  };
  // Returns the batch at `position`, of at most `max_bytes` (but one page at least) and room.size() pages. It does not
  // move the position: the same arguments give the same batch again, also after advance().
  Batch batch(size_t position, std::span<PageWrite> room, uint64_t max_bytes) const {
    const auto* single = std::get_if<SingleWrite>(&body_);
    return single != nullptr ? batch(*single, position, room) : batch_of_many(position, room, max_bytes);
  }

  // True for a message without a sequence number. It gets one when it is posted for the first time.
  bool needs_number() const { return !numbered_ && std::holds_alternative<MessageWrite>(body_); }
  void number(uint32_t sequence);

  // Used on the transfer thread: batches in flight, the signal value plus one of a slice of an armed list, and the
  // links of the stream's queue.
  uint32_t in_flight = 0;
  uint64_t released_by = 0;
  ListHook<Request> hook{};

 private:
  friend class RequestRef;

  // Inline, because calls take a third of the time.
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
  uint64_t part_bytes_ = 0;         // length of the parts of a split write
  std::optional<uint32_t> at_end_;  // set by count_at_end()
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

// Requests that wait to be posted, in order. The queue holds a reference to each.
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
  // Removes the first request and returns it with the queue's reference.
  RequestRef pop_front() noexcept { return RequestRef(list_.pop_front()); }
  void clear() noexcept {
    while (!empty()) pop_front();
  }

 private:
  IntrusiveList<Request, &Request::hook> list_;
};

}  // namespace kvc
