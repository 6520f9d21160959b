// Domain and Connector: the two halves that every provider implements for one NIC or its stand-in.
//
//   Connector   may block. register_memory() and the destructor of a Registration run on the memory thread of the
//               transfer engine. All other calls run on its control thread, possibly at the same time. No lock
//               that both threads use is held while memory is registered.
//   Domain      posts and polls. No method blocks, and all of them run on the one thread that drives the domain, so
//               it needs no lock. It reports events through completions() and never calls other components.
//
// The connector hands finished objects (a Registration, a LinkEnd) to the domain. When the domain is done with a
// LinkEnd, it returns it through the ControlQueue, because its destructor may block.
//
// Contract (docs/architecture.md, "the contract of the data plane"): transport is reliable and unordered. A batch of n
// pages with an immediate raises the receiver's counter by exactly n, after those pages are visible there. A completion
// means that the source bytes may be overwritten AND that the bytes are in the peer's memory or never will be. Writes
// that fail with their link are repeated over another link, unless the receiver may have used some of their pages
// (Rewriter). So at the end of a fence, a domain must have counted exactly the pages that landed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/bounds.h"
#include "base/error.h"
#include "lane/completion_queue.h"
#include "lane/control_queue.h"

namespace kvc {

// The longest message that send() takes, in bytes: one packet at the largest path MTU of RoCE, and a page of memory.
inline constexpr size_t kMaxMessageBytes = 4096;
// Messages on one link, in one direction, that the receiving transfer engine has not taken. Every domain has room for
// this many and keeps no more. A peer that does not read, or floods, can therefore occupy 64 KiB at most.
inline constexpr uint32_t kMessageSlots = 16;

// Settings of a domain. A provider ignores the fields that it does not use.
struct DomainConfig {
  std::string provider;               // "sim", "host", "tcp"
  std::string device;                 // which NIC or GPU, in the provider's notation; empty: the provider chooses
  std::string address = "127.0.0.1";  // tcp: the one local address to listen on (the kernel chooses the port)
  uint32_t connections = 2;           // tcp: connections to each peer
  std::string fabric = "default";     // sim: domains connect through the fabric of this name in this process
  uint64_t seed = 1;                  // sim: seed of every delay and reordering
  uint32_t max_delay_us = 50;         // sim: each page is delivered after 0..max_delay_us
  uint32_t copy_blocks = 16;          // nvlink, bounce: how many of the GPU's SMs a copy may occupy
};

// Returns the configuration of the lane that carries this one, which `device` names as PROVIDER[:DEVICE]. Default: tcp.
DomainConfig carrier_of(const DomainConfig& config);

// How much the transfer engine may give a domain at a time.
struct DomainLimits {
  // Bytes of one batch, or one page if it is larger. One batch then occupies a link for 20 us at 50 GB/s and 250 us at
  // 4 GB/s, which bounds how long a small write waits behind it. Pages above 16 KiB reach this limit. With smaller
  // pages the multiplicity (64 pages) ends a batch.
  uint64_t batch_bytes = 1 << 20;
  // Bytes posted on one link and not completed, or one batch if it is larger. 50 GB/s (a 400G NIC) x 20 us of round
  // trip is 1 MB, and eight times that keeps any NIC busy. A small write can find this many bytes ahead of it on the
  // link.
  uint64_t window_bytes = 8 << 20;
  // The longest page, in bytes.
  uint64_t page_bytes = uint64_t{1} << 40;
};

// Memory of this process, [base, base+bytes), in host or GPU memory. `memfd` is the memfd behind it, starting at
// `memfd_offset`. -1: no memfd.
struct MemoryRange {
  std::byte* base = nullptr;
  uint64_t bytes = 0;
  int memfd = -1;
  uint64_t memfd_offset = 0;
};

// Memory that one domain has registered. The memory thread creates and destroys it. From publish() until withdraw()
// returns true, it belongs to the domain. Each provider derives its own class.
class Registration {
 public:
  Registration(const MemoryRange& range, uint64_t remote_key) : base(range.base), bytes(range.bytes), key(remote_key) {}
  Registration(const Registration&) = delete;
  Registration& operator=(const Registration&) = delete;
  virtual ~Registration() = default;

  std::byte* const base;
  const uint64_t bytes;
  // The key that peers write with: 64 random bits, hard to guess, different for each registration.
  const uint64_t key;

