#include "moe/far_ranks.h"

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstring>

#include "base/byte_codec.h"
#include "moe/cpu_exchange.h"
#include "moe/group_config.h"
#include "moe/layout.h"
#include "moe/packet.h"

namespace kvc::moe {

namespace {

constexpr uint32_t kDispatch = 0;
constexpr uint32_t kCombine = 1;
constexpr uint32_t kPhases = 2;
constexpr uint32_t kTurns = 2;     // of packets in flight, each with a counter
constexpr uint32_t kReceived = 2;  // the place of received packets, behind those of both turns
constexpr size_t kMaxHandshake = 1 << 20;
constexpr uint64_t kPlaceAlignment = 256;

uint64_t aligned(uint64_t bytes) { return (bytes + kPlaceAlignment - 1) / kPlaceAlignment * kPlaceAlignment; }

std::array<uint64_t, 2> packet_bytes(const FarConfig& config) {
  return {aligned(max_dispatch_packet(config.max_tokens, config.row_bytes)),
          aligned(combine_packet(config.max_tokens, uint64_t{config.hidden} * 2))};
}

}  // namespace

// One slot's packets. A launch's send() and receive() are of the same number.
class FarRanks::Slot final : public FarSlot {
 public:
  Slot(FarRanks& owner, uint32_t slot) : owner_(owner), slot_(slot), of_(owner.far_.size()) {}

  Status prepare(PeerGroupId group) {
    for (uint32_t phase = 0; phase < kPhases; ++phase) {
      for (uint32_t turn = 0; turn < kTurns; ++turn) {
        std::vector<PreparedSlice> slices;
        for (uint32_t i = 0; i < owner_.far_.size(); ++i) {
          const Far& far = owner_.far_[i];
          slices.push_back({i, owner_.region_, owner_.place(slot_, phase, turn, i), far.region,
                            far.targets[slot_ * kPhases + phase], owner_.packet_bytes_[phase],
                            far.immediates[counter(phase, turn)]});
        }
        std::atomic<bool>& in_flight = in_flight_[phase][turn];
        Result<ScatterId> scatter =
            owner_.engine_->prepare_scatter(group, slices, [this, &in_flight](const Event& event) {
              for (const PeerFailure& failure : event.failures) {
                for (const Far& far : owner_.far_) {
                  // departures() reports a rank that leaves. It has all packets that it needs.
                  if (far.peer != failure.peer || failure.error.code == ErrorCode::kUnknownPeer) continue;
                  owner_.lose(far.rank, "cannot be reached: " + failure.error.to_string());
                }
              }
              in_flight.store(false, std::memory_order_release);
            });
        if (!scatter) return scatter.error();
        scatters_[phase][turn] = scatter.value();
      }
    }
    return {};
  }

  uint32_t ranks() const noexcept override { return owner_.config_.far; }
  uint32_t lost() const noexcept override { return owner_.lost_.load(std::memory_order_acquire); }
  bool can_send(const DispatchLaunch&) const noexcept override { return is_free(kDispatch); }
  bool can_send(const CombineLaunch&) const noexcept override { return is_free(kCombine); }

  // Whether the slot's launches come in the order of Group, with the same sizes. The order keeps packets from being
  // overwritten, and the sizes are where the rows of a received packet are.
  Status check_order(uint32_t phase, uint32_t phases, std::span<const uint32_t> sizes) const {
    const bool sends = (phases & kSend) != 0;
    const uint64_t open = (phase == kDispatch) == sends ? 0 : 1;  // dispatches without a combine, before the launch
    const char* const operation = phase == kDispatch ? "moe_dispatch" : "moe_combine";
    if (packets_[kDispatch] != packets_[kCombine] + open) {
      return invalid(operation, "each slot takes dispatch and combine in turns: send each once");
    }
    if ((phase == kDispatch && sends) || std::equal(sizes.begin(), sizes.end(), sizes_.begin())) return {};
    return invalid(operation, "the sizes differ from those of the slot's last dispatch: give the same sizes");
  }

