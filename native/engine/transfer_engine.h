// TransferEngine: counted one-sided writes between the registered memory of two processes, and small messages.
//
// A transfer engine owns one DomainGroup, which holds the domains of one device. A transfer thread posts and polls. Two
// more threads run calls that may block: one registers memory, the other makes and ends links. If several transfer
// threads exist (EngineConfig::workers), "the transfer thread" is the first one, which schedules and runs callbacks.
//
// Any thread may call every public method. Unless its comment says that it blocks, a method only hands a command to the
// transfer thread and returns in well under a microsecond. Errors are returned as values; nothing here throws or
// aborts.
//
// Two objects carry all completion:
//   Transfer    a growing set of writes to one peer, with exactly one final event. A message (send), a scatter and a
//               barrier are transfers too, and end by themselves.
//   CounterSet  the receiving side: counters that the immediates of peers raise. Each time targets are set, one
//               "reached" event follows.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/timeout.h"
#include "lane/completion_word.h"
#include "lane/domain.h"
#include "lane/layer_signal.h"

namespace kvc {

namespace cuda {
class StreamSignal;
}
class CounterSets;

using PeerId = uint32_t;          // never reused
using RegionId = uint32_t;        // local memory region
using RemoteRegionId = uint32_t;  // a peer's memory region that was imported here
using TransferId = uint64_t;      // never reused
using CounterSetId = uint64_t;    // never reused
using PeerGroupId = uint32_t;     // never reused
using ScatterId = uint64_t;       // never reused

// Settings of a transfer engine.
struct EngineConfig {
  std::string name;                   // the name of this transfer engine in logs and at peers
  std::vector<DomainConfig> domains;  // in order of preference; all domains of one provider form one lane
  // If a preferred provider reaches the peer's machine but does not work (the kernel forbids it), use the next provider
  // instead of refusing the peer. A provider that cannot lead to the peer is always skipped.
  bool allow_fallback = false;
  // Time that an idle transfer thread polls before it sleeps on a descriptor, in microseconds. The measurement
  // behind the default is in docs/benchmarks/2026-11-20-transfers.md. It is long enough for the next write of a burst,
  // and short enough that an idle transfer engine uses less than 1 % of a core.
  uint32_t spin_us = 20;
  // Number of transfer threads. One thread does everything. If there are several, the first one schedules, and the
  // others drive the domains. This helps if several NICs carry more small pages than one thread can post
  // (docs/performance.md).
  uint32_t workers = 1;
  // Core of the first transfer thread. The others take the following cores. -1: not pinned.
  int worker_cpu = -1;
  DomainFactory open = open_domain;  // opens each domain; tests and measurements wrap the domain in their own
};

// Pages of one region. Page i begins at offset + indices[i] * stride.
struct Pages {
  std::vector<int64_t> indices;
  uint64_t stride = 0;
  uint64_t offset = 0;
};

// Writes page_bytes bytes from each source page to the target page at the same position. `immediate` is a counter of
// the peer (from its CounterSet), raised by exactly the number of pages. No value: an uncounted write.
struct PagedWrite {
  uint64_t page_bytes = 0;
  RegionId source = 0;
  Pages source_pages;
  RemoteRegionId target = 0;
  Pages target_pages;
  std::optional<uint32_t> immediate;
};

// A layer of a paged KV cache. Layer k uses the same pages with its own offset on each side and its own counter. It is
// posted when the signal reaches its value.
struct ArmedLayer {
  uint64_t signal_value = 0;
  uint64_t source_offset = 0;  // added to source_pages.offset
  uint64_t target_offset = 0;  // added to target_pages.offset
  uint32_t immediate = 0;
};

// A slice of a list that a sender releases step by step. It is written when the signal reaches `signal_value`, and
// counts as one page.
struct ArmedSlice {
  uint64_t signal_value = 0;
  RegionId source = 0;
  uint64_t source_offset = 0;
  RemoteRegionId target = 0;
  uint64_t target_offset = 0;
  uint64_t bytes = 0;
  std::optional<uint32_t> immediate;
};

enum class EventKind : uint8_t {
  kTransferDone,       // every write is in the peer's memory; source pages may be reused
  kTransferFailed,     // at least one write failed; no write of this transfer is in flight here
  kTransferCancelled,  // cancelled and drained: no write of this transfer is in flight
  kCountersReached,    // every counter of the set reached its target, and the pages are visible; once per expect()
  kPeerDown,           // the links to the peer broke; its transfers end with their own events
  kPeerLeft,           // the peer called disconnect(): both sides are drained, and its id is forgotten
};

// The error of one member of a peer group.
struct PeerFailure {
  PeerId peer = 0;
  Error error;
};

struct Event {
  EventKind kind{};
  uint64_t id = 0;  // a TransferId, CounterSetId or PeerId
  // kTransferFailed, kTransferCancelled: true if no write of this transfer can land at the peer any more. False: only
  // the peer's own fence() can ensure that, because bytes may be in its receive buffers.
  bool quiesced = true;
  uint64_t pages = 0;  // transfers: pages and bytes that are known to have arrived
  uint64_t bytes = 0;
  std::optional<Error> error{};
  // Scatter and barrier: the error of each member that failed. `error` is the first of them.
  std::vector<PeerFailure> failures{};
};

// Called on the transfer thread. It must not block or call a blocking method of the transfer engine; it may submit.
// Exceptions are caught and counted (EngineStats::callback_errors), so that no callback can stop the transfer engine.
using EventCallback = std::function<void(const Event&)>;

// A received message.
struct Message {
  PeerId peer = 0;
  Bytes bytes;
};
// Called on the transfer thread, like an EventCallback. The message is valid only during the call.
using MessageCallback = std::function<void(const Message&)>;

// The part of one member of a peer group in a scatter: `bytes` of the source region, counted as one page.
struct ScatterSlice {
  uint64_t source_offset = 0;
  RemoteRegionId target = 0;
  uint64_t target_offset = 0;
  // 0: only the immediate, if there is one, so that a member's count does not depend on sizes.
  uint64_t bytes = 0;
  std::optional<uint32_t> immediate;
};

// The most that one slice of a prepared scatter may write to a member. A submission writes up to `bytes`, within the
// `bytes` that begin at the two offsets.
struct PreparedSlice {
  uint32_t member = 0;  // index of the member in the group
  RegionId source = 0;
  uint64_t source_offset = 0;
  RemoteRegionId target = 0;
  uint64_t target_offset = 0;
  uint64_t bytes = 0;  // 0: only the immediate
  std::optional<uint32_t> immediate;
};
// The values of one slice in a submission. Offsets count from the prepared offsets. 0 bytes: only the immediate, if
// there is one.
struct ScatterUpdate {
  uint64_t source_offset = 0;
  uint64_t target_offset = 0;
  uint64_t bytes = 0;
};

// Progress of a transfer.
struct TransferProgress {
  uint64_t pages_posted = 0;
  uint64_t bytes_posted = 0;
  uint64_t pages_done = 0;  // completed: in the peer's memory
  uint64_t bytes_done = 0;
};

// Counters that were allocated together.
struct CounterSet {
  CounterSetId id = 0;
  std::vector<uint32_t> immediates;  // for the sender, one per counter, of multiplicity 1
};

// Reads the counters of one set without a lock, for pollers. It may outlive the transfer engine.
class CounterReader {
 public:
  // The count. Everything that landed before it is visible. Counters of a released set read 0. Any thread.
  uint64_t value(size_t counter) const noexcept;
  bool reached(size_t counter, uint64_t target) const noexcept { return value(counter) >= target; }
  size_t size() const noexcept { return immediates_.size(); }

