// TransferEngine: counted one-sided writes between registered memory of two processes, and small messages.
//
// The engine owns one DomainGroup: the domains that serve one device, driven by a worker thread that posts and polls, and
// two for what may block: one registers memory, the other makes and ends links. Where there are several workers
// (EngineConfig::workers), "the worker" is the first of them, which schedules and calls back. Every public method may be
// called from any thread. Unless its comment says that it blocks, a method only hands a command to the worker and returns in
// well under a microsecond. Errors come back as values; nothing here throws or aborts.
//
// Two objects carry all completion:
//   Transfer    a growing set of writes to one peer, with exactly one final event. A message (send), a scatter and a
//               barrier are transfers too, which end by themselves;
//   CounterSet  the receiving side: counters that peers' immediates raise, with one "reached" event each time that targets
//               are set.
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
using RemoteRegionId = uint32_t;  // a peer's memory region, imported here
using TransferId = uint64_t;      // never reused
using CounterSetId = uint64_t;    // never reused
using PeerGroupId = uint32_t;     // never reused
using ScatterId = uint64_t;       // never reused

struct EngineConfig {
  std::string name;                   // how logs and peers call this engine
  std::vector<DomainConfig> domains;  // in order of preference; all domains of one provider form one lane
  // Where a preferred provider reaches the peer's machine but does not work (the kernel forbids it), go on to the
  // next one instead of refusing the peer. A provider that cannot lead to that peer at all is passed over anyway.
  bool allow_fallback = false;
  // How long an idle worker polls before it sleeps on a descriptor. See docs/performance.md for the measurement
  // behind the default: long enough for the next write of a burst, short enough that an idle engine stays under
  // 1 % of a core.
  uint32_t spin_us = 20;
  // Threads. One does everything; of several the first schedules, and the domains are dealt out among the others: for
  // several NICs whose small pages are more than one thread can post (docs/performance.md).
  uint32_t workers = 1;
  int worker_cpu = -1;               // pin the workers to this core and those after it; -1: not pinned
  DomainFactory open = open_domain;  // opens each domain: a test or a measurement wraps it in a domain of its own
};

// Pages of one region: page i begins at offset + indices[i] * stride.
struct Pages {
  std::vector<int64_t> indices;
  uint64_t stride = 0;
  uint64_t offset = 0;
};

// page_bytes bytes from each source page to the target page of the same position. `immediate`: a counter of the
// peer's (from its CounterSet), raised by exactly the number of pages; none: an uncounted write.
struct PagedWrite {
  uint64_t page_bytes = 0;
  RegionId source = 0;
  Pages source_pages;
  RemoteRegionId target = 0;
  Pages target_pages;
  std::optional<uint32_t> immediate;
};

// The same pages of several layers, as a paged KV cache lays them out: layer k adds its own offset on each side,
// has its own counter, and is posted when the signal reaches its value.
struct ArmedLayer {
  uint64_t signal_value = 0;
  uint64_t source_offset = 0;  // added to source_pages.offset
  uint64_t target_offset = 0;  // added to target_pages.offset
  uint32_t immediate = 0;
};

// One slice of a list that a sender releases as it goes: written when the signal reaches `signal_value`, counted as one
// page.
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
  kTransferFailed,     // at least one write failed; nothing is in flight on this side any more
  kTransferCancelled,  // cancelled and drained: nothing is in flight any more
  kCountersReached,    // every counter of the set reached its target; the pages are visible. Once for each expect()
  kPeerDown,           // the peer's links broke; its transfers end with their own events
  kPeerLeft,           // the peer called disconnect(): all is drained both ways, and its id is forgotten
};

// What went wrong for one member of a peer group.
struct PeerFailure {
  PeerId peer = 0;
  Error error;
};

struct Event {
  EventKind kind{};
  uint64_t id = 0;  // TransferId, CounterSetId or PeerId
  // kTransferFailed, kTransferCancelled: nothing of this transfer can land at the peer any more. False: only the
  // peer's own fence() can say so (bytes may still sit in its receive buffers).
  bool quiesced = true;
  uint64_t pages = 0;  // transfers: pages and bytes that are known to have arrived
  uint64_t bytes = 0;
  std::optional<Error> error{};
  std::vector<PeerFailure> failures{};  // scatter and barrier: of each member that failed; `error` is the first one's
};