  void send(const DispatchLaunch& launch) override {
    const DispatchPackets packets(launch);
    std::copy(launch.sizes, launch.sizes + launch.ranks, sizes_.begin());
    submit(kDispatch, [&](size_t index, unsigned char* packet) {
      const uint32_t rows = packets.write(owner_.far_[index].rank, launch.control->epoch, packet);
      of_[index].sent = rows;
      of_[index].received.clear();
      return packets.bytes(launch.tokens, rows);
    });
  }
  void send(const CombineLaunch& launch) override {
    const uint64_t row_bytes = uint64_t{launch.vectors} * 16;
    const unsigned char* const all = launch.segments[launch.rank] + launch.rows - before(launch.rank) * row_bytes;
    submit(kCombine, [&](size_t index, unsigned char* packet) {
      const std::vector<uint32_t>& numbers = of_[index].received;
      const unsigned char* const rows = all + before(owner_.far_[index].rank) * row_bytes;
      unsigned char* target = packet + kPacketHeaderBytes;
      for (const uint32_t number : numbers) {
        std::memcpy(target, rows + number * row_bytes, row_bytes);
        target += row_bytes;
      }
      const auto count = static_cast<uint32_t>(numbers.size());
      write_header(packet, {launch.control->epoch, count, 0});
      return combine_packet(count, row_bytes);
    });
  }

  void receive(const DispatchLaunch& launch) override {
    receive(launch, kDispatch, launch.arrived, [&](size_t index, const unsigned char* packet) {
      return DispatchPackets(launch).place(owner_.far_[index].rank, packet, of_[index].received);
    });
  }
  void receive(const CombineLaunch& launch) override {
    receive(launch, kCombine, launch.ready, [&](size_t index, const unsigned char* packet) {
      if (of_[index].sent == 0) return true;
      const PacketHeader header = read_header(packet);
      return header.epoch == launch.control->epoch && header.rows == of_[index].sent;
    });
  }
  const unsigned char* results(uint32_t rank) const noexcept override {
    const size_t index = std::popcount(ranks() & ((1U << rank) - 1));
    return owner_.at(owner_.place(slot_, kCombine, kReceived, index)) + kPacketHeaderBytes;
  }

 private:
  // The rows between this rank and a far rank, in the last dispatch.
  struct Rows {
    uint32_t sent = 0;
    std::vector<uint32_t> received;  // token numbers
  };

  uint32_t counter(uint32_t phase, uint32_t turn) const noexcept { return (slot_ * kPhases + phase) * kTurns + turn; }
  bool is_free(uint32_t phase) const noexcept {
    return !in_flight_[phase][packets_[phase] % kTurns].load(std::memory_order_acquire);
  }
  uint64_t before(uint32_t rank) const noexcept {
    uint64_t rows = 0;
    for (uint32_t i = 0; i < rank; ++i) rows += sizes_[i];
    return rows;
  }

  template <typename Pack>
  void submit(uint32_t phase, Pack pack) {
    const auto turn = static_cast<uint32_t>(packets_[phase]++ % kTurns);
    taken_[phase] = 0;
    std::array<ScatterUpdate, kMaxRanks> updates;
    for (size_t i = 0; i < owner_.far_.size(); ++i) {
      updates[i].bytes = pack(i, owner_.at(owner_.place(slot_, phase, turn, i)));
    }
    in_flight_[phase][turn].store(true, std::memory_order_relaxed);
    owner_.scatters_.fetch_add(1, std::memory_order_relaxed);
    const Result<TransferId> submitted =
        owner_.engine_->submit_scatter(scatters_[phase][turn], {updates.data(), owner_.far_.size()});
    if (submitted) return;
    in_flight_[phase][turn].store(false, std::memory_order_relaxed);
    owner_.lose(owner_.config_.rank, "cannot send packets: " + submitted.error().to_string());
  }

  template <typename Launch, typename Take>
  void receive(const Launch& launch, uint32_t phase, uint64_t flags, Take take) {
    const uint64_t last = packets_[phase] - 1;
    const uint64_t count = last / kTurns + 1;
    const uint32_t word = counter(phase, static_cast<uint32_t>(last % kTurns));
    for (size_t i = 0; i < owner_.far_.size(); ++i) {
      const Far& far = owner_.far_[i];
      if ((taken_[phase] >> i & 1U) != 0 || far.words[word]->load() < count) continue;
      taken_[phase] |= 1U << i;
      if (take(i, owner_.at(owner_.place(slot_, phase, kReceived, i)))) {
        cpu_exchange::flag_of(launch.segments[launch.rank], flags, far.rank)
            .store(launch.control->epoch, std::memory_order_release);
      } else {
        owner_.lose(far.rank, "sent a packet of another step or of other sizes, though all ranks must give the same");
      }
    }
  }