 private:
  friend class TransferEngine;
  CounterReader(std::shared_ptr<const CounterSets> counters, std::vector<uint32_t> immediates)
      : counters_(std::move(counters)), immediates_(std::move(immediates)) {}
  std::shared_ptr<const CounterSets> counters_;
  std::vector<uint32_t> immediates_;
};

// Counters and gauges of a transfer engine.
struct EngineStats {
  uint64_t pages_written = 0;  // completed
  uint64_t bytes_written = 0;
  uint64_t batches_posted = 0;
  uint64_t immediates_received = 0;  // pages counted, including stale ones
  uint64_t immediates_stale = 0;     // of an older generation, or of no live counter
  uint64_t immediates_foreign = 0;   // of a counter that belongs to another peer; the link was ended
  uint64_t links = 0;                // up now, of all peers
  uint64_t links_lost = 0;           // taken out of use while the peer has others
  uint64_t links_restored = 0;
  uint64_t pages_rewritten = 0;  // written again over another link after their link broke
  uint64_t sleeps = 0;           // number of times that the transfer thread went to sleep
  uint64_t callback_errors = 0;  // exceptions thrown by callbacks
  uint64_t transfers_open = 0;
  uint64_t counters_allocated = 0;
  uint64_t peers = 0;
  uint64_t regions = 0;
};

// A lost link of a connected peer: it broke while it was up and the peer had other links.
struct LostLink {
  PeerId peer = 0;
  uint32_t link = 0;        // index among the peer's links, the same on both sides
  uint32_t links = 0;       // number of the peer's links, up or not
  std::string domain;       // description of this side's domain
  uint64_t times_lost = 0;  // since the peer connected
  bool up = false;          // restored since
  Error reason;             // of the last loss
};

// A step of the transfer thread. `request` identifies a request of an arm() call as long as it lives, starting with
// kReleased.
struct TraceStep {
  enum class Kind : uint8_t {
    kReleased,  // the signal reached the request's value
    kPosted,    // a batch of the request was given to a lane
    kLanded,    // a batch of the request is in the peer's memory
    kCounted,   // a counter of this transfer engine was raised
  };
  Kind kind = Kind::kReleased;
  int64_t nanoseconds = 0;    // CLOCK_MONOTONIC
  uint64_t request = 0;       // kCounted: the immediate, of multiplicity 1
  TransferId transfer = 0;    // kReleased
  uint64_t signal_value = 0;  // kReleased: the value that the request waited for
  uint64_t source = 0;        // kReleased: the address from which its source pages count
  uint64_t pages = 0;         // kPosted, kLanded, kCounted
};
// Steps of a trace, and the number of lost steps.
struct TakenTrace {
  std::vector<TraceStep> steps;
  uint64_t lost = 0;  // steps for which there was no room
};

// A peer after offer() or accept(): its id here, and the bytes to send to it over the control plane.
struct Handshake {
  PeerId peer = 0;
  Bytes bytes;
  // accept(): one line with the reason for each offered lane that was skipped before the chosen lane.
  std::vector<std::string> passed_over;
};

class TransferEngine {
 public:
  // Opens the domains and starts the transfer threads. Blocks until they are open. If a configured provider is unusable
  // on this machine, the call fails with the provider's reason. With allow_fallback, it fails only if no provider is
  // usable.
  static Result<std::unique_ptr<TransferEngine>> create(EngineConfig config);

