#include "moe/group.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstring>
#include <string_view>
#include <thread>

#include "moe/cpu_exchange.h"
#include "moe/far_ranks.h"
#include "moe/group_memory.h"

namespace kvc::moe {

namespace {

constexpr int kSerialization = 6;  // CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
constexpr uint64_t kLastClose = 2'000'000'000;
constexpr uint32_t kThreadsPerProcessor = 1024;
constexpr uint32_t kCombineThreads = 64;  // two warps: one fences while the second loads

uint32_t round_to_warps(uint32_t threads) { return std::clamp((threads + 31) / 32 * 32, 32U, kMaxThreads); }

// Waits on a separate thread, because cuCtxSynchronize() has no timeout. After the timeout, that thread ends with the
// GPU's work, or never.
Status synchronize(const std::shared_ptr<cuda::Context>& context, uint64_t timeout_ns) {
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    bool done = false;
    int result = 0;
  };
  const auto state = std::make_shared<State>();
  try {
    std::thread([state, context] {
      const cuda::Context::Scope scope(*context);
      const int result = context->driver().cuCtxSynchronize();
      const std::lock_guard lock(state->mutex);
      state->done = true;
      state->result = result;
      state->changed.notify_all();
    }).detach();
  } catch (const std::system_error& error) {
    return Error{ErrorCode::kResources, "cuda", {}, "moe_close", error.what()};
  }
  std::unique_lock lock(state->mutex);
  const std::chrono::nanoseconds timeout(std::min(timeout_ns, kLongestNs));
  if (!state->changed.wait_for(lock, timeout, [&] { return state->done; })) {
    return Error{ErrorCode::kTimeout,
                 "cuda",
                 {},
                 "moe_close",
                 "the GPU did not finish its work in time: its memory is not freed"};
  }
  if (state->result != cuda::kSuccess) return cuda::cuda_error("moe_close", "cuCtxSynchronize", state->result);
  return {};
}

}  // namespace

Result<std::unique_ptr<Group>> Group::create(const GroupConfig& config) {
  if (Status status = check(config); !status) return status.error();
  auto memory = std::make_unique<Memory>();
  if (config.device >= 0) {
    Result<std::shared_ptr<cuda::Context>> context = cuda::Context::retain(config.device);
    if (!context) return context.error();
    memory->context = context.value();
  }
  const Layout layout{config.dispatch_bytes, config.combine_bytes};
  Result<std::unique_ptr<Segment>> segment = Segment::create(memory->context, layout.bytes(config.slots));
  if (!segment) return segment.error();
  memory->segments[config.rank] = std::move(segment.value());
  const Local local = local_of(config);
  std::array<uint32_t, kMaxSlots> first{};
  first.fill(config.first_epoch);
  if (!memory->context) {
    memory->local_on_host.resize(local.bytes / sizeof(uint64_t) + 1);
    memory->local = reinterpret_cast<cuda::DevicePointer>(memory->local_on_host.data());
    if (Status status = begin_epochs(*memory, config, first); !status) return status.error();
    return std::unique_ptr<Group>(new Group(config, std::move(memory)));
  }
  const cuda::Driver& driver = memory->context->driver();
  const cuda::Context::Scope scope(*memory->context);
  memory->major = memory->context->attribute(cuda::kAttributeMajor);
  driver.cuDriverGetVersion(&memory->driver_version);
  memory->processors = static_cast<uint32_t>(std::max(1, memory->context->attribute(cuda::kAttributeMultiprocessors)));
  Result<cuda::Module> module = cuda::Module::load(driver);
  if (!module) return module.error();
  Memory::Kernels& kernels = memory->kernels;
  kernels.module = std::move(module.value());
  const std::string ranks = config.ranks <= 2 ? "2" : config.ranks <= 4 ? "4" : "8";
  for (const auto& [kernel, name] : {std::pair{&kernels.dispatch, std::string("kvc_moe_dispatch")},
                                     {&kernels.combine[0], "kvc_moe_combine_v1_r" + ranks},
                                     {&kernels.combine[1], "kvc_moe_combine_v2_r" + ranks}}) {
    Result<cuda::Function> found = kernels.module.function(name.c_str());
    if (!found) return found.error();
    *kernel = found.value();
  }
  Result<cuda::PinnedMemory> pinned = cuda::PinnedMemory::allocate(driver, sizeof(HostWords));
  if (!pinned) return pinned.error();
  memory->pinned = std::move(pinned.value());
  if (const int result = driver.cuMemAlloc_v2(&memory->local, local.bytes); result != cuda::kSuccess) {
    memory->local = 0;
    return cuda::cuda_error("moe_group", "cuMemAlloc", result);
  }
  if (const int result = driver.cuMemsetD8_v2(memory->local, 0, local.bytes); result != cuda::kSuccess) {
    return cuda::cuda_error("moe_group", "cuMemsetD8", result);
  }
  if (Status status = begin_epochs(*memory, config, first); !status) return status.error();
  if (const int result = driver.cuCtxSynchronize(); result != cuda::kSuccess) {
    return cuda::cuda_error("moe_group", "cuCtxSynchronize", result);
  }
  return std::unique_ptr<Group>(new Group(config, std::move(memory)));
}

