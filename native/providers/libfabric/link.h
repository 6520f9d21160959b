// Link: one end of a connection to a peer: an endpoint of its own, with its own completion queue and address vector.
//
// Why an endpoint for each link, where reliable datagrams would let all peers share one:
//  - fence() has to be sound. What a peer may still write cannot be called back on a shared endpoint: removing its
//    address stops our writes to it, not its writes to us, and the keys that it knows are everybody's. An endpoint that
//    is closed takes nothing any more.
//  - An immediate says whose it is, so that transfers can go on over other links when this one breaks.
//  - Nothing of a closed link turns up later: its queue goes with it.
// What it costs: on EFA a queue pair and a completion queue for each link (a NIC has several hundred), on tcp a
// listening socket, on shm a few MB of /dev/shm; and a call for each link to look for completions.
//
// Keys: the engine's rkeys are random numbers of ours. Before the first write to a region a link asks its peer for it
// (Ask, Tell), and the answer names address and key as the peer's provider has them: so short keys, raw keys, keys of
// one endpoint and offsets instead of addresses are all the same to the engine. It also means that a wrong key is
// found out before anything is written, and that a peer whose memory is withdrawn says when nothing is under way any
// more (Revoke, Revoked): providers that check a key when a write begins go on landing it after the key was withdrawn.
#pragma once

#include <rdma/fi_endpoint.h>
#include <rdma/fi_eq.h>
#include <rdma/fi_rma.h>

#include <array>
#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "engine/domain.h"
#include "engine/immediate.h"
#include "engine/page_runs.h"
#include "providers/libfabric/device.h"
#include "providers/libfabric/region_table.h"
#include "providers/libfabric/wire.h"

namespace kvc::libfabric {

using Clock = std::chrono::steady_clock;

// An Error of a link that does not work any more.
inline Error link_down(std::string operation, std::string message) {
  return fabric_error(ErrorCode::kPeerDown, std::move(operation), std::move(message));
}

// Access rights of regions: we read them to write elsewhere, and peers write them.
inline constexpr uint64_t kRegionAccess = FI_WRITE | FI_REMOTE_WRITE;

// Every operation completes, once the bytes are in the peer's memory.
inline constexpr uint64_t kOperationFlags = FI_COMPLETION | FI_DELIVERY_COMPLETE;

// How long a peer may be silent. Tests shorten it.
struct Tuning {
  // How often peers are looked after.
  std::chrono::milliseconds look{1000};
  // A peer that was silent for this long is asked for a word.
  std::chrono::milliseconds ping_after{2000};
  // It counts as gone when none comes: ten times what a loaded machine was seen to stop a worker for.
  std::chrono::milliseconds silence{10000};
  // An offerer's Hello must come within the time that a busy control plane takes to deliver an answer.
  std::chrono::milliseconds hello{30000};
};

// What the links of a domain share.
struct Shared {
  DomainSink& sink;
  Device& device;
  const Tuning tuning{};
  RegionTable regions{};
  // Where peers write immediates that have no pages: bytes that nobody reads.
  alignas(64) std::array<std::byte, 64> doorbell{};
  Fid<fid_mr> doorbell_memory{};
};

class Link {
 public:
  // Opens and enables an endpoint. Nobody knows its address yet.
  static Result<std::unique_ptr<Link>> create(Shared& shared, LinkId id, uint64_t secret);
  ~Link();
  Link(const Link&) = delete;
  Link& operator=(const Link&) = delete;

  LinkId id() const noexcept { return id_; }
  uint64_t secret() const noexcept { return secret_; }
  // The completion queue's descriptor, or -1.
  int fd() const noexcept { return fd_; }
  // Readable once the peer's process is gone; -1 where that cannot be told.
  int pidfd() const noexcept { return pidfd_.get(); }

  // Our end, for the peer.
  Result<Card> card();
  // The peer's end is known. The offerer may write from now on and says Hello; the acceptor waits for that.
  Status meet(const Card& peer, bool says_hello);

  // As Domain's. Nothing but the error completion happens once the link has ended.
  Posted post(const WriteBatch& batch);
  Posted send(WorkId work, std::span<const std::byte> message);

  // Reads completions and posts what waits, bounded. True if anything happened.
  bool poll();
  // Whether poll() has nothing to do until fd() is readable.
  bool may_sleep();
  // Something waits that no descriptor announces: look again soon.
  bool waits_for_room() const noexcept { return !queue_.empty() || !outgoing_.empty() || !held_.empty(); }
  // Once in a while: finds out about a peer that has fallen silent or is gone. `gap`: since the last time.
  void look_after(Clock::time_point now, Clock::duration gap);

  // Why the link broke by itself; the domain then ends it.
  const std::optional<Error>& broken() const noexcept { return broken_; }

  // Ends what was posted with `error` and says Bye. True once that has left, or cannot.
  bool leave(const Error& error);
  // Ends what was posted with `error`, reports what has landed, and closes the endpoint: nothing lands any more.
  void close(const Error& error);

  // Tells the peer that a region is withdrawn; it answers Revoked (which takes this link out of region.told).
  void revoke(uint64_t rkey);
  // A region ends: so does what this endpoint has of it.
  void forget_memory(Region& region);

