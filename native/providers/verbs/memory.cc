#include "providers/verbs/memory.h"

#include <cerrno>
#include <string>
#include <utility>

#include "cuda/gpu_memory.h"

namespace kvc::verbs {

namespace {

// Relaxed ordering lets the pages of a write reach memory in any order, which PCIe needs for full rate on many hosts.
// The count still proves visibility in host memory, because the transfer thread acts on the completion entry of the
// WriteImm. On one queue pair that entry comes after all earlier writes of the batch. The NIC writes it into the
// completion queue without the relaxed attribute, so PCIe does not let it pass any data written before it.
// ibv_reg_mr(3) promises the same: "Relaxed ordering does not change completion semantics, such as data visibility."
//
// That holds if data and entry have the same destination. The entry of a write into a GPU's memory goes to the host,
// and proves nothing about data in flight to the GPU. A kernel launched after the count sees the data by CUDA's rules.
// A kernel that runs already does not. For such kernels the transfer engine flushes (GPUDirect RDMA) before it stores a
// completion word.
constexpr unsigned kAccess =
    abi::IBV_ACCESS_LOCAL_WRITE | abi::IBV_ACCESS_REMOTE_WRITE | abi::IBV_ACCESS_RELAXED_ORDERING;

Error refusal(uint64_t bytes, int error_number, const std::string& tried, const char* hint) {
  return verbs_error(ErrorCode::kResources, "register_memory",
                     tried + "ibv_reg_mr of " + std::to_string(bytes) +
                         " bytes: " + system_error({}, {}, error_number).message + hint);
}

// Registers GPU memory as a DMA-BUF, or else through the peer memory module (nvidia_peermem).
Result<Owned<abi::ibv_mr>> register_gpu_memory(const Device& device, std::byte* base, uint64_t bytes) {
  // Copies that the user has issued into it must have ended before the NIC reads it.
  if (Status synchronous = cuda::make_synchronous(base); !synchronous) return synchronous.error();
  const Library& library = device.library();
  const auto address = reinterpret_cast<uint64_t>(base);
  std::string tried;
  if (library.reg_dmabuf_mr != nullptr) {
    Result<cuda::DmaBuf> exported = cuda::export_dma_buf(base, bytes);
    if (exported.ok()) {
      abi::ibv_mr* const mr = library.reg_dmabuf_mr(device.shared_pd(), exported.value().offset, bytes, address,
                                                    exported.value().fd.get(), static_cast<int>(kAccess));
      if (mr != nullptr) return owned(mr, library.dereg_mr);
      tried = "ibv_reg_dmabuf_mr: " + system_error({}, {}, errno).message + "; ";
    } else {
      tried = exported.error().message + "; ";
    }
  }
  abi::ibv_mr* const mr = library.reg_mr_iova2(device.shared_pd(), base, bytes, address, kAccess);
  if (mr != nullptr) return owned(mr, library.dereg_mr);
  return refusal(bytes, errno, tried,
                 "; for GPU memory the kernel needs DMA-BUF support (5.12, open NVIDIA driver) or the nvidia_peermem "
                 "module; or use the provider bounce, which goes through host memory");
}

}  // namespace

Result<Owned<abi::ibv_mr>> register_host_memory(const Device& device, std::byte* base, uint64_t bytes) {
  const Library& library = device.library();
  abi::ibv_mr* const mr =
      library.reg_mr_iova2(device.shared_pd(), base, bytes, reinterpret_cast<uint64_t>(base), kAccess);
  if (mr != nullptr) return owned(mr, library.dereg_mr);
  const int error = errno;
  return refusal(bytes, error, {}, error == ENOMEM ? "; is the limit of locked memory (ulimit -l) large enough?" : "");
}

Result<std::unique_ptr<Registration>> MemoryRegistration::create(const Device& device, uint32_t key_half,
                                                                 const MemoryRange& range) {
  const bool host = !cuda::is_gpu_memory(range.base);
  Result<Owned<abi::ibv_mr>> mr = host ? register_host_memory(device, range.base, range.bytes)
                                       : register_gpu_memory(device, range.base, range.bytes);
  if (!mr) return mr.error();
  return std::unique_ptr<Registration>(
      std::make_unique<MemoryRegistration>(range, key_half, std::move(mr.value()), host));
}

}  // namespace kvc::verbs