  // Calls close() and ignores its error.
  ~TransferEngine();

  // Stops the threads. Open transfers end with kClosed, links are fenced, and registered memory is released. Blocks, up
  // to 5 s for a peer that cannot be fenced (its process is stopped in the middle of a copy). No other call of this
  // object may run meanwhile, and afterwards only close() may be called, which does nothing.
  //
  // kTimeout: the GPU of this process hangs. It had 5 s for its copies, and 5 s more. Its copies may still read
  // registered memory and write to the memory of peers. Do not free or reuse registered memory before the process ends.
  // Resources that the copies use stay mapped, are lost until the copies end, and are then freed. Until then peers
  // cannot fence this transfer engine. If a driver call hangs on a transfer thread or while it registers memory,
  // close() waits without limit.
  Status close();

  // --- Memory. Regions must stay mapped until deregister_memory() has returned. A transfer engine may have memory of
  // several kinds (host, GPU): each lane takes the memory that it reaches. If the lane of a write does not take its
  // source or target, the write fails with the lane's reason.

  // Registers [base, base+bytes). `memfd` and `memfd_offset` describe the memfd behind the memory; -1: no memfd. Blocks
  // while the memory is registered (seconds for tens of GiB). The data path continues meanwhile.
  Result<RegionId> register_memory(std::byte* base, uint64_t bytes, int memfd = -1, uint64_t memfd_offset = 0);
  // Registers each range, all or none. Ranges that lie in one GPU allocation, or touch each other in host memory, are
  // registered in one piece, from the first byte to the last. They share the keys of that piece.
  Result<std::vector<RegionId>> register_memory(std::span<const MemoryRange> ranges);
  // Revokes the region's keys. Waits until no write can land in the region and no peer's GPU maps it. A memfd may stay in
  // a peer's address space a moment longer. Blocks up to `timeout`. kTimeout: the region stays registered. Fence the peer
  // that does not respond, and try again. Regions that share keys must be deregistered together; otherwise
  // kInvalidArgument.
  Status deregister_memory(RegionId region, Timeout timeout);
  Status deregister_memory(std::span<const RegionId> regions, Timeout timeout);
  // Returns what a peer needs to write into the regions: opaque bytes for its import_regions(), which keeps the order.
  Result<Bytes> region_descriptor(RegionId region);
  Result<Bytes> region_descriptor(std::span<const RegionId> regions);
  Result<RemoteRegionId> import_region(PeerId peer, std::span<const std::byte> descriptor);
  Result<std::vector<RemoteRegionId>> import_regions(PeerId peer, std::span<const std::byte> descriptor);

