// What every provider implements: one NIC, or one stand-in for a NIC, in two halves.
//
//   Connector   may block. register_memory(), and a Registration's end, run on the engine's memory thread; all else runs
//               on its control thread, at the same time. No lock of the two is held where memory is registered.
//   Domain      posts and polls. Nothing in it blocks, and every method runs on the one thread that drives it: it needs
//               no lock of its own. What happened it puts into its completions(), never calling anybody.
//
// What the connector makes (a Registration, a LinkEnd) is finished when it is handed over to the domain. A LinkEnd comes
// back through the ControlQueue when the domain is done with it, to be ended where ending it may block.
//
// Contract (docs/architecture.md, "the contract of the data plane"): reliable, unordered; a batch of n pages with
// an immediate raises the receiver's counter by exactly n, after those pages are visible there; a completion means
// that the source bytes may be overwritten AND that the bytes are in the peer's memory or never will be. What fails with
// its link is written again over another one, unless its receiver may have used some of it since (Rewriter): so what a
// domain has counted up to its fence must be all that landed and was counted.
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

// The longest message that send() takes: one packet at RoCE's largest path MTU, and a page of memory.
inline constexpr size_t kMaxMessageBytes = 4096;
// Messages on one link, in one direction, that the receiving engine has not taken: every domain has room for so many, and
// keeps no more. 64 KiB are what a peer that does not read can make us hold, and what a flood can make us hold.
inline constexpr uint32_t kMessageSlots = 16;

// How a domain is opened. Fields that a provider does not use are ignored by it.
struct DomainConfig {
  std::string provider;               // "sim", "host", "tcp"
  std::string device;                 // which NIC or GPU, as the provider names them; empty: the provider's choice
  std::string address = "127.0.0.1";  // tcp: the one local address to listen on (the port is the kernel's choice)
  uint32_t connections = 2;           // tcp: connections to each peer
  std::string fabric = "default";     // sim: domains meet in the fabric of this name in this process
  uint64_t seed = 1;                  // sim: decides every delay and reorder
  uint32_t max_delay_us = 50;         // sim: each page is delivered after 0..max_delay_us
  uint32_t copy_blocks = 16;          // nvlink, bounce: how many of the GPU's SMs a copy may occupy
};

// Of a lane that is carried by another one, which its device names as PROVIDER[:DEVICE]: that one's. Not named: tcp.
DomainConfig carrier_of(const DomainConfig& config);

// How much a domain wants to be given at a time.
struct DomainLimits {
  // Bytes of one batch, but one page at least: a link is then busy with one batch for 20 us at 50 GB/s and 250 us at
  // 4 GB/s, which bounds how long a small write waits behind one. Reached at pages above 16 KiB; below that the
  // multiplicity (64 pages) ends a batch.
  uint64_t batch_bytes = 1 << 20;
  // Bytes posted on one link and not completed, but one batch at least. 50 GB/s (a 400G NIC) x 20 us of round trip is
  // 1 MB: eight times that keeps any NIC busy. It is also what a small write can find ahead of it on the link.
  uint64_t window_bytes = 8 << 20;
  // The longest page.
  uint64_t page_bytes = uint64_t{1} << 40;
};

// Memory of this process: [base, base+bytes), of the host or of a GPU. `memfd` is the memfd that backs it from
// `memfd_offset` on, or -1.
struct MemoryRange {
  std::byte* base = nullptr;
  uint64_t bytes = 0;
  int memfd = -1;
  uint64_t memfd_offset = 0;
};

// Memory that one domain has registered. Made and destroyed on the memory thread; in between it is the domain's from
// publish() until withdraw() says true. Each provider has its own kind.
class Registration {
 public:
  Registration(const MemoryRange& range, uint64_t remote_key) : base(range.base), bytes(range.bytes), key(remote_key) {}
  Registration(const Registration&) = delete;
  Registration& operator=(const Registration&) = delete;
  virtual ~Registration() = default;

  std::byte* const base;
  const uint64_t bytes;
  const uint64_t key;  // what peers write by: hard to guess (random 64 bits), differs between registrations

  bool contains(uint64_t offset, uint64_t length) const noexcept { return fits(offset, length, bytes); }

