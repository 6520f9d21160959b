// BounceDomain: another lane, for memory that it cannot reach: GPU memory over tcp, or over a NIC that has no way to it.
//
// A batch's pages are gathered in a slot of page-locked host memory here, written into a slot of the peer's over the
// lane below, and scattered from there: two copies and a round trip more than a lane that reaches the memory itself. So
// nothing chooses it silently: it is a provider of its own, and its name is in every log line and metric.
//
//   sender    queue -> [gather: GPU or CPU] -> pool slot -> [lane below] -> a slot of the link, at the receiver
//   receiver  announced by an immediate -> [scatter: GPU or CPU] -> counted -> note "emptied" -> sender completes
//
// Either side's memory may be a GPU's or the host's, independently. A domain serves one GPU: that of the first such
// memory registered with it. Slots are the credit: a link has kSlots of them at the receiver, a domain kPoolSlots.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "cuda/copier.h"
#include "engine/domain.h"
#include "providers/bounce/link.h"
#include "providers/bounce/slot_memory.h"
#include "providers/bounce/wire.h"

namespace kvc::bounce {

// Slots in which batches are gathered, of all links together: two links at full speed.
inline constexpr uint32_t kPoolSlots = 2 * kSlots;

class BounceDomain final : public Domain, private DomainSink {
 public:
  static Result<std::unique_ptr<BounceDomain>> open(const DomainConfig& config, DomainSink& sink);
  BounceDomain(const BounceDomain&) = delete;
  BounceDomain& operator=(const BounceDomain&) = delete;
  // Waits for the copies that the GPU has.
  ~BounceDomain() override;

  std::string description() const override;
  uint64_t bits_per_second() const override { return below_->bits_per_second(); }
  DomainLimits limits() const override { return {.batch_bytes = kSlotBytes, .window_bytes = kSlots * kSlotBytes}; }
  Result<uint64_t> register_region(std::byte* base, uint64_t bytes, int memfd, uint64_t memfd_offset) override;
  bool deregister_region(uint64_t rkey) override;
  Result<Bytes> offer(LinkId link) override;
  Result<Bytes> accept(LinkId link, std::span<const std::byte> offer) override;
  Status complete(LinkId link, std::span<const std::byte> answer) override;
  bool fence(LinkId link) override;
  Posted post(LinkId link, const WriteBatch& batch) override;
  Posted send(LinkId link, WorkId work, std::span<const std::byte> message) override;
  bool poll() override;
  int fd() const override { return below_->fd(); }
  bool prepare_sleep() override;

 private:
  struct Region {
    std::byte* base = nullptr;
    uint64_t bytes = 0;
    bool gpu = false;
    bool revoked = false;
    uint32_t landing = 0;  // slots that are being scattered into it
  };
  // What a work of the lane below is.
  struct Work {
    enum class Kind : uint8_t { kSlot, kNote, kMessage };
    Kind kind = Kind::kNote;
    LinkId link = 0;
    uint32_t slot = 0;   // kSlot: the peer's
    WorkId message = 0;  // kMessage: the group's
  };
  // A copy that the GPU has.
  struct Flight {
    uint64_t launch = 0;  // the Copier's; all up to it must have ended
    bool outgoing = false;
    LinkId link = 0;
    uint32_t slot = 0;       // of the peer (outgoing), or of the link's own memory
    uint32_t pool_slot = 0;  // outgoing: where it is gathered
  };

  BounceDomain(const DomainConfig& config, DomainSink& sink) : sink_(sink), copy_blocks_(config.copy_blocks) {}

  // DomainSink: what the lane below reports.
  void on_complete(WorkId work, const Error* error) noexcept override;
  void on_immediate(LinkId link, uint32_t immediate) noexcept override;
  bool on_message(LinkId link, std::span<const std::byte> message) noexcept override;
  void on_link_down(LinkId link, const Error& error, bool fenced) noexcept override;

  Link* find(LinkId link) noexcept;
  Status adopt(int device);
  bool in_gpu(const std::byte* address) const noexcept;

  Result<Link*> make_link(LinkId link, std::string_view operation);
  void abandon(Link& link);
  Bytes greeting(const Link& link, const Bytes& below) const;
  Result<Bytes> greet(Link& link, std::span<const std::byte> bytes, std::string_view operation) const;

  bool serve(Link& link);
  bool may_gather(const Link& link) const noexcept;
  void gather(Link& link);
  bool write_out(Link& link, uint32_t slot);
  void pass(Link& link, uint32_t slot);
  void end_batch(Link& link, uint64_t key);
  void scatter(Link& link);
  Outcome judge(const SlotHeader& header);
  void scattered(Link& link, uint32_t slot, Outcome outcome);
  bool tell(Link& link, Note note);

  bool settle();
  bool flying(LinkId link) const noexcept;
  void check_health();
  void close(Link& link, const Error& error);
  void end_all(Link& link);
  void break_down(Link& link, const Error& error);
  void reap();

  DomainSink& sink_;
  const uint32_t copy_blocks_;
  std::unordered_map<uint64_t, Region> regions_;  // by rkey

  std::unique_ptr<SlotMemory> pool_;
  std::vector<uint32_t> pool_free_;
  // A map: a sink may open links while poll() walks over it. Entries only go in reap().
  std::map<LinkId, std::unique_ptr<Link>> links_;
  std::vector<std::unique_ptr<Link>> ended_;  // fenced; their memory is still known to the lane below
  LinkId last_served_ = 0;

  std::unordered_map<WorkId, Work> works_;
  uint64_t next_id_ = 1;
  std::shared_ptr<cuda::Context> context_;  // null until GPU memory is registered
  std::unique_ptr<cuda::Copier> copier_;    // after the slots: its end waits for copies from and into them
  std::deque<Flight> flights_;
  std::optional<Error> dead_;  // the GPU's error, after which nothing of this process runs there
  uint32_t turns_ = 0;
  std::unique_ptr<Domain> below_;  // last: it reports to what is above
};

}  // namespace kvc::bounce
