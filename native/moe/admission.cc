// The admission of a new rank, and the epochs that it begins with.
#include <fcntl.h>

#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <utility>

#include "moe/group.h"
#include "moe/group_memory.h"

namespace kvc::moe {

namespace {

constexpr std::string_view kAdmit = "moe_admit";

// Stores a word that kernels use while no kernel runs. `context` null: host memory.
Status store(const std::shared_ptr<cuda::Context>& context, unsigned char* word, uint32_t value) {
  if (!context) {
    std::atomic_ref(*reinterpret_cast<uint32_t*>(word)).store(value);
    return {};
  }
  const int result =
      context->driver().cuMemcpyHtoD_v2(reinterpret_cast<cuda::DevicePointer>(word), &value, sizeof(value));
  return result == cuda::kSuccess ? Status{} : cuda::cuda_error("moe_group", "cuMemcpyHtoD", result);
}

Result<uint32_t> load(const std::shared_ptr<cuda::Context>& context, unsigned char* word) {
  uint32_t value = 0;
  if (!context) return std::atomic_ref(*reinterpret_cast<uint32_t*>(word)).load();
  const int result =
      context->driver().cuMemcpyDtoH_v2(&value, reinterpret_cast<cuda::DevicePointer>(word), sizeof(value));
  if (result != cuda::kSuccess) return cuda::cuda_error("moe_group", "cuMemcpyDtoH", result);
  return value;
}

// Copies from pageable memory may return before they have ended.
Status finish(const std::shared_ptr<cuda::Context>& context) {
  if (!context) return {};
  const int result = context->driver().cuCtxSynchronize();
  return result == cuda::kSuccess ? Status{} : cuda::cuda_error("moe_group", "cuCtxSynchronize", result);
}

}  // namespace

unsigned char* Group::Memory::control(const GroupConfig& config, uint32_t slot) const noexcept {
  return reinterpret_cast<unsigned char*>(local) + slot * local_of(config).slot_bytes;
}

// Sets the flags of all ranks and the own counters, as if all earlier epochs had ended.
Status Group::begin_epochs(Memory& memory, const GroupConfig& config, std::span<const uint32_t> epochs) {
  unsigned char* const base = memory.segments[config.rank]->base();
  for (uint32_t slot = 0; slot < config.slots; ++slot) {
    if (epochs[slot] == 0) continue;  // as created
    std::vector<unsigned char*> words = {memory.control(config, slot) + offsetof(Control, epoch)};
    for (uint32_t rank = 0; rank < config.ranks; ++rank) {
      words.push_back(base + Layout::arrived(slot) + uint64_t{rank} * kFlagBytes);
      words.push_back(base + Layout::ready(slot) + uint64_t{rank} * kFlagBytes);
    }
    for (unsigned char* word : words) {
      if (Status status = store(memory.context, word, epochs[slot]); !status) return status;
    }
  }
  return finish(memory.context);
}

Result<std::vector<uint32_t>> Group::epochs() const {
  const Use use(*this);
  if (use.memory() == nullptr) return closed("moe_epochs");
  const Memory& memory = *use.memory();
  std::optional<cuda::Context::Scope> scope;
  if (memory.context) scope.emplace(*memory.context);
  std::vector<uint32_t> epochs;
  for (uint32_t slot = 0; slot < config_.slots; ++slot) {
    const Result<uint32_t> epoch = load(memory.context, memory.control(config_, slot) + offsetof(Control, epoch));
    if (!epoch) return epoch.error();
    epochs.push_back(epoch.value());
  }
  return epochs;
}

Status Group::begin(std::span<const uint32_t> epochs) {
  const Use use(*this);
  if (use.memory() == nullptr) return closed("moe_begin");
  if (!use.alone()) return invalid("moe_begin", "another call of this group is running: wait for its end");
  if (epochs.size() != config_.slots) {
    return invalid("moe_begin",
                   std::to_string(epochs.size()) + " epochs for " + std::to_string(config_.slots) + " slots");
  }
  Memory& memory = *use.memory();
  std::optional<cuda::Context::Scope> scope;
  if (memory.context) scope.emplace(*memory.context);
  return begin_epochs(memory, config_, epochs);
}

// Returns why the rank cannot be admitted, or "".
std::string Group::refusal(Memory& memory, uint32_t rank) const {
  if (!config_.survive) return "the group does not survive the end of a rank";
  const std::string name = "rank " + std::to_string(rank);
  if (rank >= config_.ranks || rank == config_.rank || !memory.segments[rank]) return name + " is no other rank";
  HostWords& words = *memory.words();
  if (std::atomic_ref(words.fault).load() != 0 || std::atomic_ref(words.lost).load() != 0) {
    return "the group has ended";
  }
  if (std::atomic_ref(words.masked[rank]).load() == 0) return "no launch went on without " + name;
  if ((std::atomic_ref(words.fenced).load() >> rank & 1U) == 0) return "the process of " + name + " has not ended";
  return {};
}

Status Group::prepare_admission(uint32_t rank, int descriptor) {
  const Use use(*this);
  if (use.memory() == nullptr) return closed(kAdmit);
  Memory& memory = *use.memory();
  if (!use.alone()) return invalid(std::string(kAdmit), "another call of this group is running: wait for its end");
  if (std::string reason = refusal(memory, rank); !reason.empty()) {
    return invalid(std::string(kAdmit), std::move(reason));
  }
  UniqueFd own(fcntl(descriptor, F_DUPFD_CLOEXEC, 0));
  if (!own) return system_error({}, kAdmit, errno);
  Result<std::unique_ptr<Segment>> segment = Segment::map(memory.context, descriptor, segment_bytes());
  if (!segment) return segment.error();
  std::optional<cuda::Context::Scope> scope;
  if (memory.context) scope.emplace(*memory.context);
  const Result<std::vector<uint32_t>> epochs = this->epochs();
  if (!epochs) return epochs.error();
  // What the old process left here, and the bits of launches. The words of the host still mask the rank: each dispatch
  // takes the bits from them again. So launches notice none of this if the admission fails.
  unsigned char* const base = memory.segments[config_.rank]->base() + uint64_t{rank} * kFlagBytes;
  if (Status status = store(memory.context, base + Layout::evicted(), 0); !status) return status;
  for (uint32_t slot = 0; slot < config_.slots; ++slot) {
    unsigned char* const masked = memory.control(config_, slot) + offsetof(Control, masked);
    const Result<uint32_t> bits = load(memory.context, masked);
    if (!bits) return bits.error();
    for (const auto& [word, value] : {std::pair{masked, bits.value() & ~(1U << rank)},
                                      {base + Layout::waiting(slot), 0U},
                                      {base + Layout::arrived(slot), epochs.value()[slot]},
                                      {base + Layout::ready(slot), epochs.value()[slot]}}) {
      if (Status status = store(memory.context, word, value); !status) return status;
    }
  }
  if (Status status = finish(memory.context); !status) return status;
  memory.newcomer = {rank, std::move(segment.value()), std::move(own)};
  return {};
}

void Group::cancel_admission() {
  const Use use(*this);
  if (use.memory() != nullptr) use.memory()->newcomer = {};
}

Result<bool> Group::admit() {
  const Use use(*this);
  if (use.memory() == nullptr) return closed(kAdmit);
  Memory& memory = *use.memory();
  if (!use.alone()) return invalid(std::string(kAdmit), "another call of this group is running: wait for its end");
  if (!memory.newcomer.segment) return invalid(std::string(kAdmit), "no rank is prepared for admission");
  Memory::Newcomer newcomer = std::exchange(memory.newcomer, {});
  std::unique_ptr<Segment>& segment = memory.segments[newcomer.rank];
  const bool same = segment->replace(newcomer.descriptor.get()).ok();
  if (!same) segment = std::move(newcomer.segment);
  HostWords& words = *memory.words();
  const uint32_t others = ~(1U << newcomer.rank);
  std::atomic_ref(words.dead).fetch_and(others);
  std::atomic_ref(words.left).fetch_and(others);
  std::atomic_ref(words.fenced).fetch_and(others);
  std::atomic_ref(words.masked[newcomer.rank]).store(0);
  return same;
}

}  // namespace kvc::moe