  // --- Peers. domain.h describes the three steps. `name` is for logs only (empty in accept(): the name that the
  // offerer gives itself). Each call blocks while a link is made (milliseconds on a NIC). One link is made here. If a
  // side has several domains in the lane, the others are made when there is something to write.

  // `without`: providers that complete() of an earlier offer found not to lead to this peer.
  Result<Handshake> offer(std::string name, std::span<const std::string> without = {});
  Result<Handshake> accept(std::string name, std::span<const std::byte> offer);
  // A refused answer consumes the offer: the peer's id is forgotten.
  Status complete(PeerId peer, std::span<const std::byte> answer);
  // Ends the peer in both directions. Its transfers fail with kPeerDown. After success, no write of that peer can land
  // in local memory, and the id is forgotten. Blocks up to `timeout`. kTimeout: call again.
  Status fence(PeerId peer, Timeout timeout);
  // Disconnects gracefully. No new transfer to the peer is opened, the open transfers of both sides end, and both sides
  // send a goodbye. The peer is then fenced and its id forgotten, without an error event on either side. The other side
  // gets kPeerLeft. Blocks up to `timeout`. kTimeout: transfers are open on one of the sides, or messages untaken. Seal
  // the transfers and call again, or call fence().
  Status disconnect(PeerId peer, Timeout timeout);
  // Returns the provider of this peer's lane ("host", "tcp", ...).
  Result<std::string> lane(PeerId peer);

  // --- Writing.

  // Opens a transfer. `callback` receives its final event; if it is empty, the event queue does.
  Result<TransferId> open_transfer(PeerId peer, EventCallback callback = {});
  // Adds one contiguous write. It counts as one page, also if it takes several batches. A large write is split over the
  // domains of the peer's lane. `domain` pins it to one local domain of the lane, numbered in the order of
  // EngineConfig::domains. While that domain is broken, the others carry the write.
  Status write(TransferId transfer, RegionId source, uint64_t source_offset, RemoteRegionId target,
               uint64_t target_offset, uint64_t bytes, std::optional<uint32_t> immediate,
               std::optional<uint32_t> domain = {});
  // Adds pages. All ranges are checked against both regions: kOutOfRange adds nothing. An empty list is valid.
  Status write_pages(TransferId transfer, PagedWrite write);
  // Adds the pages of each layer, posted when `signal` reaches the layer's value (at once if it has). `pages.immediate`
  // is ignored. `signal` must come from create_signal() of this object, so that it wakes the right thread.
  Status arm(TransferId transfer, std::shared_ptr<LayerSignal> signal, PagedWrite pages,
             std::vector<ArmedLayer> layers);
  // Adds slices of any regions of the two sides, each posted when `signal` reaches its value. For senders that pack
  // data into their source memory step by step. Slices are checked like single writes; one invalid slice adds none.
  // kResources: too many slices of this transfer wait or are in flight (kMaxArmedSlices). Call wait_drained() first.
  Status arm_slices(TransferId transfer, std::shared_ptr<LayerSignal> signal, std::vector<ArmedSlice> slices);
  static constexpr uint32_t kMaxArmedSlices = 1 << 16;
  // Blocks until all slices with values up to `signal_value` are in the peer's memory, so that their source bytes may
  // be reused. Returns kTimeout after `timeout`, or the transfer's error if it fails meanwhile.
  Status wait_drained(TransferId transfer, uint64_t signal_value, Timeout timeout);
  // Declares that no more writes follow. The transfer ends when all writes have completed. Its id is forgotten after
  // its one final event.
  Status seal(TransferId transfer);
  // Cancels the transfer. After the call returned, nothing more of it is posted. kTransferCancelled follows when the
  // posted writes have drained. Blocks for one turn of the transfer thread. kInvalidArgument: the transfer has ended
  // already.
  Status cancel(TransferId transfer);
  // Blocks until all added writes whose signal value has been reached have completed, or returns kTimeout after
  // `timeout`. Armed layers whose value has not been reached stay armed.
  Status quiesce(TransferId transfer, Timeout timeout);
  Result<TransferProgress> progress(TransferId transfer);
  // open_transfer(), one write and seal() in one call, for the common small case.
  Result<TransferId> write_one(PeerId peer, RegionId source, uint64_t source_offset, RemoteRegionId target,
                               uint64_t target_offset, uint64_t bytes, std::optional<uint32_t> immediate,
                               EventCallback callback = {}, std::optional<uint32_t> domain = {});