  bool contains(uint64_t offset, uint64_t length) const noexcept { return fits(offset, length, bytes); }

  // Used by the domain (region_table.h):
  uint32_t landing = 0;  // writes of peers that have begun to land here and not ended
  bool revoked = false;
};

// This process's end of one link. A connector creates it, a domain uses it, and the control thread destroys it.
class LinkEnd {
 public:
  virtual ~LinkEnd() = default;
};

class Connector {
 public:
  Connector() = default;
  Connector(const Connector&) = delete;
  Connector& operator=(const Connector&) = delete;
  // Called after the end of the domain and of every object that this connector created.
  virtual ~Connector() = default;

  // --- Properties. The thread that opens the domain reads them before the control thread has the connector.

  // Name of the local side of this lane in logs: "tcp 10.0.0.3:41233", "host pid 4711", "sim default/3".
  virtual std::string description() const = 0;
  // Bandwidth of the device in bits per second; 0 if unknown. Pages are spread over domains in this proportion.
  virtual uint64_t bits_per_second() const { return 0; }
  // Limits of the lane. They are constant and equal for all domains of a lane.
  virtual DomainLimits limits() const { return {}; }

  // --- Memory

  // Registers memory, which must outlive the registration. kNotReachable: this lane does not reach this kind of memory,
  // which is no failure if another lane does. A lane that uses another lane has its slots registered on the control
  // thread.
  virtual Result<std::unique_ptr<Registration>> register_memory(const MemoryRange& range) = 0;

  // --- Links. Both ends of a link can write. Making a link takes three steps, and the authenticated control plane
  //     carries their bytes:
  //     A.offer(link) -> bytes -> B.accept(link, offer) -> answer -> A.complete(link, answer).
  //     The results of accept() and complete() go to the domain at once (attach()). B may post after accept() returned,
  //     and A after complete() returned. Neither end may rely on connectivity earlier. Until its transport is up, a
  //     domain queues batches or returns kBusy. The bytes are untrusted: check every length.

  struct Accepted {
    Bytes answer;
    std::unique_ptr<LinkEnd> end;
  };

  virtual Result<Bytes> offer(LinkId link) = 0;
  // kNotReachable: this provider cannot lead to that peer (another machine, another process), which is not a failure.
  virtual Result<Accepted> accept(LinkId link, std::span<const std::byte> offer) = 0;
  // Consumes the offer, also on failure. kNotReachable as for accept(), if only this side finds it out: the caller may
  // offer again without this provider.
  virtual Result<std::unique_ptr<LinkEnd>> complete(LinkId link, std::span<const std::byte> answer) = 0;
  // Withdraws the offer: a peer that arrives with it is refused. Idempotent.
  virtual void withdraw(LinkId link) = 0;

  // --- Work without a call: peers that connect, deadlines.

  // A descriptor that is readable when serve() has work, valid as long as the connector. -1: serve() never has work.
  virtual int fd() const { return -1; }
  // Does a bounded part of that work.
  virtual void serve() {}
};

// One page of a batch. Its `source` is local memory inside the source registration of the batch, and must stay
// unchanged until the batch completes. The `target_offset` counts from the start of the remote registration.
struct PageWrite {
  const std::byte* source = nullptr;
  uint64_t target_offset = 0;
};

// 1 to Immediate::kMaxMultiplicity pages of one length into one remote registration, counted on one immediate. `pages`
// is only valid during post(): a provider copies what it needs later. A batch with page_bytes 0 writes nothing and
// needs no key and no source. It only raises its immediate by pages.size() (barrier). Every batch has bytes or an
// immediate.
struct WriteBatch {
  WorkId work = 0;
  const Registration* source = nullptr;  // holds all pages; registered by this domain
  uint64_t rkey = 0;                     // Registration::key at the peer's domain
  uint64_t target_base = 0;              // the remote registration's first address in the peer's address space
  uint64_t page_bytes = 0;
  bool counted = false;    // false: a plain write that raises no counter
  uint32_t immediate = 0;  // encoded; its multiplicity is pages.size()
  std::span<const PageWrite> pages;
};

enum class Posted : uint8_t {
  kYes,   // accepted: exactly one completion will follow
  kBusy,  // the queue is full: the batch was not taken. Post again after a completion
};

class Domain {
 public:
  Domain() = default;
  Domain(const Domain&) = delete;
  Domain& operator=(const Domain&) = delete;
  // Called on the driving thread. Either every link has been fenced, or no time was left for it. In the second case no
  // later write of a peer may reach the memory.
  virtual ~Domain() = default;