  // The domain's (region_table.h):
  uint32_t landing = 0;  // writes of peers that have begun to land here and have not ended
  bool revoked = false;
};

// This process's end of one link. Made by a connector, then its domain's; destroyed on the control thread.
class LinkEnd {
 public:
  virtual ~LinkEnd() = default;
};

class Connector {
 public:
  Connector() = default;
  Connector(const Connector&) = delete;
  Connector& operator=(const Connector&) = delete;
  // After its domain's end, and after the end of all that it has made.
  virtual ~Connector() = default;

  // --- What it is: asked by the worker that opens the engine, before the control thread has the connector.

  // "tcp 10.0.0.3:41233", "host pid 4711", "sim default/3": what logs call this lane's local end.
  virtual std::string description() const = 0;
  // What the device can carry, in bits a second; 0: unknown. Pages are spread over domains in this proportion.
  virtual uint64_t bits_per_second() const { return 0; }
  // The same for all domains of a lane, and always the same.
  virtual DomainLimits limits() const { return {}; }

  // --- Memory

  // Registers the memory, which must outlive the registration. kNotReachable: this lane does not reach memory of this kind,
  // which is no failure where another one does. A lane over another one has its slots registered on the control thread.
  virtual Result<std::unique_ptr<Registration>> register_memory(const MemoryRange& range) = 0;

  // --- Links. Both ends of a link can write. Three steps, whose bytes travel over the authenticated control plane:
  //     A.offer(link) -> bytes -> B.accept(link, offer) -> answer -> A.complete(link, answer).
  //     What accept() and complete() return goes to the domain at once (attach()). Neither end may rely on connectivity
  //     before: B may post after accept() returned, A after complete() did; a domain queues (or answers kBusy) until its
  //     transport is up. Bytes are untrusted: check every length.

  struct Accepted {
    Bytes answer;
    std::unique_ptr<LinkEnd> end;
  };

  virtual Result<Bytes> offer(LinkId link) = 0;
  // kNotReachable: this provider cannot lead to that peer (other machine, other process): not a failure.
  virtual Result<Accepted> accept(LinkId link, std::span<const std::byte> offer) = 0;
  // Uses the offer up, also where it fails. kNotReachable: as in accept(), where only this side finds it out: the caller
  // may offer again without this provider.
  virtual Result<std::unique_ptr<LinkEnd>> complete(LinkId link, std::span<const std::byte> answer) = 0;
  // The offer is void: who comes with it is turned away. Idempotent.
  virtual void withdraw(LinkId link) = 0;

  // --- What comes to a connector by itself: peers that dial, deadlines.

  // A descriptor that is readable when serve() has something to do, valid as long as the connector; -1: never.
  virtual int fd() const { return -1; }
  // Does it, bounded.
  virtual void serve() {}
};

// One page of a batch. `source` is local memory inside the batch's source and must stay unchanged until the batch's
// completion. `target_offset` counts from the start of the remote registration.
struct PageWrite {
  const std::byte* source = nullptr;
  uint64_t target_offset = 0;
};

// 1 to Immediate::kMaxMultiplicity pages of one length into one remote registration, counted on one immediate.
// `pages` is only valid during post(): a provider copies what it needs later. A page_bytes of 0 writes nothing and
// needs no key and no source: such a batch is an immediate alone, raised by pages.size() (barrier). One that has neither
// bytes nor an immediate does not occur.
struct WriteBatch {
  WorkId work = 0;
  const Registration* source = nullptr;  // holds all pages; this domain's own
  uint64_t rkey = 0;                     // Registration::key of the peer's domain
  uint64_t target_base = 0;              // the remote registration's first address in the peer's address space
  uint64_t page_bytes = 0;
  bool counted = false;    // false: a plain write that raises nothing
  uint32_t immediate = 0;  // encoded; its multiplicity is pages.size()
  std::span<const PageWrite> pages;
};

enum class Posted : uint8_t {
  kYes,   // accepted: exactly one completion will follow
  kBusy,  // the queue is full: nothing was taken, post again after a completion
};