Group::Group(const GroupConfig& config, std::unique_ptr<Memory> memory)
    : config_(config), layout_{config.dispatch_bytes, config.combine_bytes}, memory_(std::move(memory)) {}

Group::~Group() {
  if (!close(kLastClose)) memory_.release();  // NOLINT: the GPU may still use it
}

unsigned char* Group::base() const noexcept {
  const std::lock_guard lock(mutex_);
  return memory_ ? memory_->segments[config_.rank]->base() : nullptr;
}

Result<UniqueFd> Group::descriptor() const {
  const Use use(*this);
  if (use.memory() == nullptr) return closed("moe_descriptor");
  return use.memory()->segments[config_.rank]->descriptor();
}

Status Group::attach(uint32_t rank, int descriptor) {
  const Use use(*this);
  if (use.memory() == nullptr) return closed("moe_attach");
  Memory& memory = *use.memory();
  if (!use.alone()) return invalid("moe_attach", "another call of this group is running: wait for its end");
  if (rank >= config_.ranks || memory.reaches(rank)) {
    return invalid("moe_attach", "rank " + std::to_string(rank) + " is not in the group, or is attached already");
  }
  Result<std::unique_ptr<Segment>> segment = Segment::map(memory.context, descriptor, segment_bytes());
  if (!segment) return segment.error();
  memory.segments[rank] = std::move(segment.value());
  return {};
}

Status Group::join(FarRanks& far) {
  const auto refuse = [](std::string message) { return invalid("moe_join", std::move(message)); };
  const Use use(*this);
  if (use.memory() == nullptr) return closed("moe_join");
  if (!use.alone()) return refuse("another call of this group is running: wait for its end");
  Memory& memory = *use.memory();
  const FarConfig& other = far.config();
  if (memory.context || config_.survive) {
    return refuse("ranks of other nodes need a group on host memory that does not survive a rank's end");
  }
  if (other.rank != config_.rank || other.ranks != config_.ranks || other.slots != config_.slots ||
      other.max_tokens != config_.max_tokens) {
    return refuse("the lanes were prepared for another rank, or for other sizes than the group");
  }
  for (uint32_t rank = 0; rank < config_.ranks; ++rank) {
    if (memory.segments[rank] && (other.far >> rank & 1U) != 0) {
      return refuse("rank " + std::to_string(rank) + " is attached: it cannot be on another node, too");
    }
  }
  if (memory.far != nullptr) return refuse("the group has lanes already");
  memory.far = &far;
  return {};
}