  // --- Peer groups: one call for many peers. A member that is down or fails is reported as a PeerFailure in the one
  // final event, and does not stop the other members. kUnknownPeer: the member leaves, or was fenced.

  // `members` are connected peers, each named once. A fenced peer stays a member, and its writes fail.
  Result<PeerGroupId> add_peer_group(const std::vector<PeerId>& members);
  Status remove_peer_group(PeerGroupId group);
  // Writes slices[i] to member i. One final event: done, or failed with `failures`. If a slice is out of range, nothing
  // is sent.
  Result<TransferId> scatter(PeerGroupId group, RegionId source, const std::vector<ScatterSlice>& slices,
                             EventCallback callback = {});
  // Raises immediates[i], a counter of member i, by one, and writes nothing.
  Result<TransferId> barrier(PeerGroupId group, const std::vector<uint32_t>& immediates, EventCallback callback = {});

  // Prepares a scatter that is checked once and submitted often. It may have several slices per member, ordered by
  // member. `callback` receives each submission's event. A barrier is a prepared scatter whose slices have no bytes.
  Result<ScatterId> prepare_scatter(PeerGroupId group, const std::vector<PreparedSlice>& slices,
                                    EventCallback callback = {});
  // Submits a prepared scatter with slice i as in updates[i]. One final event: done, or failed with `failures`. It
  // allocates nothing if as many submissions have been in flight before as are now. kResources: 16 submissions are in
  // flight; wait for the end of one.
  Result<TransferId> submit_scatter(ScatterId scatter, std::span<const ScatterUpdate> updates);
  // Releases a prepared scatter. Submissions in flight end normally.
  Status release_scatter(ScatterId scatter);

  // --- Messages: small, reliable, in no order. A message that the peer's user does not take stays on this side. It is
  // never lost, and it never takes memory at the peer beyond a bound.

  // Sends 1 to kMaxUserMessageBytes bytes, copied before the call returns. kTransferDone follows when the peer's
  // transfer engine has taken the message. kResources: too many messages to this peer have not ended, because it does
  // not read.
  Result<TransferId> send(PeerId peer, std::span<const std::byte> message, EventCallback callback = {});
  // Takes up to `max` messages. Never blocks.
  std::vector<Message> receive(size_t max);
  // Blocks until a message arrives, or returns kTimeout after `timeout`.
  Result<Message> wait_message(Timeout timeout);
  // Readable while receive() would return a message. The transfer engine owns it.
  int message_fd() const;
  // Sends all messages to `callback` from now on, including waiting ones. An empty callback restores receive(). After
  // the call returned, the previous callback is not running any more. Blocks for one turn of the transfer thread.
  Status set_message_callback(MessageCallback callback);

  // --- Counting.

