// Domain: one NIC (or one stand-in for a NIC) opened by one provider. What every provider implements.
//
// Thread: every method runs on the worker thread of the DomainGroup that owns the domain, so a provider needs no
// lock of its own. Nothing here blocks: a method that has to wait says so and is called again.
//
// Contract (docs/architecture.md, "the contract of the data plane"): reliable, unordered; a batch of n pages with
// an immediate raises the receiver's counter by exactly n, after those pages are visible there; a completion means
// that the source bytes may be overwritten AND that the bytes are in the peer's memory or never will be.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/error.h"

namespace kvc {

using Bytes = std::vector<std::byte>;
using LinkId = uint32_t;  // chosen by the DomainGroup, unique in the process, never reused
using WorkId = uint64_t;  // chosen by the DomainGroup: our own id of a posted batch, returned in its completion

// The longest message that send() takes: one packet at RoCE's largest path MTU, and a page of memory.
inline constexpr size_t kMaxMessageBytes = 4096;

// How a domain is opened. Fields that a provider does not use are ignored by it.
struct DomainConfig {
  std::string provider;               // "sim", "host", "tcp"
  std::string device;                 // which NIC or GPU, as the provider names them; empty: the provider's choice
  std::string address = "127.0.0.1";  // tcp: the one local address to listen on (the port is the kernel's choice)
  uint32_t connections = 2;           // tcp: connections to each peer
  std::string fabric = "default";     // sim: domains meet in the fabric of this name in this process
  uint64_t seed = 1;                  // sim: decides every delay and reorder
  uint32_t max_delay_us = 50;         // sim: each page is delivered after 0..max_delay_us
  uint32_t copy_blocks = 16;          // nvlink: how many of the GPU's SMs a copy may occupy
};

// One page of a batch. `source` is local memory inside a registered region and must stay unchanged until the
// batch's completion. `target_offset` counts from the start of the remote region.
struct PageWrite {
  const std::byte* source = nullptr;
  uint64_t target_offset = 0;
};

// Up to Immediate::kMaxMultiplicity pages of one length into one remote region, counted on one immediate.
// `pages` is only valid during post(): a provider copies what it needs later. A page_bytes of 0 writes nothing and
// needs no rkey: a counted batch of that kind is an immediate alone, raised by pages.size() (barrier).
struct WriteBatch {
  WorkId work = 0;
  uint64_t rkey = 0;         // the key that the peer's register_region() returned for this domain
  uint64_t target_base = 0;  // the remote region's first address in the peer's address space
  uint64_t page_bytes = 0;
  bool counted = false;    // false: a plain write that raises nothing
  uint32_t immediate = 0;  // encoded; its multiplicity is pages.size()
  std::span<const PageWrite> pages;
};

// How much a domain wants to be given at a time.
struct DomainLimits {
  // Bytes of one batch, but one page at least: a link is then busy with one batch for 20 us at 50 GB/s and 250 us at
  // 4 GB/s, which bounds how long a small write waits behind one. Reached at pages above 16 KiB; below that the
  // multiplicity (64 pages) ends a batch.
  uint64_t batch_bytes = 1 << 20;
  // Bytes posted on one link and not completed, but one batch at least. 50 GB/s (a 400G NIC) x 20 us of round trip is
  // 1 MB: eight times that keeps any NIC busy. It is also what a small write can find ahead of it on the link.
  uint64_t window_bytes = 8 << 20;
};

enum class Posted : uint8_t {
  kYes,   // accepted: exactly one completion will follow
  kBusy,  // the queue is full: nothing was taken, post again after a completion
};

// What a domain tells its group. Called from within post(), poll() and fence(), on the worker thread.
class DomainSink {
 public:
  virtual ~DomainSink() = default;

  // A posted batch ended. `error` null: every page is in place at the peer. Otherwise some pages may be in place,
  // and the count at the peer may be anything from none to all of them.
  // A domain reports each accepted batch exactly once, also when its link breaks or is fenced.
  virtual void on_complete(WorkId work, const Error* error) noexcept = 0;

  // `immediate` (with its multiplicity) landed in local memory: its pages are visible now. `link` is the one it came
  // over, 0 where the provider cannot tell (a broken link's unfinished work can then not go over another one).
  virtual void on_immediate(LinkId link, uint32_t immediate) noexcept = 0;