Status Group::place(std::span<const uint32_t> owners) {
  const auto refuse = [](std::string message) { return invalid("moe_place", std::move(message)); };
  const Use use(*this);
  if (use.memory() == nullptr) return closed("moe_place");
  if (!use.alone()) return refuse("another call of this group is running: wait for its end");
  Memory& memory = *use.memory();
  if (owners.empty()) {
    memory.experts_per_rank = 0;
    memory.has_owners = false;
    return {};
  }
  if (owners.size() != config_.experts) {
    return refuse(std::to_string(owners.size()) + " owners for " + std::to_string(config_.experts) + " experts");
  }
  std::vector<uint8_t> table;
  table.reserve(owners.size());
  for (const uint32_t owner : owners) {
    if (owner >= config_.ranks) return refuse("rank " + std::to_string(owner) + " is not in the group");
    table.push_back(static_cast<uint8_t>(owner));
  }
  // Equal blocks in rank order need no table, which saves a load before the first store.
  const uint32_t block = config_.experts / config_.ranks;
  bool linear = block * config_.ranks == config_.experts;
  for (uint32_t i = 0; linear && i < config_.experts; ++i) linear = owners[i] == i / block;
  if (!linear) {
    const cuda::DevicePointer target = memory.local + local_of(config_).slot_bytes * config_.slots;
    if (!memory.context) {
      std::memcpy(reinterpret_cast<void*>(target), table.data(), table.size());
    } else {
      const cuda::Context::Scope scope(*memory.context);
      if (const int result = memory.context->driver().cuMemcpyHtoD_v2(target, table.data(), table.size());
          result != cuda::kSuccess) {
        return cuda::cuda_error("moe_place", "cuMemcpyHtoD", result);
      }
    }
  }
  memory.experts_per_rank = linear ? block : 0;
  memory.has_owners = !linear;
  return {};
}

// Returns the number of rows before this rank's, and the number of all rows.
Result<std::pair<uint64_t, uint64_t>> Group::rows(const Use& use, std::string_view operation, uint32_t slot,
                                                  std::span<const uint32_t> sizes) const {
  if (use.memory() == nullptr) return closed(operation);
  const std::string name(operation);
  if (slot >= config_.slots) {
    return invalid(name,
                   "slot " + std::to_string(slot) + " does not exist: the group has " + std::to_string(config_.slots));
  }
  if (sizes.size() != config_.ranks) {
    return invalid(name, std::to_string(sizes.size()) + " sizes for " + std::to_string(config_.ranks) + " ranks");
  }
  uint64_t before = 0;
  uint64_t all = 0;
  for (uint32_t rank = 0; rank < config_.ranks; ++rank) {
    if (sizes[rank] > config_.max_tokens) {
      return invalid(name, std::to_string(sizes[rank]) + " tokens of rank " + std::to_string(rank) +
                               ": the group was created for at most " + std::to_string(config_.max_tokens));
    }
    if (!use.memory()->reaches(rank)) return invalid(name, "rank " + std::to_string(rank) + " is not attached");
    if (rank < config_.rank) before += sizes[rank];
    all += sizes[rank];
  }
  return std::pair{before, all};
}

// Fills in the fields that launches of both kinds share.
template <typename Launch>
Launch Group::launch_of(Memory& memory, uint32_t slot, uint32_t tokens, uint32_t phases) const {
  Launch launch{};
  for (uint32_t rank = 0; rank < config_.ranks; ++rank) {
    launch.segments[rank] = memory.segments[rank] ? memory.segments[rank]->base() : nullptr;
  }
  const cuda::DevicePointer control = memory.local + slot * local_of(config_).slot_bytes;
  launch.masks = reinterpret_cast<uint32_t*>(control + sizeof(Control));
  launch.control = reinterpret_cast<Control*>(control);
  launch.host = memory.words_for_kernels();
  launch.timeout_ns = config_.timeout_ns;
  launch.ranks = config_.ranks;
  launch.rank = config_.rank;
  launch.tokens = tokens;
  launch.phases = phases;
  launch.evicted = Layout::evicted();
  launch.waiting = Layout::waiting(slot);
  launch.survive = config_.survive ? 1 : 0;
  return launch;
}