// Called on the worker thread: must not block and must not call a blocking method of the engine; it may submit.
// Whatever it throws is caught and counted (EngineStats::callback_errors): no callback can stop the engine.
using EventCallback = std::function<void(const Event&)>;

// A message as its receiver gets it.
struct Message {
  PeerId peer = 0;
  Bytes bytes;
};
// Called on the worker thread, like an EventCallback. The message is gone when it returns.
using MessageCallback = std::function<void(const Message&)>;

// What one member of a peer group gets in a scatter: `bytes` of the source region, counted as one page.
struct ScatterSlice {
  uint64_t source_offset = 0;
  RemoteRegionId target = 0;
  uint64_t target_offset = 0;
  uint64_t bytes = 0;  // 0: the immediate alone, if there is one, so that what a member counts does not depend on sizes
  std::optional<uint32_t> immediate;
};

// What may go to a member of a peer group in one slice of a prepared scatter: up to `bytes`, from and to places within the
// `bytes` that begin at the two offsets.
struct PreparedSlice {
  uint32_t member = 0;  // its place in the group
  RegionId source = 0;
  uint64_t source_offset = 0;
  RemoteRegionId target = 0;
  uint64_t target_offset = 0;
  uint64_t bytes = 0;  // 0: never more than the immediate
  std::optional<uint32_t> immediate;
};
// What goes in that slice this time: offsets count from the prepared ones. 0 bytes: the immediate alone, if there is one.
struct ScatterUpdate {
  uint64_t source_offset = 0;
  uint64_t target_offset = 0;
  uint64_t bytes = 0;
};

struct TransferProgress {
  uint64_t pages_posted = 0;
  uint64_t bytes_posted = 0;
  uint64_t pages_done = 0;  // completed: in the peer's memory
  uint64_t bytes_done = 0;
};

struct CounterSet {
  CounterSetId id = 0;
  std::vector<uint32_t> immediates;  // for the sender, one per counter, multiplicity 1
};

// The counters of one set, read without a lock: for who polls. It may outlive the engine.
class CounterReader {
 public:
  // Any thread. What has landed before the count that this sees is visible. A released set's counters are 0.
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

struct EngineStats {
  uint64_t pages_written = 0;  // completed
  uint64_t bytes_written = 0;
  uint64_t batches_posted = 0;
  uint64_t immediates_received = 0;  // pages counted, stale ones included
  uint64_t immediates_stale = 0;     // of an older generation, or of no counter at all
  uint64_t immediates_foreign = 0;   // of a counter that is another peer's: its link was ended
  uint64_t links = 0;                // up now, of all peers
  uint64_t links_lost = 0;           // taken out while their peer has others; up again: links_restored
  uint64_t links_restored = 0;
  uint64_t pages_rewritten = 0;  // after their link broke, over another one
  uint64_t sleeps = 0;           // times the worker went to sleep
  uint64_t callback_errors = 0;  // exceptions that callbacks threw
  uint64_t transfers_open = 0;
  uint64_t counters_allocated = 0;
  uint64_t peers = 0;
  uint64_t regions = 0;
};

// What the worker did. `request` tells the requests of an arm() call apart for as long as they live, from kReleased on.
struct TraceStep {
  enum class Kind : uint8_t {
    kReleased,  // the worker saw that the signal has reached the request's value
    kPosted,    // a batch of it was given to a lane
    kLanded,    // a batch of it is in the peer's memory
    kCounted,   // a counter here was raised
  };
  Kind kind = Kind::kReleased;
  int64_t nanoseconds = 0;    // CLOCK_MONOTONIC
  uint64_t request = 0;       // kCounted: the immediate, of multiplicity 1
  TransferId transfer = 0;    // kReleased
  uint64_t signal_value = 0;  // kReleased: what the request waited for
  uint64_t source = 0;        // kReleased: the address that its source pages count from
  uint64_t pages = 0;         // kPosted, kLanded, kCounted
};
struct TakenTrace {
  std::vector<TraceStep> steps;
  uint64_t lost = 0;  // for which there was no room
};

// A peer as seen after offer() or accept(): its id here, and the bytes to hand to it over the control plane.
struct Handshake {
  PeerId peer = 0;
  Bytes bytes;
  // accept(): one line for each lane of the offerer's that was passed over before the one in use, and why.
  std::vector<std::string> passed_over;
};

class TransferEngine {
 public:
  // Opens the domains and starts the workers. Blocks until they are open. Fails if any configured provider is not
  // usable on this machine and allow_fallback is false (or none is usable), with the provider's reason.
  static Result<std::unique_ptr<TransferEngine>> create(EngineConfig config);

