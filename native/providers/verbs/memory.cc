#include "providers/verbs/memory.h"

#include <cerrno>
#include <optional>
#include <string>
#include <utility>

#include "cuda/gpu_memory.h"

namespace kvc::verbs {

namespace {

// Relaxed ordering lets the pages of a write reach memory in any order, which PCIe needs for full rate on many hosts.
// The count still proves visibility: what the worker acts on is the completion entry of the WriteImm. On one queue pair
// that comes after all earlier writes of the batch, and the NIC writes it into the completion queue without the relaxed
// attribute, so PCIe does not let it pass any data written before it. ibv_reg_mr(3) promises the same in its own words:
// "Relaxed ordering does not change completion semantics, such as data visibility."
constexpr unsigned kAccess =
    abi::IBV_ACCESS_LOCAL_WRITE | abi::IBV_ACCESS_REMOTE_WRITE | abi::IBV_ACCESS_RELAXED_ORDERING;

}  // namespace

Result<Owned<abi::ibv_mr>> register_memory(const Device& device, std::byte* base, uint64_t bytes, bool& host) {
  const Library& library = device.library();
  const auto address = reinterpret_cast<uint64_t>(base);
  std::string tried;
  host = !cuda::is_gpu_memory(base);
  if (!host && library.reg_dmabuf_mr != nullptr) {
    Result<cuda::DmaBuf> exported = cuda::export_dma_buf(base, bytes);
    if (exported.ok()) {
      abi::ibv_mr* const mr = library.reg_dmabuf_mr(device.memory_pd(), exported.value().offset, bytes, address,
                                                    exported.value().fd.get(), static_cast<int>(kAccess));
      if (mr != nullptr) return owned(mr, library.dereg_mr);
      tried = "ibv_reg_dmabuf_mr: " + system_error({}, {}, errno).message + "; ";
    } else {
      tried = exported.error().message + "; ";
    }
  }
  abi::ibv_mr* const mr = library.reg_mr_iova2(device.memory_pd(), base, bytes, address, kAccess);
  if (mr != nullptr) return owned(mr, library.dereg_mr);
  const int error = errno;
  std::string hint;
  if (!host) {
    hint =
        "; for GPU memory the kernel needs DMA-BUF support (5.12, open NVIDIA driver) or the nvidia_peermem module; or "
        "use the "
        "provider bounce, which goes through host memory";
  } else if (error == ENOMEM) {
    hint = "; is the limit of locked memory (ulimit -l) large enough?";
  }
  return verbs_error(
      ErrorCode::kResources, "register_region",
      tried + "ibv_reg_mr of " + std::to_string(bytes) + " bytes: " + system_error({}, {}, error).message + hint);
}

Result<uint64_t> RegionTable::add(const Device& device, std::byte* base, uint64_t bytes) {
  auto region = std::make_unique<Region>();
  region->base = base;
  region->bytes = bytes;
  Result<Owned<abi::ibv_mr>> mr = register_memory(device, base, bytes, region->host);
  if (!mr) return mr.error();
  region->mr = std::move(mr.value());
  const uint64_t key = static_cast<uint64_t>(key_half_) << 32 | region->mr->rkey;
  regions_.emplace(key, std::move(region));
  return key;
}

bool RegionTable::remove(uint64_t key) {
  const auto found = regions_.find(key);
  if (found == regions_.end()) return true;
  // The NIC reads from it: without its key the queue pair would break.
  if (found->second->in_flight > 0) return false;
  if (last_ == found->second.get()) last_ = nullptr;
  regions_.erase(found);
  return true;
}

Region* RegionTable::find(const std::byte* begin, const std::byte* end) noexcept {
  const auto holds = [&](const Region& region) { return begin >= region.base && end <= region.base + region.bytes; };
  if (last_ != nullptr && holds(*last_)) return last_;
  for (const auto& [key, region] : regions_) {
    if (holds(*region)) return last_ = region.get();
  }
  return nullptr;
}

}  // namespace kvc::verbs