Status Group::dispatch(cuda::Stream stream, uint32_t slot, std::span<const uint32_t> sizes, const void* ids,
                       uint32_t ids_bytes, uint32_t top_k, std::span<const ColumnSpec> columns, uint32_t phases) {
  constexpr std::string_view kOperation = "moe_dispatch";
  const Use use(*this);
  const auto found = rows(use, kOperation, slot, sizes);
  if (!found) return found.error();
  Memory& memory = *use.memory();
  const auto [before, all] = found.value();
  const auto refuse = [&](std::string message) { return invalid(std::string(kOperation), std::move(message)); };
  if (columns.empty() || columns.size() > kMaxColumns) {
    return refuse(std::to_string(columns.size()) + " columns: 1 to " + std::to_string(kMaxColumns) + " are supported");
  }
  if (ids_bytes != 4 && ids_bytes != 8) {
    return refuse("ids of " + std::to_string(ids_bytes) + " bytes: 4 or 8 are supported");
  }
  if (top_k == 0 || top_k > kMaxTopK) {
    return refuse(std::to_string(top_k) + " experts a token: 1 to " + std::to_string(kMaxTopK) + " are supported");
  }
  if (phases == 0 || (phases & ~(kSend | kReceive)) != 0) return refuse("no such phase: give send, receive or both");
  const uint32_t tokens = sizes[config_.rank];
  // A kernel that reads at a null or wrong address ends this process's use of the GPU.
  if (tokens > 0 && ids == nullptr && (memory.has_owners || memory.experts_per_rank > 0)) {
    return refuse("no ids given: the placement needs the experts of each token");
  }
  if (reinterpret_cast<uintptr_t>(ids) % ids_bytes != 0) return refuse("the ids are not aligned to their size");
  auto launch = launch_of<DispatchLaunch>(memory, slot, tokens, phases);
  uint64_t end = 0;  // end of the columns so far
  for (size_t i = 0; i < columns.size(); ++i) {
    const ColumnSpec& spec = columns[i];
    if (spec.row_bytes == 0 || spec.offset % kColumnAlignment != 0 || spec.offset < end) {
      return refuse("column " + std::to_string(i) + " is empty, not aligned, or overlaps the column before it");
    }
    if (spec.row_bytes > kMaxRowBytes || spec.offset > config_.dispatch_bytes ||
        (tokens > 0 && spec.source == nullptr)) {
      return refuse("column " + std::to_string(i) +
                    " has rows of more than 16 MiB, begins past the end of the dispatch area, or has no source");
    }
    end = spec.offset + all * spec.row_bytes;
    if (end > config_.dispatch_bytes) {
      return refuse("column " + std::to_string(i) + " ends " + std::to_string(end - config_.dispatch_bytes) +
                    " bytes past the end of the dispatch area");
    }
    const uint64_t places = reinterpret_cast<uintptr_t>(spec.source) | spec.row_bytes;
    Column& column = launch.columns[i];
    column.source = static_cast<const unsigned char*>(spec.source);
    column.target = layout_.dispatch(slot) + spec.offset + before * spec.row_bytes;
    column.row_bytes = spec.row_bytes;
    column.unit = places % 16 == 0 ? 16 : places % 4 == 0 ? 4 : 1;
    column.to_all = spec.to_all ? 1 : 0;
    column.blank = spec.blank ? 1 : 0;
  }
  const Local local = local_of(config_);
  std::copy(sizes.begin(), sizes.end(), launch.sizes);
  launch.ids = ids;
  if (memory.has_owners) {
    launch.owners = reinterpret_cast<const uint8_t*>(memory.local + local.slot_bytes * config_.slots);
  }
  launch.arrived = Layout::arrived(slot);
  launch.column_count = static_cast<uint32_t>(columns.size());
  launch.top_k = top_k;
  launch.ids_bytes = ids_bytes;
  launch.experts = config_.experts;
  launch.experts_per_rank = memory.experts_per_rank;
  if (!memory.context) {
    if (memory.far != nullptr) {
      if (Status valid = memory.far->check(slot, launch); !valid) return valid;
    }
    cpu_exchange::dispatch(launch, memory.far != nullptr ? &memory.far->slot(slot) : nullptr);
    return {};
  }
  if ((phases & kSend) == 0) return this->launch(memory, memory.kernels.dispatch, stream, 1, 32, &launch);
  // Two vectors of the widest column per thread, and a warp for each of the other columns.
  const uint32_t vectors = (columns[0].row_bytes + 15) / 16;
  const uint32_t threads = round_to_warps(
      std::max(vectors <= kMaxThreads ? vectors : (vectors + 1) / 2, 32 * static_cast<uint32_t>(columns.size() - 1)));
  const uint32_t blocks = std::clamp(launch.tokens, 1U, resident(memory, threads));
  return this->launch(memory, memory.kernels.dispatch, stream, blocks, threads, &launch);
}