  // As close(), whose error it drops.
  ~TransferEngine();

  // Stops the workers: open transfers end with kClosed, links are fenced, registered memory is released. Blocks; for a peer
  // that cannot be fenced (its process is stopped in the middle of a copy) 5 s. Not during another call of this object, and
  // nothing but close() may be called afterwards; the second call does nothing.
  // kTimeout: our own GPU hangs. It had 5 s for its copies, and as long again. Copies may still read registered memory and
  // write peers' memory: registered memory must not be freed or used again before the process ends. What they use stays
  // mapped, is lost until they end, and is then freed. Until then peers cannot fence this engine. A driver's call that hangs
  // on a worker, or while it registers memory, is waited for without limit.
  Status close();

  // --- Memory. Regions must stay mapped until deregister_memory() returned. An engine may have memory of several kinds
  //     (host, GPU): each lane takes what it reaches, and a write over one that does not take its source or its target fails
  //     with that lane's reason.

  // Registers [base, base+bytes). `memfd` and `memfd_offset`: the memfd behind it, -1 if none. Blocks, for as long as the
  // memory takes to register (seconds for tens of GiB); the data path goes on meanwhile.
  Result<RegionId> register_memory(std::byte* base, uint64_t bytes, int memfd = -1, uint64_t memfd_offset = 0);
  // Registers each range, all or none. Those that lie in one GPU allocation, or touch each other in host memory, are
  // registered in one piece, from the first byte to the last, and share its keys.
  Result<std::vector<RegionId>> register_memory(std::span<const MemoryRange> ranges);
  // Revokes the region's keys and waits until no write can land in it any more, and no peer has it mapped for its GPU (a
  // memfd may stay in a peer's address space a moment longer). Blocks up to `timeout`. kTimeout: the region stays registered
  // (fence the peer that is stuck, then try again). Regions that share keys go together: kInvalidArgument where one is
  // missing.
  Status deregister_memory(RegionId region, Timeout timeout);
  Status deregister_memory(std::span<const RegionId> regions, Timeout timeout);
  // What a peer needs to write into the regions: opaque bytes for its import_regions(), which answers in the same order.
  Result<Bytes> region_descriptor(RegionId region);
  Result<Bytes> region_descriptor(std::span<const RegionId> regions);
  Result<RemoteRegionId> import_region(PeerId peer, std::span<const std::byte> descriptor);
  Result<std::vector<RemoteRegionId>> import_regions(PeerId peer, std::span<const std::byte> descriptor);

  // --- Peers. See domain.h for the three steps. `name` is for logs only (empty in accept(): the name that the
  // offerer gives itself). Each blocks for what it takes to make a link (milliseconds on a NIC). One link is made here; the
  // others, where a side has several domains in the lane, once there is something to write.

  // `without`: providers that complete() of an earlier offer has found not to lead to this peer.
  Result<Handshake> offer(std::string name, std::span<const std::string> without = {});
  Result<Handshake> accept(std::string name, std::span<const std::byte> offer);
  // An answer that is refused uses the offer up: the peer's id is forgotten.
  Status complete(PeerId peer, std::span<const std::byte> answer);
  // Ends the peer both ways: its transfers fail with kPeerDown, and once this returned success no write of that
  // peer can land in local memory. The id is forgotten. Blocks up to `timeout`; kTimeout: call again.
  Status fence(PeerId peer, Timeout timeout);
  // Parts from the peer in good order: nothing new is opened towards it, transfers of both sides to each other end, both
  // say so, and then the peer is fenced and its id forgotten, without an error event on either side; the other side gets
  // kPeerLeft. Blocks up to `timeout`; kTimeout: transfers are still open on one of the sides, or messages untaken: seal
  // them and call again, or fence().
  Status disconnect(PeerId peer, Timeout timeout);
  // "host", "tcp", ...: the provider this peer's writes take.
  Result<std::string> lane(PeerId peer);

  // --- Writing.

