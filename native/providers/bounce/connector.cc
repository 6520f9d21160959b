#include "providers/bounce/connector.h"

#include <utility>

#include "base/byte_codec.h"
#include "base/random.h"
#include "cuda/gpu_memory.h"
#include "providers/bounce/errors.h"

namespace kvc::bounce {

namespace {

// Limit for the lower lane's greeting, which ours contains. It is generous: the largest is libfabric's, some hundred
// bytes.
constexpr size_t kMaxGreeting = 64 << 10;

// Returns this side's greeting: the slots for the peer to fill, and the lower lane's greeting.
Bytes greeting(const LinkSlots& link, const Bytes& below) {
  ByteWriter writer;
  writer.number(kMagic);
  writer.number(kVersion);
  writer.number(link.memory->registration().key);
  writer.number(reinterpret_cast<uint64_t>(link.memory->data()));
  writer.blob(below);
  return writer.take();
}

// Reads the peer's greeting, and returns the lower lane's part of it.
Result<Bytes> greet(LinkSlots& link, std::span<const std::byte> bytes, std::string_view operation) {
  ByteReader reader(bytes);
  const auto magic = reader.number<uint32_t>();
  const auto version = reader.number<uint32_t>();
  link.peer_rkey = reader.number<uint64_t>();
  link.peer_base = reader.number<uint64_t>();
  const std::span<const std::byte> below = reader.blob(kMaxGreeting);
  if (!reader.complete() || magic != kMagic) {
    return bounce_error(ErrorCode::kInvalidArgument, operation, "malformed handshake");
  }
  if (version != kVersion) {
    return bounce_error(ErrorCode::kRefused, operation,
                        "the peer speaks version " + std::to_string(version) + " of the bounce lane and this process " +
                            std::to_string(kVersion) + ": run one release on both sides");
  }
  return Bytes(below.begin(), below.end());
}

}  // namespace

Region::Region(const MemoryRange& range, std::shared_ptr<cuda::Copier> gpu)
    : Registration(range, random_key()), copier(std::move(gpu)) {}

Result<std::unique_ptr<BounceConnector>> BounceConnector::open(const DomainConfig& config,
                                                               std::unique_ptr<Connector> below) {
  std::unique_ptr<BounceConnector> connector(new BounceConnector(config, std::move(below)));
  // The pool is a registered region too, because writes start from it. Its key is not given to any peer.
  Result<std::unique_ptr<SlotMemory>> pool = renamed(SlotMemory::create(kPoolSlots, *connector->below_));
  if (!pool) return pool.error();
  connector->pool_ = std::move(pool.value());
  connector->slots_ = {connector->pool_};
  return connector;
}

BounceConnector::~BounceConnector() = default;

std::string BounceConnector::description() const {
  const auto& context = gpu_.context();
  return "bounce over " + below_->description() +
         (context ? " for GPU " + std::to_string(context->device()) : " for host memory");
}

// --- Memory

// Makes `device` the domain's GPU, if it has none yet.
Result<std::shared_ptr<cuda::Copier>> BounceConnector::adopt(int device) {
  std::vector<std::weak_ptr<SlotMemory>> all;
  std::unique_lock lock(gpu_mutex_);
  Result<std::shared_ptr<cuda::Copier>> copier = renamed(gpu_.adopt(device));
  if (!copier) return copier;
  const std::shared_ptr<cuda::Context> context = gpu_.context();
  all = slots_;  // slots that are made later find the GPU and are pinned when they are made
  lock.unlock();
  for (const std::weak_ptr<SlotMemory>& known : all) {
    const std::shared_ptr<SlotMemory> slots = known.lock();
    if (slots == nullptr) continue;
    if (Status pinned = renamed(slots->pin(context)); !pinned) return pinned.error();
  }
  return copier;
}

Result<std::unique_ptr<Registration>> BounceConnector::register_memory(const MemoryRange& range) {
  std::shared_ptr<cuda::Copier> copier;
  if (cuda::is_gpu_memory(range.base)) {
    const Result<cuda::Placement> placed = renamed(cuda::placement(*cuda::loaded_driver(), range.base));
    if (!placed) return placed.error();
    Result<std::shared_ptr<cuda::Copier>> adopted = adopt(placed.value().device);
    if (!adopted) return adopted.error();
    if (Status synchronous = renamed(cuda::make_synchronous(range.base)); !synchronous) return synchronous.error();
    copier = std::move(adopted.value());
  }
  return std::unique_ptr<Registration>(std::make_unique<Region>(range, std::move(copier)));
}

// --- Links

// Makes slots that are registered with the lower lane.
Result<std::unique_ptr<LinkSlots>> BounceConnector::make_slots() {
  Result<std::unique_ptr<SlotMemory>> memory = renamed(SlotMemory::create(kSlots, *below_));
  if (!memory) return memory.error();
  auto link = std::make_unique<LinkSlots>();
  link->memory = std::move(memory.value());
  std::unique_lock lock(gpu_mutex_);
  if (const std::shared_ptr<cuda::Context> context = gpu_.context()) {
    lock.unlock();
    if (Status pinned = renamed(link->memory->pin(context)); !pinned) return pinned.error();
    lock.lock();
  }
  std::erase_if(slots_, [](const auto& known) { return known.expired(); });
  slots_.push_back(link->memory);
  return link;
}

Result<Bytes> BounceConnector::offer(LinkId id) {
  Result<std::unique_ptr<LinkSlots>> link = make_slots();
  if (!link) return link.error();
  const Result<Bytes> below = renamed(below_->offer(id));
  if (!below) return below.error();
  return greeting(*(offers_[id] = std::move(link.value())), below.value());
}

Result<Connector::Accepted> BounceConnector::accept(LinkId id, std::span<const std::byte> offer) {
  Result<std::unique_ptr<LinkSlots>> made = make_slots();
  if (!made) return made.error();
  LinkSlots& link = *made.value();
  const Result<Bytes> theirs = greet(link, offer, "accept");
  if (!theirs) return theirs.error();
  Result<Accepted> accepted = renamed(below_->accept(id, theirs.value()));
  if (!accepted) return accepted.error();
  link.below = std::move(accepted.value().end);
  Bytes answer = greeting(link, accepted.value().answer);
  return Accepted{std::move(answer), std::move(made.value())};
}

Result<std::unique_ptr<LinkEnd>> BounceConnector::complete(LinkId id, std::span<const std::byte> answer) {
  auto offered = offers_.extract(id);
  if (!offered) return bounce_error(ErrorCode::kInvalidArgument, "complete", "no such offer");
  LinkSlots& link = *offered.mapped();
  const Result<Bytes> theirs = greet(link, answer, "complete");
  if (!theirs) {
    below_->withdraw(id);
    return theirs.error();
  }
  Result<std::unique_ptr<LinkEnd>> below = renamed(below_->complete(id, theirs.value()));
  if (!below) return below.error();
  link.below = std::move(below.value());
  return std::unique_ptr<LinkEnd>(std::move(offered.mapped()));
}

void BounceConnector::withdraw(LinkId id) {
  offers_.erase(id);
  below_->withdraw(id);
}

}  // namespace kvc::bounce