  // Allocates `n` counters at zero. They exist from now on, so an immediate that arrives before expect() is not lost.
  // `raisers` are the peers that receive the immediates. If another peer raises one of these counters, the count does
  // not change and that peer loses its link. Empty: every connected peer may raise them, which suits peers that trust
  // each other.
  Result<CounterSet> alloc_counters(uint32_t n, const std::vector<PeerId>& raisers = {});
  // Sets targets. One event follows when counters[i] >= targets[i] for all i (at once if they are). Counts only grow.
  // After the event, new and higher targets may be set. Pages of a later target must be written only after the earlier
  // target was reached, because a count says how many pages have landed, not which. If one link of several breaks in
  // that case, pages that may have been used are not repeated, and their transfer fails with kRefused.
  //
  // `word`, for a kernel that polls: `value` is stored into it before the event is reported. A word in GPU memory is
  // stored on a stream, and may change a little later. If the store fails, the event carries the error.
  Status expect(CounterSetId set, const std::vector<uint64_t>& targets, EventCallback callback = {},
                std::shared_ptr<CompletionWord> word = nullptr, uint64_t value = 0);
  // Mirrors a set for pollers that make no call of this object, such as kernels of a replayed CUDA graph. Each new count
  // of counter i is stored into words[i]. The words have the present counts when the call returns. Later counts are
  // stored on the thread that counts them, without another thread between. The transfer engine shares the words. It
  // stores nothing more once release_counters() or close() has returned, and the words may then be reused.
  //
  // A word in GPU memory is stored on a stream, and may change a little later than that: after this call has returned,
  // and after release_counters() or close().
  //
  // As with a reader, pages may be used because of any count. A mirrored set takes no targets. kInvalidArgument: the set
  // is mirrored already, has targets that it has not reached, or another number of counters. If a store fails, the
  // mirror ends, and a kCountersReached event of the set carries the error.
  Status mirror_counters(CounterSetId set, std::vector<std::shared_ptr<CompletionWord>> words);
  // Returns a reader. Its holder may use pages below the target. If a link breaks, the set is treated as if it had
  // reached a target.
  Result<CounterReader> counter_reader(CounterSetId set);
  // Returns the counts, for diagnosis. Pages that are used because of these counts may be written again; use a reader
  // for that.
  Result<std::vector<uint64_t>> counter_values(CounterSetId set);
  // Frees the set: its slots get a new generation, and later immediates are stale. No event follows. A callback that is
  // already running ends normally.
  Status release_counters(CounterSetId set);

  // --- Waiting.

  // Blocks until the transfer's final event or the set's "reached" event, or returns kTimeout after `timeout`. Consumes
  // the event, so poll_events() does not return it. Only for transfers and sets without a callback. `stays` is called
  // ten times a second on this thread and must not throw. When it returns false, the wait ends with kCancelled, and
  // poll_events() returns the event.
  Result<Event> wait_transfer(TransferId transfer, Timeout timeout, const std::function<bool()>& stays = {});
  Result<Event> wait_counters(CounterSetId set, Timeout timeout, const std::function<bool()>& stays = {});
  // Takes up to `max` events for which no thread waits. Never blocks.
  std::vector<Event> poll_events(size_t max);
  // Readable while poll_events() would return an event. The transfer engine owns it.
  int event_fd() const;

  std::shared_ptr<LayerSignal> create_signal();
  // Creates a signal that a CUDA stream writes; cuda/stream_signal.h says on which thread to call this.
  Result<std::shared_ptr<cuda::StreamSignal>> create_stream_signal();
  EngineStats stats() const;
  // Returns the links that have been lost, of all connected peers. Losses of peers that are down or fenced are
  // forgotten. Blocks for one turn of the transfer thread.
  Result<std::vector<LostLink>> lost_links();
  // Starts tracing: the transfer thread records what it does with armed requests and counters, up to `steps` steps
  // between two calls of take_trace(). Costs nothing before. Blocks for one turn of the transfer thread.
  Status start_trace(size_t steps);
  TakenTrace take_trace();
  const EngineConfig& config() const;
  // One line per open domain, in the provider's words ("tcp 127.0.0.1:41233").
  const std::vector<std::string>& domains() const;
  // With allow_fallback: the reasons why configured domains could not be opened. They explain a slower lane.
  const std::vector<Error>& unusable() const;

 private:
  class Impl;
  explicit TransferEngine(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace kvc