  // A peer's send() arrived; `message` is valid during the call. False: no room for it now; the domain keeps it, and
  // offers it again at a later poll(). Messages come in no particular order, and each one once.
  virtual bool on_message(LinkId link, std::span<const std::byte> message) noexcept = 0;

  // The link broke: its batches were all completed with errors before this call, and nothing of the peer can land
  // over it any more once `fenced` is true (false: call fence()).
  virtual void on_link_down(LinkId link, const Error& error, bool fenced) noexcept = 0;
};

class Domain {
 public:
  virtual ~Domain() = default;

  // "tcp 10.0.0.3:41233", "host pid 4711", "sim default/3": what logs call this lane's local end.
  virtual std::string description() const = 0;

  // What the device can carry, in bits a second; 0: unknown. Pages are spread over domains in this proportion.
  virtual uint64_t bits_per_second() const = 0;

  // The same for all domains of a lane.
  virtual DomainLimits limits() const { return {}; }

  // --- Memory. Keys are hard to guess (random 64 bits) and differ between regions.

  // Makes [base, base+bytes) writable by connected peers; returns the key. `memfd` is the file descriptor of the
  // memfd that backs the range from `memfd_offset` on, or -1; the domain dups what it keeps.
  // The memory stays the caller's and must live until deregister_region().
  virtual Result<uint64_t> register_region(std::byte* base, uint64_t bytes, int memfd, uint64_t memfd_offset) = 0;

  // Revokes the key: a write with it that has not begun to land fails at its sender. Returns false if a write may
  // still be landing: call again (the group does, until its deadline).
  virtual bool deregister_region(uint64_t rkey) = 0;

  // --- Links. Both ends of a link can write. Three steps, whose bytes travel over the authenticated control plane:
  //     A.offer(link) -> bytes -> B.accept(link, offer) -> answer -> A.complete(link, answer).
  //     Neither end may rely on connectivity before: B may post after accept() returned, A after complete() did;
  //     a domain queues (or answers kBusy) until its transport is up. Bytes are untrusted: check every length.

  virtual Result<Bytes> offer(LinkId link) = 0;
  // kNotReachable: this provider cannot lead to that peer (other machine, other process): not a failure.
  virtual Result<Bytes> accept(LinkId link, std::span<const std::byte> offer) = 0;
  virtual Status complete(LinkId link, std::span<const std::byte> answer) = 0;

  // Ends the link on this side; its posted batches complete with kPeerDown before the first call returns, and its
  // secret is void. Returns true once no write of that peer can land in local memory over this link any more
  // (connection closed, peer past its gate, or peer's process gone), false: call again. Idempotent.
  // Before it returns true, and before on_link_down(fenced), every immediate whose batch completed without error at
  // its sender was reported by on_immediate(): drain the completion queue first. What goes over another link after a
  // failure is computed from these counts.
  virtual bool fence(LinkId link) = 0;

  // --- Data path.

  // Posts a batch; never blocks. An impossible batch (unknown link, bad key where the sender can tell) is accepted
  // and completed with an error: there is one way to learn of failure.
  virtual Posted post(LinkId link, const WriteBatch& batch) = 0;

  // Sends a message of 1 to kMaxMessageBytes bytes, copied before this returns; never blocks. One completion
  // (on_complete) follows kYes: the message is in the peer's hands or never will be. Reaches the peer's on_message().
  virtual Posted send(LinkId link, WorkId work, std::span<const std::byte> message) = 0;

  // Makes progress, bounded (about 100 us at most, so that neighbours on this worker do not starve); true if
  // anything happened.
  virtual bool poll() = 0;

  // A descriptor that is readable whenever poll() would make progress, valid as long as the domain.
  virtual int fd() const = 0;

  // The worker is about to sleep on fd(): ask for a wake-up. Returns false if poll() has work already.
  virtual bool prepare_sleep() = 0;
};

// Opens a domain of the provider that `config` names. kRefused or kSystem with the reason where it is not usable on
// this machine; kInvalidArgument for an unknown provider (the message lists the known ones).
Result<std::unique_ptr<Domain>> open_domain(const DomainConfig& config, DomainSink& sink);
using DomainFactory = std::function<Result<std::unique_ptr<Domain>>(const DomainConfig& config, DomainSink& sink)>;

// The providers compiled into this library, fastest first.
std::span<const std::string_view> provider_names() noexcept;

}  // namespace kvc