Status Group::combine(cuda::Stream stream, uint32_t slot, std::span<const uint32_t> sizes, void* out, uint32_t hidden,
                      bool accumulate, uint32_t phases) {
  constexpr std::string_view kOperation = "moe_combine";
  const Use use(*this);
  const auto found = rows(use, kOperation, slot, sizes);
  if (!found) return found.error();
  Memory& memory = *use.memory();
  const auto [before, all] = found.value();
  const auto refuse = [&](std::string message) { return invalid(std::string(kOperation), std::move(message)); };
  if (hidden == 0 || hidden % 8 != 0)
    return refuse("a hidden size of " + std::to_string(hidden) + ": it must be a multiple of 8, and not 0");
  if (config_.survive && hidden > kMaxSurvivingHidden) {
    return refuse("a hidden size of " + std::to_string(hidden) + ": groups that survive have up to " +
                  std::to_string(kMaxSurvivingHidden));
  }
  const uint64_t row_bytes = uint64_t{hidden} * 2;
  if (all * row_bytes > config_.combine_bytes) {
    return refuse("results of " + std::to_string(all * row_bytes) + " bytes do not fit into the combine area of " +
                  std::to_string(config_.combine_bytes) + " bytes");
  }
  if (reinterpret_cast<uintptr_t>(out) % 16 != 0) return refuse("`out` does not begin at a multiple of 16 bytes");
  if (phases == 0 || (phases & ~(kSend | kReceive)) != 0) return refuse("no such phase: give send, receive or both");
  if (sizes[config_.rank] > 0 && out == nullptr) return refuse("no `out` given, and this rank has tokens");
  auto launch = launch_of<CombineLaunch>(memory, slot, sizes[config_.rank], phases);
  launch.out = static_cast<unsigned char*>(out);
  launch.ready = Layout::ready(slot);
  launch.rows = layout_.combine(slot) + before * row_bytes;
  launch.vectors = hidden / 8;
  launch.accumulate = accumulate ? 1 : 0;
  if (!memory.context) {
    if (memory.far != nullptr) {
      if (Status valid = memory.far->check(slot, launch, sizes); !valid) return valid;
    }
    cpu_exchange::combine(launch, memory.far != nullptr ? &memory.far->slot(slot) : nullptr);
    return {};
  }
  // One vector per thread as long as all blocks are resident at once, otherwise two vectors of every rank. In a group
  // that survives, one block has the whole row, so that a rank's result is in all of it or in none.
  const bool whole = config_.survive && launch.vectors > kMaxThreads;
  const bool few = launch.tokens <= memory.processors / 2 && !whole;
  const uint32_t per_thread = few ? 1 : 2;
  launch.parts = (launch.vectors + per_thread * kMaxThreads - 1) / (per_thread * kMaxThreads);
  const uint32_t share = (launch.vectors + launch.parts - 1) / launch.parts;
  const uint32_t threads = std::max(kCombineThreads, round_to_warps((share + per_thread - 1) / per_thread));
  launch.parts = (launch.vectors + per_thread * threads - 1) / (per_thread * threads);
  const uint32_t blocks =
      (phases & kReceive) == 0 ? 1 : std::clamp(launch.tokens * launch.parts, 1U, resident(memory, threads));
  return this->launch(memory, memory.kernels.combine[few ? 0 : 1], stream, blocks, threads, &launch);
}