  CompletionQueue& completions() noexcept { return completions_; }

  // --- Objects that the connector has made.

  // Registers `region` with the domain. Connected peers may write to it once published() is true.
  virtual void publish(Registration& region) = 0;
  virtual bool published(const Registration&) const { return true; }
  // Revokes the key: a write with it that has not begun to land fails at its sender. Returns false if a write may still
  // be landing or a peer still maps the memory. The transfer engine then calls again until its caller's deadline. After
  // true, the domain no longer refers to the registration. The transfer engine ensures that no write reads from it
  // meanwhile.
  virtual bool withdraw(Registration& region) = 0;

  // Hands the link over to this domain. Failures are reported as kLinkDown.
  virtual void attach(LinkId link, std::unique_ptr<LinkEnd> end) = 0;
  // Ends the link on this side: nothing is posted on it any more. Returns true once
  //  - no write of that peer can land in local memory over this link any more (connection closed, peer past its gate, or
  //    the peer's process gone),
  //  - every page that landed over it has been put into completions(): the pages to repeat over another link are
  //    computed from these counts,
  //  - everything posted on it has completed, with kPeerDown if it had not completed before.
  // False: call again. Before the connection ends, the peer gets an acknowledgement of what has landed or was taken, as
  // far as that needs no wait for the peer. Idempotent. Returns true for an unknown link.
  virtual bool fence(LinkId link) = 0;

  // --- Data path.

  // Posts a batch. An impossible batch (unknown link, or a bad key that the sender can detect) is accepted and
  // completed with an error, so failures are reported in one way only.
  virtual Posted post(LinkId link, const WriteBatch& batch) = 0;

  // Sends a message of 1 to kMaxMessageBytes bytes, copied before the call returns. Messages overtake writes that have
  // not begun to leave. kBusy only if kMessageSlots messages are untaken, or while the transport is not up or has no
  // room.
  virtual Posted send(LinkId link, WorkId work, std::span<const std::byte> message) = 0;
  // Called when the transfer engine has taken the peer's message in this slot. The domain informs the sender, which may
  // reuse the slot.
  virtual void take(LinkId link, uint32_t slot) = 0;

  // Makes progress for about 100 us at most, so that other domains on this thread do not starve. Returns true if
  // anything happened.
  virtual bool poll() = 0;

  // A descriptor that is readable whenever poll() would make progress, valid as long as the domain. A task of the
  // ControlQueue wakes the thread by itself.
  virtual int fd() const = 0;

  // Called before the thread sleeps on fd(). Requests a wake-up, or returns false if poll() has work already.
  virtual bool prepare_sleep() = 0;

 protected:
  // Fails a batch or message on an unknown link.
  Posted refuse(WorkId work, Error error) {
    completions_.failed(work, std::move(error));
    return Posted::kYes;
  }

  CompletionQueue completions_;
};

struct OpenedDomain {
  std::unique_ptr<Connector> connector;
  std::unique_ptr<Domain> domain;  // destroyed before the connector
};

// Opens a domain of the provider that `config` names. `control` must outlive the domain. Blocks. Returns kRefused or
// kSystem with the reason if the provider is unusable on this machine. Returns kInvalidArgument for an unknown
// provider; the message lists the known ones. Defined in providers/factory.cc, which lies above all callers: only the
// linker connects them.
Result<OpenedDomain> open_domain(const DomainConfig& config, ControlQueue& control);
using DomainFactory = std::function<Result<OpenedDomain>(const DomainConfig& config, ControlQueue& control)>;

// Loads the libraries that these providers load once per process, if loading writes to the environment (libfabric finds
// its plug-ins by a variable only). No other thread may call getenv() meanwhile. So the thread that creates a transfer
// engine calls this before the engine starts its threads, and the Python binding holds the GIL, which also guards
// os.environ. Later calls do nothing. Blocks for milliseconds. A missing library is no failure here: open_domain()
// gives the reason. Defined in providers/factory.cc.
void load_libraries(std::span<const DomainConfig> configs);

}  // namespace kvc