  // Opens a transfer; `callback` gets its final event, or the event queue does where it is empty.
  Result<TransferId> open_transfer(PeerId peer, EventCallback callback = {});
  // Adds one contiguous write. A write larger than one batch is still one page: it counts once. A large one is split
  // over the domains of the peer's lane (sharded), unless `domain` pins it to the one of that number here, in the order
  // of EngineConfig::domains; while that one is broken, the others carry it.
  Status write(TransferId transfer, RegionId source, uint64_t source_offset, RemoteRegionId target,
               uint64_t target_offset, uint64_t bytes, std::optional<uint32_t> immediate,
               std::optional<uint32_t> domain = {});
  // Adds pages. Ranges are checked here against both regions: kOutOfRange adds nothing. An empty list is fine.
  Status write_pages(TransferId transfer, PagedWrite write);
  // Adds the pages of each layer, posted when `signal` reaches that layer's value (at once if it has).
  // `pages.immediate` is ignored. `signal` is one of this engine's (create_signal()): it wakes this worker.
  Status arm(TransferId transfer, std::shared_ptr<LayerSignal> signal, PagedWrite pages,
             std::vector<ArmedLayer> layers);
  // Adds slices of any regions of the two sides, each posted when `signal` reaches its value: for a sender that packs
  // into its source memory as it goes. Checked here like single writes; one that is wrong adds nothing. kResources: too
  // many of this transfer's slices wait or are in flight (kMaxArmedSlices): wait_drained() first.
  Status arm_slices(TransferId transfer, std::shared_ptr<LayerSignal> signal, std::vector<ArmedSlice> slices);
  static constexpr uint32_t kMaxArmedSlices = 1 << 16;
  // Blocks until all slices with values up to `signal_value` are in the peer's memory, so that their source bytes may be
  // packed anew, or `timeout` (kTimeout). Where the transfer fails meanwhile: its error.
  Status wait_drained(TransferId transfer, uint64_t signal_value, Timeout timeout);
  // No more writes follow: the transfer ends when all have completed. Exactly one final event, after which its id
  // is forgotten.
  Status seal(TransferId transfer);
  // When this returns, nothing more of the transfer is posted; kTransferCancelled follows once what was posted has
  // drained. Blocks for one turn of the worker. kInvalidArgument if it has ended already.
  Status cancel(TransferId transfer);
  // Blocks until all writes added so far whose signal has passed have completed, or `timeout` (kTimeout). Armed
  // layers whose signal has not passed stay armed.
  Status quiesce(TransferId transfer, Timeout timeout);
  Result<TransferProgress> progress(TransferId transfer);
  // open_transfer + one write + seal, for the common small case.
  Result<TransferId> write_one(PeerId peer, RegionId source, uint64_t source_offset, RemoteRegionId target,
                               uint64_t target_offset, uint64_t bytes, std::optional<uint32_t> immediate,
                               EventCallback callback = {}, std::optional<uint32_t> domain = {});

  // --- Peer groups: one call for many peers. Any one that is down, or fails, is reported by its own PeerFailure in the
  // one final event and stops none of the others.

  // Connected peers, each once; a fenced one stays a member that fails.
  Result<PeerGroupId> add_peer_group(const std::vector<PeerId>& members);
  Status remove_peer_group(PeerGroupId group);
  // Writes slices[i] to member i. One final event: done, or failed with `failures`. A slice out of range: nothing is sent.
  Result<TransferId> scatter(PeerGroupId group, RegionId source, const std::vector<ScatterSlice>& slices,
                             EventCallback callback = {});
  // Raises immediates[i], a counter of member i's, by one, and writes nothing.
  Result<TransferId> barrier(PeerGroupId group, const std::vector<uint32_t>& immediates, EventCallback callback = {});

  // A scatter that is checked once and submitted often: several slices a member, in the order of the members. `callback`
  // gets each submission's event. A barrier is one whose slices have no bytes.
  Result<ScatterId> prepare_scatter(PeerGroupId group, const std::vector<PreparedSlice>& slices,
                                    EventCallback callback = {});
  // Slice i goes as updates[i] says. One final event: done, or failed with `failures`. Allocates nothing once as many
  // submissions have been in flight at a time as are now. kResources: 16 are; wait for one.
  Result<TransferId> submit_scatter(ScatterId scatter, std::span<const ScatterUpdate> updates);
  // Submissions in flight end as they would.
  Status release_scatter(ScatterId scatter);