  FarRanks& owner_;
  const uint32_t slot_;
  std::array<std::array<ScatterId, kTurns>, kPhases> scatters_{};
  std::array<std::array<std::atomic<bool>, kTurns>, kPhases> in_flight_{};
  std::array<uint64_t, kPhases> packets_{};  // sent to each far rank
  std::array<uint32_t, kPhases> taken_{};    // by index in far_: the current packet has been taken
  std::array<uint32_t, kMaxRanks> sizes_{};  // of the last dispatch
  std::vector<Rows> of_;                     // by index in far_
};

FarRanks::FarRanks(const FarConfig& config, std::unique_ptr<TransferEngine> engine, SharedMemory memory,
                   RegionId region)
    : config_(config),
      packet_bytes_(packet_bytes(config)),
      memory_(std::move(memory)),
      engine_(std::move(engine)),
      region_(region) {
  for (uint32_t rank = 0; rank < config.ranks; ++rank) {
    if ((config.far >> rank & 1U) != 0) far_.emplace_back().rank = rank;
  }
  for (uint32_t slot = 0; slot < config.slots; ++slot) slots_.push_back(std::make_unique<Slot>(*this, slot));
}

FarRanks::~FarRanks() { (void)engine_->close(); }

Result<std::unique_ptr<FarRanks>> FarRanks::create(EngineConfig engine, const FarConfig& config) {
  constexpr const char* kOperation = "moe_far_ranks";
  if (config.ranks < 2 || config.ranks > kMaxRanks || config.rank >= config.ranks) {
    return invalid(kOperation, "rank " + std::to_string(config.rank) + " of " + std::to_string(config.ranks) +
                                   ": 2 to " + std::to_string(kMaxRanks) + " ranks are supported, counted from 0");
  }
  if (config.far == 0 || config.far >> config.ranks != 0 || (config.far >> config.rank & 1U) != 0) {
    return invalid(kOperation, "the far ranks must be other ranks of the group, one or more");
  }
  if (config.slots == 0 || config.slots > kMaxSlots || config.max_tokens == 0 || config.max_tokens > kMaxGroupTokens ||
      config.row_bytes == 0 || config.row_bytes > kMaxRowBytes || config.hidden == 0 || config.hidden > kMaxRowBytes) {
    return invalid(kOperation, "slots, max_tokens, row_bytes or hidden is out of range");
  }
  Result<std::unique_ptr<TransferEngine>> opened = TransferEngine::create(std::move(engine));
  if (!opened) return opened.error();
  Result<SharedMemory> memory = SharedMemory::create("kv-connector-moe-far", memory_bytes(config));
  if (!memory) return memory.error();
  const Result<RegionId> region =
      opened.value()->register_memory(memory.value().data(), memory.value().size(), memory.value().fd(), 0);
  if (!region) return region.error();
  return std::unique_ptr<FarRanks>(
      new FarRanks(config, std::move(opened.value()), std::move(memory.value()), region.value()));
}

uint64_t FarRanks::memory_bytes(const FarConfig& config) noexcept {
  const std::array<uint64_t, 2> bytes = packet_bytes(config);
  return config.slots * static_cast<uint64_t>(std::popcount(config.far)) * (kTurns + 1) *
         (bytes[kDispatch] + bytes[kCombine]);
}

uint64_t FarRanks::place(uint32_t slot, uint32_t phase, uint32_t turn, size_t index) const noexcept {
  const uint64_t far = far_.size();
  const uint64_t of_slot = far * (kTurns + 1) * (packet_bytes_[kDispatch] + packet_bytes_[kCombine]);
  const uint64_t of_phase = phase == kDispatch ? 0 : far * (kTurns + 1) * packet_bytes_[kDispatch];
  return slot * of_slot + of_phase + (turn * far + index) * packet_bytes_[phase];
}

FarSlot& FarRanks::slot(uint32_t number) noexcept { return *slots_[number]; }

// --- Forming

Result<FarRanks::Far*> FarRanks::find(uint32_t rank, std::string_view operation) {
  for (Far& far : far_) {
    if (far.rank == rank) return &far;
  }
  return invalid(std::string(operation), "rank " + std::to_string(rank) + " is not on another node");
}

Result<Bytes> FarRanks::offer(uint32_t rank) {
  const Result<Far*> far = find(rank, "moe_offer");
  if (!far) return far.error();
  Result<Handshake> offer = engine_->offer("moe-rank-" + std::to_string(rank));
  if (!offer) return offer.error();
  far.value()->peer = offer.value().peer;
  return std::move(offer.value().bytes);
}

Result<Bytes> FarRanks::accept(uint32_t rank, std::span<const std::byte> offer) {
  const Result<Far*> far = find(rank, "moe_accept");
  if (!far) return far.error();
  const Result<Handshake> answer = engine_->accept("moe-rank-" + std::to_string(rank), offer);
  if (!answer) return answer.error();
  far.value()->peer = answer.value().peer;
  const Result<Bytes> introduction = introduce(*far.value());
  if (!introduction) return introduction.error();
  ByteWriter writer;
  writer.blob(answer.value().bytes);
  writer.blob(introduction.value());
  return writer.take();
}

Result<Bytes> FarRanks::complete(uint32_t rank, std::span<const std::byte> accepted) {
  const Result<Far*> far = find(rank, "moe_complete");
  if (!far) return far.error();
  ByteReader reader(accepted);
  const std::span<const std::byte> answer = reader.blob(kMaxHandshake);
  const std::span<const std::byte> introduction = reader.blob(kMaxHandshake);
  if (!reader.complete()) return invalid("moe_complete", "the bytes are not the answer of a rank");
  if (Status completed = engine_->complete(far.value()->peer, answer); !completed) return completed.error();
  if (Status read = read_introduction(*far.value(), introduction); !read) return read.error();
  return introduce(*far.value());
}

Status FarRanks::meet(uint32_t rank, std::span<const std::byte> completed) {
  const Result<Far*> far = find(rank, "moe_meet");
  if (!far) return far.error();
  return read_introduction(*far.value(), completed);
}

// An introduction has the region of a rank's packets, the places for this source, and its counters.
Result<Bytes> FarRanks::introduce(Far& far) {
  const auto index = static_cast<size_t>(&far - far_.data());
  const uint32_t counters = config_.slots * kPhases * kTurns;
  Result<CounterSet> set = engine_->alloc_counters(counters, {far.peer});
  if (!set) return set.error();
  far.counters = std::move(set.value());
  std::vector<std::shared_ptr<CompletionWord>> words;
  words.reserve(counters);
  for (uint32_t i = 0; i < counters; ++i) {
    words.push_back(far.words.emplace_back(std::make_shared<HostCompletionWord>()));
  }
  if (Status mirrored = engine_->mirror_counters(far.counters.id, std::move(words)); !mirrored) return mirrored.error();
  const Result<Bytes> descriptor = engine_->region_descriptor(region_);
  if (!descriptor) return descriptor.error();
  ByteWriter writer;
  for (uint32_t slot = 0; slot < config_.slots; ++slot) {
    for (uint32_t phase = 0; phase < kPhases; ++phase) writer.number(place(slot, phase, kReceived, index));
  }
  for (const uint32_t immediate : far.counters.immediates) writer.number(immediate);
  writer.blob(descriptor.value());
  return writer.take();
}

Status FarRanks::read_introduction(Far& far, std::span<const std::byte> bytes) {
  ByteReader reader(bytes);
  far.targets.resize(size_t{config_.slots} * kPhases);
  for (uint64_t& target : far.targets) target = reader.number<uint64_t>();
  far.immediates.resize(size_t{config_.slots} * kPhases * kTurns);
  for (uint32_t& immediate : far.immediates) immediate = reader.number<uint32_t>();
  const std::span<const std::byte> descriptor = reader.blob(kMaxHandshake);
  if (!reader.complete()) return invalid("moe_meet", "the bytes are not the introduction of a rank");
  const Result<RemoteRegionId> region = engine_->import_region(far.peer, descriptor);
  if (!region) return region.error();
  far.region = region.value();
  return {};
}

Status FarRanks::begin() {
  std::vector<PeerId> peers;
  for (const Far& far : far_) {
    if (far.region == 0) return invalid("moe_begin", "rank " + std::to_string(far.rank) + " is not connected");
    peers.push_back(far.peer);
  }
  const Result<PeerGroupId> group = engine_->add_peer_group(peers);
  if (!group) return group.error();
  for (const std::unique_ptr<Slot>& slot : slots_) {
    if (Status prepared = slot->prepare(group.value()); !prepared) return prepared;
  }
  return {};
}

// --- Steps

Status FarRanks::check(uint32_t slot, const DispatchLaunch& launch) const {
  if (cpu_exchange::word(launch.control->faulted).load() != 0) return {};  // the launch does nothing
  if (Status order = slots_[slot]->check_order(kDispatch, launch.phases, {launch.sizes, launch.ranks}); !order) {
    return order;
  }
  const DispatchPackets packets(launch);
  for (uint32_t rank = 0; rank < launch.ranks; ++rank) {
    const uint64_t bytes = packets.bytes(launch.sizes[rank], launch.sizes[rank]);
    if (bytes <= packet_bytes_[kDispatch]) continue;
    return invalid("moe_dispatch", "a packet of " + std::to_string(bytes) +
                                       " bytes: the group was created for rows of " +
                                       std::to_string(config_.row_bytes) + " bytes");
  }
  return {};
}

Status FarRanks::check(uint32_t slot, const CombineLaunch& launch, std::span<const uint32_t> sizes) const {
  if (cpu_exchange::word(launch.control->faulted).load() != 0) return {};  // the launch does nothing
  if (Status order = slots_[slot]->check_order(kCombine, launch.phases, sizes); !order) return order;
  if (launch.vectors * 8 <= config_.hidden) return {};
  return invalid("moe_combine", "a hidden size of " + std::to_string(launch.vectors * 8) +
                                    ": the lanes were prepared for up to " + std::to_string(config_.hidden));
}

void FarRanks::lose(uint32_t rank, const std::string& reason) {
  const std::lock_guard lock(mutex_);
  if (failures_[rank].empty()) failures_[rank] = reason;
  uint32_t none = 0;
  lost_.compare_exchange_strong(none, 1U << rank, std::memory_order_release);
}

std::string FarRanks::failure(uint32_t rank) const {
  const std::lock_guard lock(mutex_);
  return rank < kMaxRanks ? failures_[rank] : std::string();
}

// --- Beside steps

std::vector<FarRanks::Departure> FarRanks::departures() {
  std::vector<Departure> departures;
  for (const Event& event : engine_->poll_events(64)) {
    const bool left = event.kind == EventKind::kPeerLeft;
    for (const Far& far : far_) {
      if ((left || event.kind == EventKind::kPeerDown) && event.id == far.peer) {
        departures.push_back({far.rank, left, event.error ? event.error->to_string() : std::string()});
      }
    }
  }
  return departures;
}

Status FarRanks::send(uint32_t rank, std::span<const std::byte> message) {
  const Result<Far*> far = find(rank, "moe_send");
  if (!far) return far.error();
  const Result<TransferId> sent = engine_->send(far.value()->peer, message, [](const Event&) {});
  return sent ? Status{} : Status{sent.error()};
}

std::vector<std::pair<uint32_t, Bytes>> FarRanks::receive() {
  std::vector<std::pair<uint32_t, Bytes>> received;
  for (Message& message : engine_->receive(64)) {
    for (const Far& far : far_) {
      if (far.peer == message.peer) received.emplace_back(far.rank, std::move(message.bytes));
    }
  }
  return received;
}

FarRanks::Counts FarRanks::counts() const {
  const EngineStats stats = engine_->stats();
  return {scatters_.load(std::memory_order_relaxed), stats.immediates_received, stats.pages_rewritten, stats.links,
          stats.links_lost};
}

void FarRanks::leave(Timeout timeout) {
  const auto end = std::chrono::steady_clock::now() + timeout;
  // Begins all goodbyes, so that no rank waits for the response of another rank.
  for (const Far& far : far_) {
    if (far.peer != 0) (void)engine_->disconnect(far.peer, Timeout(0));
  }
  for (const Far& far : far_) {
    const auto rest = std::chrono::duration_cast<Timeout>(end - std::chrono::steady_clock::now());
    if (far.peer != 0) (void)engine_->disconnect(far.peer, std::max(rest, Timeout(0)));
  }
}

}  // namespace kvc::moe