class Domain {
 public:
  Domain() = default;
  Domain(const Domain&) = delete;
  Domain& operator=(const Domain&) = delete;
  // On the driving thread. Every link has been fenced, or there was no time to: then what a peer may still write must
  // find no way in any more.
  virtual ~Domain() = default;

  CompletionQueue& completions() noexcept { return completions_; }

  // --- What the connector has made.

  // Connected peers may write there, once it is published().
  virtual void publish(Registration& region) = 0;
  virtual bool published(const Registration&) const { return true; }
  // Revokes the key: a write with it that has not begun to land fails at its sender. False if a write may still be
  // landing, or a peer still has to let go of the memory: call again (the engine does, until its caller's deadline).
  // Once true the domain knows the registration no more. Nothing reads from it meanwhile: the engine sees to that.
  virtual bool withdraw(Registration& region) = 0;

  // The link is this domain's from now on. What goes wrong here comes as kLinkDown.
  virtual void attach(LinkId link, std::unique_ptr<LinkEnd> end) = 0;
  // Ends the link on this side: nothing is posted on it any more. True once
  //  - no write of that peer can land in local memory over this link any more (connection closed, peer past its gate, or
  //    peer's process gone),
  //  - all that landed over it has been put into completions(): what goes over another link after a failure is computed
  //    from these counts,
  //  - all that was posted on it has completed, with kPeerDown where it did not complete before.
  // False: call again. What has landed or was taken is acknowledged to the peer before the connection ends, as far as that
  // goes without waiting for the peer. Idempotent, and true for a link that is not there.
  virtual bool fence(LinkId link) = 0;

  // --- Data path.

  // Posts a batch. An impossible one (unknown link, bad key where the sender can tell) is accepted and completed with an
  // error: there is one way to learn of failure.
  virtual Posted post(LinkId link, const WriteBatch& batch) = 0;

  // Sends a message of 1 to kMaxMessageBytes bytes, copied before this returns. Messages overtake writes that have not
  // begun to leave. kBusy only where kMessageSlots are untaken, or the transport is not up or has no room right now.
  virtual Posted send(LinkId link, WorkId work, std::span<const std::byte> message) = 0;
  // The engine has the peer's message of this slot: its sender is told, and may use the slot again.
  virtual void take(LinkId link, uint32_t slot) = 0;

  // Makes progress, bounded (about 100 us at most, so that neighbours on this thread do not starve); true if
  // anything happened.
  virtual bool poll() = 0;

  // A descriptor that is readable whenever poll() would make progress, valid as long as the domain. What a ControlQueue's
  // task changes wakes the thread by itself.
  virtual int fd() const = 0;

  // The thread is about to sleep on fd(): ask for a wake-up. Returns false if poll() has work already.
  virtual bool prepare_sleep() = 0;

 protected:
  // Of a batch or message on a link that is not there.
  Posted refuse(WorkId work, Error error) {
    completions_.failed(work, std::move(error));
    return Posted::kYes;
  }

  CompletionQueue completions_;
};

struct OpenedDomain {
  std::unique_ptr<Connector> connector;
  std::unique_ptr<Domain> domain;  // ends first
};

// Opens a domain of the provider that `config` names; `control` outlives it. Blocks. kRefused or kSystem with the reason
// where it is not usable on this machine; kInvalidArgument for an unknown provider (the message lists the known ones).
// Defined in providers/factory.cc, above all rooms that call it: only the linker connects them.
Result<OpenedDomain> open_domain(const DomainConfig& config, ControlQueue& control);
using DomainFactory = std::function<Result<OpenedDomain>(const DomainConfig& config, ControlQueue& control)>;

// Loads the libraries that these domains' providers load once in a process, where loading writes the environment
// (libfabric's plug-ins are found by a variable alone). getenv() of another thread must not run meanwhile. So this is called
// on the thread that creates an engine, before the engine has a thread, and the Python binding holds the GIL: os.environ is
// written and copied with it, too. Later calls do nothing. Blocks for milliseconds. A library that is missing is no failure
// here: open_domain() gives the reason. Defined in providers/factory.cc.
void load_libraries(std::span<const DomainConfig> configs);

}  // namespace kvc