  // --- Messages: small, reliable, in no order. What the peer's user does not take stays here: it is never lost, and it
  // never takes memory there beyond a bound.

  // Sends 1 to kMaxUserMessageBytes bytes, copied before this returns. kTransferDone once the peer's engine has taken the
  // message. kResources: too many sends to this peer have not ended, because it does not read.
  Result<TransferId> send(PeerId peer, std::span<const std::byte> message, EventCallback callback = {});
  // Takes up to `max` messages. Never blocks.
  std::vector<Message> receive(size_t max);
  // Blocks until there is a message, or `timeout` (kTimeout).
  Result<Message> wait_message(Timeout timeout);
  // Readable while receive() would return something. Owned by the engine.
  int message_fd() const;
  // From now on messages go to `callback`, those that wait too; an empty one: to receive() again. When this returns, the
  // callback before is not running any more. Blocks for one turn of the worker.
  Status set_message_callback(MessageCallback callback);

  // --- Counting.

  // n counters, all zero. They exist from now on: an immediate that arrives before expect() is not lost. `raisers`: the
  // peers that the immediates are given to. One of these counters raised by anybody else costs him his link, and is not
  // raised. Empty: any connected peer may raise them, which is for peers that trust each other.
  Result<CounterSet> alloc_counters(uint32_t n, const std::vector<PeerId>& raisers = {});
  // One event when counters[i] >= targets[i] for all i (at once if they are). Counts only grow: once that event has come,
  // new targets may be set, above the last ones. Pages of a later target are to be written only after the one before was
  // reached: a count says how many have landed, not which. Where a link of several breaks then, pages that may have been used
  // since are not written again, and their transfer fails with kRefused. `word`: `value` is stored into it before the event
  // is told (one in a GPU's memory: on a stream, and may still be on its way), for a kernel that polls; where it could not
  // be stored, the event carries the error.
  Status expect(CounterSetId set, const std::vector<uint64_t>& targets, EventCallback callback = {},
                std::shared_ptr<CompletionWord> word = nullptr, uint64_t value = 0);
  // The holder of a reader may use pages below the target. Where a link breaks, the set counts as one that reached a target.
  Result<CounterReader> counter_reader(CounterSetId set);
  // For a diagnosis: what is used because of a count that was seen here may be written again. Take a reader for that.
  Result<std::vector<uint64_t>> counter_values(CounterSetId set);
  // Frees the set: its slots get a new generation, later immediates count as stale. No event follows (a callback that
  // is already running ends).
  Status release_counters(CounterSetId set);

  // --- Waiting.

  // Blocks until the transfer's final event or the set's "reached" event, or `timeout` (kTimeout). Consumes the
  // event: it does not appear in poll_events(). For transfers and sets that were given no callback. `stays`, if any, is
  // asked ten times a second, on this thread, and must not throw: once it says no the wait is over (kCancelled), and the
  // event is whoever's polls.
  Result<Event> wait_transfer(TransferId transfer, Timeout timeout, const std::function<bool()>& stays = {});
  Result<Event> wait_counters(CounterSetId set, Timeout timeout, const std::function<bool()>& stays = {});
  // Takes up to `max` events that nobody waits for. Never blocks.
  std::vector<Event> poll_events(size_t max);
  // Readable while poll_events() would return something. Owned by the engine.
  int event_fd() const;

  std::shared_ptr<LayerSignal> create_signal();
  // One that a CUDA stream writes; see cuda/stream_signal.h for the thread to call this on.
  Result<std::shared_ptr<cuda::StreamSignal>> create_stream_signal();
  EngineStats stats() const;
  // From now on the worker notes what it does with armed requests and counters, up to `steps` of them between two calls of
  // take_trace(). Costs nothing until then. Blocks for one turn of the worker.
  Status start_trace(size_t steps);
  TakenTrace take_trace();
  const EngineConfig& config() const;
  // One line per open domain, as its provider describes it ("tcp 127.0.0.1:41233").
  const std::vector<std::string>& domains() const;
  // With allow_fallback: why configured domains could not be opened. What a slower lane is to be blamed on.
  const std::vector<Error>& unusable() const;

 private:
  class Impl;
  explicit TransferEngine(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace kvc
