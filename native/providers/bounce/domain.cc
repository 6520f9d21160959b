#include "providers/bounce/domain.h"

#include <algorithm>
#include <chrono>
#include <numeric>
#include <utility>

#include "engine/byte_codec.h"
#include "providers/bounce/errors.h"
#include "providers/same_host/system.h"

namespace kvc::bounce {

namespace {

// The lane below's own greeting, in ours. Generous: the largest is libfabric's, some hundred bytes.
constexpr size_t kMaxGreeting = 64 << 10;
// Ending a link waits so long for the copies under way, a few hundred microseconds normally, so that its batches end and
// its fence is through at once. A GPU that needs longer is waited for by and by.
constexpr auto kDrainLimit = std::chrono::seconds(2);

}  // namespace

Result<std::unique_ptr<BounceDomain>> BounceDomain::open(const DomainConfig& config, DomainSink& sink) {
  DomainConfig below = config;
  const size_t colon = config.device.find(':');
  below.provider = config.device.empty() ? "tcp" : config.device.substr(0, colon);
  below.device = colon == std::string::npos ? "" : config.device.substr(colon + 1);
  if (below.provider == "bounce" || below.provider == "nvlink") {
    return bounce_error(ErrorCode::kInvalidArgument, "open",
                        "the lane below has to move host memory: tcp, host, verbs or libfabric, not " + below.provider);
  }
  std::unique_ptr<BounceDomain> domain(new BounceDomain(config, sink));
  Result<std::unique_ptr<Domain>> opened = renamed(open_domain(below, *domain));
  if (!opened) return opened.error();
  domain->below_ = std::move(opened.value());
  Result<std::unique_ptr<SlotMemory>> pool = renamed(SlotMemory::create(kPoolSlots));
  if (!pool) return pool.error();
  domain->pool_ = std::move(pool.value());
  domain->pool_free_.resize(kPoolSlots);
  std::iota(domain->pool_free_.rbegin(), domain->pool_free_.rend(), 0U);
  // What is written from is a registered region too. Its key is told to nobody.
  const Result<uint64_t> key =
      renamed(domain->below_->register_region(domain->pool_->data(), domain->pool_->size(), domain->pool_->fd(), 0));
  if (!key) return key.error();
  return domain;
}

BounceDomain::~BounceDomain() {
  copier_.reset();
  below_.reset();
}

std::string BounceDomain::description() const {
  return "bounce over " + below_->description() +
         (context_ ? " for GPU " + std::to_string(context_->device()) : " for host memory");
}

// --- Memory

// Makes `device` the domain's GPU, if it has none yet.
Status BounceDomain::adopt(int device) {
  if (context_ != nullptr) {
    if (context_->device() == device) return {};
    return bounce_error(ErrorCode::kInvalidArgument, "register_region",
                        "this memory is on GPU " + std::to_string(device) + ", and earlier regions on GPU " +
                            std::to_string(context_->device()) + ": one engine serves one GPU");
  }
  Result<std::shared_ptr<cuda::Context>> context = renamed(cuda::Context::retain(device));
  if (!context) return context.error();
  Result<std::unique_ptr<cuda::Copier>> copier = renamed(cuda::Copier::open(context.value(), copy_blocks_));
  if (!copier) return copier.error();
  if (Status pinned = renamed(pool_->pin(context.value())); !pinned) return pinned;
  for (const auto& [id, link] : links_) {
    if (Status pinned = renamed(link->memory->pin(context.value())); !pinned) return pinned;
  }
  context_ = std::move(context.value());
  copier_ = std::move(copier.value());
  return {};
}

Result<uint64_t> BounceDomain::register_region(std::byte* base, uint64_t bytes, int, uint64_t) {
  if (base == nullptr || bytes == 0 || bytes > UINT64_MAX - reinterpret_cast<uint64_t>(base)) {
    return bounce_error(ErrorCode::kInvalidArgument, "register_region", "the range is empty or wraps around");
  }
  bool gpu = false;
  // A machine without a driver has no GPU memory either.
  if (const Result<const cuda::Driver*> driver = cuda::driver()) {
    const Result<cuda::Placement> placed = renamed(cuda::placement(*driver.value(), base));
    if (!placed) return placed.error();
    gpu = placed.value().device >= 0;
    if (gpu) {
      if (Status adopted = adopt(placed.value().device); !adopted) return adopted.error();
    }
  }
  uint64_t rkey = 0;
  while (rkey == 0 || regions_.contains(rkey)) {
    if (Status random = same_host::fill_random(std::as_writable_bytes(std::span(&rkey, 1))); !random) {
      return renamed(random.error());
    }
  }
  regions_[rkey] = {.base = base, .bytes = bytes, .gpu = gpu};
  return rkey;
}

bool BounceDomain::deregister_region(uint64_t rkey) {
  const auto found = regions_.find(rkey);
  if (found == regions_.end()) return true;
  found->second.revoked = true;
  if (found->second.landing > 0) return false;
  regions_.erase(found);
  return true;
}

bool BounceDomain::in_gpu(const std::byte* address) const noexcept {
  return std::any_of(regions_.begin(), regions_.end(), [address](const auto& entry) {
    const Region& region = entry.second;
    return region.gpu && address >= region.base && address < region.base + region.bytes;
  });
}

// --- Links

Link* BounceDomain::find(LinkId link) noexcept {
  const auto found = links_.find(link);
  return found == links_.end() ? nullptr : found->second.get();
}

// With slots that the lane below knows.
Result<Link*> BounceDomain::make_link(LinkId id, std::string_view operation) {
  if (find(id) != nullptr) return bounce_error(ErrorCode::kInvalidArgument, operation, "this link exists");
  Result<std::unique_ptr<SlotMemory>> memory = renamed(SlotMemory::create(kSlots));
  if (!memory) return memory.error();
  if (context_ != nullptr) {
    if (Status pinned = renamed(memory.value()->pin(context_)); !pinned) return pinned.error();
  }
  const SlotMemory& slots = *memory.value();
  const Result<uint64_t> rkey = renamed(below_->register_region(slots.data(), slots.size(), slots.fd(), 0));
  if (!rkey) return rkey.error();
  auto link = std::make_unique<Link>(id, std::move(memory.value()), rkey.value());
  Link* made = link.get();
  links_.emplace(id, std::move(link));
  return made;
}

// Which slots the peer is to fill, and what the lane below has to say.
Bytes BounceDomain::greeting(const Link& link, const Bytes& below) const {
  ByteWriter writer;
  writer.number(kMagic);
  writer.number(kVersion);
  writer.number(link.rkey);
  writer.number(reinterpret_cast<uint64_t>(link.memory->data()));
  writer.blob(below);
  return writer.take();
}

// Reads the peer's greeting, and returns the lane below's part of it.
Result<Bytes> BounceDomain::greet(Link& link, std::span<const std::byte> bytes, std::string_view operation) const {
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

Result<Bytes> BounceDomain::offer(LinkId id) {
  const Result<Link*> link = make_link(id, "offer");
  if (!link) return link.error();
  Result<Bytes> below = renamed(below_->offer(id));
  if (!below) {
    abandon(*link.value());
    return below;
  }
  return greeting(*link.value(), below.value());
}

// The lane below has not made the link: it goes at the next turn.
void BounceDomain::abandon(Link& link) {
  link.closed = bounce_error(ErrorCode::kPeerDown, "link", "it was never made");
  link.fenced_below = true;
}

Result<Bytes> BounceDomain::accept(LinkId id, std::span<const std::byte> offer) {
  const Result<Link*> made = make_link(id, "accept");
  if (!made) return made.error();
  Link& link = *made.value();
  const Result<Bytes> theirs = greet(link, offer, "accept");
  Result<Bytes> answer = theirs ? renamed(below_->accept(id, theirs.value())) : theirs;
  if (!answer) {
    abandon(link);
    return answer.error();
  }
  link.ready = true;
  return greeting(link, answer.value());
}

Status BounceDomain::complete(LinkId id, std::span<const std::byte> answer) {
  Link* link = find(id);
  if (link == nullptr || link->closed) {
    return bounce_error(ErrorCode::kInvalidArgument, "complete", "no such offer");
  }
  const Result<Bytes> below = greet(*link, answer, "complete");
  if (!below) return below.error();
  if (Status completed = renamed(below_->complete(id, below.value())); !completed) return completed;
  link->ready = true;
  return {};
}

bool BounceDomain::fence(LinkId id) {
  Link* link = find(id);
  if (link == nullptr) return true;
  close(*link, bounce_error(ErrorCode::kPeerDown, "fence", "the link was fenced on this side"));
  if (!link->fenced_below) link->fenced_below = below_->fence(id);
  end_all(*link);
  return link->fenced_below && link->landing == 0;
}

// Nothing is taken from or for the link any more; what the GPU has of it is waited for.
void BounceDomain::close(Link& link, const Error& error) {
  if (link.closed) return;
  link.closed = error;
  if (!flying(link.id)) return;
  const Status drained = renamed(copier_->drain(kDrainLimit));
  if (!drained && drained.error().code != ErrorCode::kTimeout && !dead_) dead_ = drained.error();
  settle();
}

// Completes what the group waits for. A slow GPU may still gather for it: what it reads goes nowhere.
void BounceDomain::end_all(Link& link) {
  for (std::optional<Outgoing>& out : link.out) {
    // What the lane below has taken it has completed; what the GPU gathers comes back when that ends.
    if (out && !out->posted && out->gathered) pool_free_.push_back(out->pool_slot);
    out.reset();
  }
  link.queue.clear();
  while (!link.batches.empty()) {
    const auto node = link.batches.extract(link.batches.begin());
    const Batch& batch = node.mapped();
    sink_.on_complete(batch.work, batch.error ? &*batch.error : &*link.closed);
  }
}

void BounceDomain::break_down(Link& link, const Error& error) {
  if (link.closed) return;
  close(link, error);
  link.fenced_below = below_->fence(link.id);
  end_all(link);
  sink_.on_link_down(link.id, error, link.fenced_below && link.landing == 0);
}

void BounceDomain::on_link_down(LinkId id, const Error& error, bool fenced) noexcept {
  Link* link = find(id);
  if (link == nullptr || link->closed) return;
  const Error ours = renamed(error);
  close(*link, ours);
  link->fenced_below = fenced;
  end_all(*link);
  sink_.on_link_down(id, ours, fenced && link->landing == 0);
}

// Forgets links that are through, and their slots once the lane below has.
void BounceDomain::reap() {
  for (auto next = links_.begin(); next != links_.end();) {
    const auto entry = next++;
    const Link& link = *entry->second;
    if (!link.closed || !link.fenced_below || flying(link.id)) continue;
    ended_.push_back(std::move(entry->second));
    links_.erase(entry);
  }
  std::erase_if(ended_, [this](const auto& link) { return below_->deregister_region(link->rkey); });
}

}  // namespace kvc::bounce