 private:
  // An operation that the provider is carrying out. It owns `context` meanwhile.
  struct Slot {
    enum class Kind : uint8_t { kWrite, kSend, kReceive };
    fi_context2 context{};  // first: a completion's op_context leads back here
    Kind kind = Kind::kWrite;
  };
  struct Batch;
  struct WriteSlot : Slot {
    Batch* batch = nullptr;  // none once the link has ended
    Region* source = nullptr;
  };
  // A message buffer and its operation.
  struct MessageSlot : Slot {
    std::byte* buffer = nullptr;
  };
  // A region of the peer's.
  struct Target {
    enum class State : uint8_t { kAsked, kKnown, kRevoked };
    State state = State::kAsked;
    uint32_t serial = 0;  // of the question
    uint32_t writes = 0;  // under way
    uint64_t address = 0;
    uint64_t bytes = 0;
    uint64_t key = 0;
    bool mapped = false;  // a raw key: unmap it
  };
  struct Batch {
    bool active = false;
    WorkId work = 0;
    uint64_t rkey = 0;
    Target* target = nullptr;  // once it is known
    uint64_t page_bytes = 0;
    bool counted = false;
    uint32_t immediate = 0;
    uint32_t runs_count = 0;
    uint32_t next_run = 0;
    uint32_t in_flight = 0;
    std::optional<Error> error;
    std::array<PageRun, Immediate::kMaxMultiplicity> runs;
  };
  struct Outgoing {
    MessageKind kind;
    Bytes body;
  };

  Link(Shared& shared, LinkId id, uint64_t secret) : shared_(shared), id_(id), secret_(secret) {}
  Status start();
  Status open_queue();
  Status open_messages();

  // Completions.
  bool read_completions();
  void drain();
  void handle(const fi_cq_data_entry& entry);
  // False: there was none after all.
  bool handle_error();
  void finish(WriteSlot& slot, const Error* error);
  void count(uint32_t immediate);

  // What waits.
  bool push_writes();
  bool resolve(Batch& batch);
  // 0, -FI_EAGAIN, or another error of libfabric's.
  ssize_t write(Batch& batch, const PageRun& run);

  // Messages (link_messages.cc).
  bool push_messages();
  void enqueue(MessageKind kind, Bytes body = {});
  void repost(MessageSlot& slot);
  void receive(MessageSlot& slot, size_t length);
  bool take(MessageSlot& slot);
  bool offer_held();
  void obey(MessageKind kind, std::span<const std::byte> body);

  // Keys (link_messages.cc).
  void tell(const Ask& ask);
  void learn(const Tell& tell);
  void withdraw(uint64_t rkey);
  void release(uint64_t rkey, Target& target);
  Result<fid_mr*> memory_of(Region& region);
  Status map(const RemoteMemory& memory, Target& target);
  void unmap(Target& target);

  void end_batch(Batch& batch);
  void end_posted(const Error& error);
  void fail_queued(uint64_t rkey, const char* why);
  void break_with(Error error);

  Shared& shared_;
  const LinkId id_;
  const uint64_t secret_;
  Fid<fid_cq> cq_;
  bool enabled_ = false;  // the endpoint was, once
  Fid<fid_av> av_;
  Fid<fid_ep> endpoint_;  // after what it is bound to: closed first
  int fd_ = -1;
  std::unordered_map<const Region*, Fid<fid_mr>> memories_;  // FI_MR_ENDPOINT: our regions as this endpoint has them
  Fid<fid_mr> doorbell_memory_;                              // the same
  Fid<fid_mr> messages_memory_;                              // FI_MR_LOCAL: the message buffers

  fi_addr_t peer_ = FI_ADDR_UNSPEC;
  RemoteMemory peer_doorbell_;
  Target doorbell_;
  bool met_ = false;    // the peer's address is known
  bool up_ = false;     // and the peer knows ours
  bool ended_ = false;  // left, broken or closed: nothing is posted any more
  std::optional<Error> broken_;
  bool bye_received_ = false;
  bool bye_sent_ = false;
  std::optional<Clock::time_point> leaving_until_;

  // Liveness.
  UniqueFd pidfd_;      // the peer's process, where it is on this machine
  bool heard_ = false;  // since the last look
  Clock::time_point last_heard_{};

  // Completions read and not yet handled: a callback may come back and go on with them.
  std::array<fi_cq_data_entry, 64> entries_;
  size_t next_entry_ = 0;
  size_t entries_count_ = 0;

  std::vector<WriteSlot> write_slots_;
  std::vector<WriteSlot*> free_writes_;
  std::deque<Batch> batches_;  // a slab: addresses stay
  std::vector<Batch*> free_batches_;
  std::deque<Batch*> queue_;  // with something left to post, in order
  std::unordered_map<uint64_t, Target> targets_;
  uint32_t next_serial_ = 1;

  std::vector<std::byte> buffers_;
  std::vector<MessageSlot> send_slots_;
  std::vector<MessageSlot*> free_sends_;
  std::vector<MessageSlot> receive_slots_;
  std::deque<Outgoing> outgoing_;
  std::deque<MessageSlot*> held_;                 // received, and the sink had no room
  std::unordered_map<uint32_t, WorkId> untaken_;  // sent, by number, and the peer's sink has not taken them
  uint32_t next_message_ = 1;

  // Immediates under way to the peer are limited to what its completion queue holds.
  uint64_t immediates_posted_ = 0;
  uint64_t immediates_seen_by_peer_ = 0;
  uint64_t immediates_seen_ = 0;
  uint64_t immediates_reported_ = 0;
};

}  // namespace kvc::libfabric