// Number of blocks that run at once. 1,024 threads of a processor leave registers for a kernel that begins early.
uint32_t Group::resident(const Memory& memory, uint32_t threads) noexcept {
  return memory.processors * std::max(1U, kThreadsPerProcessor / threads);
}

Status Group::launch(const Memory& memory, cuda::Function kernel, cuda::Stream stream, uint32_t blocks,
                     uint32_t threads, void* arguments) {
  cuda::LaunchAttribute attribute{};
  attribute.id = kSerialization;
  attribute.value = 1;
  cuda::LaunchConfig config{{blocks, 1, 1}, {threads, 1, 1}, 0, stream, &attribute, memory.overlaps() ? 1U : 0U};
  // No RelaxedCapture: launches are meant to be captured.
  const cuda::Driver& driver = memory.context->driver();
  driver.cuCtxPushCurrent_v2(memory.context->handle());
  const int result = driver.cuLaunchKernelEx(&config, kernel, &arguments, nullptr);
  cuda::ContextHandle popped = nullptr;
  driver.cuCtxPopCurrent_v2(&popped);
  return result == cuda::kSuccess ? Status{} : cuda::cuda_error("moe_launch", "cuLaunchKernelEx", result);
}

void Group::lose(uint32_t rank, bool left) {
  const std::lock_guard lock(mutex_);
  if (!memory_ || rank >= config_.ranks) return;
  HostWords& words = *memory_->words();
  const std::atomic_ref lost(words.lost);
  const std::atomic_ref gone_in_order(words.left);
  if (config_.survive && !left && rank != config_.rank) {
    std::atomic_ref(words.dead).fetch_or(1U << rank);
    return;
  }
  // Other ranks end because of the first death, so a fault must not name them. Launches look at `lost` first.
  if (lost.load() != 0) return;
  if (left) {
    gone_in_order.fetch_or(1U << rank);
  } else {
    lost.store(1U << rank);
  }
}

void Group::fence(uint32_t rank) {
  const std::lock_guard lock(mutex_);
  if (memory_ && rank < config_.ranks) std::atomic_ref(memory_->words()->fenced).fetch_or(1U << rank);
}

uint32_t Group::masked() const {
  const std::lock_guard lock(mutex_);
  uint32_t bits = 0;
  for (uint32_t rank = 0; memory_ && rank < config_.ranks; ++rank) {
    if (std::atomic_ref(memory_->words()->masked[rank]).load() != 0) bits |= 1U << rank;
  }
  return bits;
}

std::optional<std::pair<Fault, uint32_t>> Group::fault() const {
  const std::lock_guard lock(mutex_);
  const uint32_t word = memory_ ? std::atomic_ref(memory_->words()->fault).load() : 0;
  if (word == 0) return std::nullopt;
  return std::pair{static_cast<Fault>(word >> 16), word & 0xffffU};
}

Status Group::close(uint64_t timeout_ns) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::nanoseconds(std::min(timeout_ns, kLongestNs));
  std::unique_lock lock(mutex_);
  if (!memory_) return {};
  closing_ = true;
  uint32_t none = 0;
  std::atomic_ref(memory_->words()->lost).compare_exchange_strong(none, 1U << config_.rank);
  if (!unused_.wait_until(lock, deadline, [&] { return uses_ == 0; })) {
    return Error{
        ErrorCode::kTimeout, {}, {}, "moe_close", "a call of this group is still running: its memory is not freed"};
  }
  if (!memory_) return {};  // another close() has freed it
  if (const std::shared_ptr<cuda::Context> context = memory_->context) {
    lock.unlock();
    const auto left = deadline - std::chrono::steady_clock::now();
    if (Status status = synchronize(context, static_cast<uint64_t>(std::max<int64_t>(0, left.count()))); !status) {
      return status;
    }
    lock.lock();
  }
  memory_.reset();
  return {};
}

}  // namespace kvc::moe
