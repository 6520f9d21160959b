// Device: one opened libfabric domain (a NIC, or a stand-in for one), with the requirements that it has.
#pragma once

#include <rdma/fabric.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_eq.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "lane/domain.h"
#include "providers/libfabric/library.h"
#include "providers/libfabric/tuning.h"
#include "providers/libfabric/wire.h"

namespace kvc::libfabric {

// The most operations that an endpoint carries out at a time; a provider may take fewer. 512 writes of 16 KiB are the 8
// MiB that the transfer engine keeps in flight. Providers set memory aside for each: the ofi_rxm layer 16 KiB per
// receive.
inline constexpr size_t kTransmits = 512;
inline constexpr size_t kReceives = 256;

class Device;

struct CloseFid {
  template <typename Object>
  void operator()(Object* object) const noexcept {
    fi_close(&object->fid);
  }
};
// A libfabric object that closes itself.
template <typename Object>
using Fid = std::unique_ptr<Object, CloseFid>;

struct CloseMemory {
  const Device* device = nullptr;
  void operator()(fid_mr* memory) const noexcept;  // Device::close()
};
// Registered memory. It must end before its device.
using Memory = std::unique_ptr<fid_mr, CloseMemory>;

struct FreeInfo {
  const Library* library;
  void operator()(fi_info* info) const noexcept { library->freeinfo(info); }
};
using Info = std::unique_ptr<fi_info, FreeInfo>;

// A peer's memory, as a write names it. It must end before its device.
struct PeerMemory {
  uint64_t address = 0;  // the peer's address of offset 0
  uint64_t bytes = 0;
  uint64_t key = 0;
  std::shared_ptr<void> mapping{};  // for a raw key, which is unmapped with the last copy

  bool contains(uint64_t offset, uint64_t length) const noexcept { return fits(offset, length, bytes); }
};

// Immutable once it is open. Providers are required to be thread-safe (FI_THREAD_SAFE). The memory thread registers
// memory, and the control thread makes and closes endpoints. Meanwhile the driving thread works on other endpoints of
// the same libfabric domain.
class Device {
 public:
  // Opens a device. kRefused if the library or the provider is not usable; the error names what is missing. Control
  // thread; blocks.
  static Result<std::shared_ptr<const Device>> open(const DomainConfig& config, const Tuning& tuning);

  fi_info& info() const noexcept { return *info_; }
  fid_fabric& fabric() const noexcept { return *fabric_; }
  fid_domain& domain() const noexcept { return *domain_; }
  const Library& library() const noexcept { return library_; }
  std::string provider() const { return info_->fabric_attr->prov_name; }

  // Describes the device: "tcp eth0, libfabric 1.17 (...)".
  std::string description() const;
  uint64_t bits_per_second() const noexcept;

  bool needs(uint64_t mr_mode_bit) const noexcept { return (info_->domain_attr->mr_mode & mr_mode_bit) != 0; }
  // Whether each endpoint registers the regions that it uses.
  bool memory_per_endpoint() const noexcept { return memory_per_endpoint_ || needs(FI_MR_ENDPOINT); }
  // Whether immediates use up receives that the target posted (FI_RX_CQ_DATA), as on a verbs queue pair.
  bool immediates_take_receives() const noexcept { return (info_->mode & FI_RX_CQ_DATA) != 0; }
  // Whether only processes of this machine can be reached.
  bool is_local() const { return provider() == "shm"; }
  bool is_efa() const { return provider().rfind("efa", 0) == 0; }
  bool allows_emulation() const noexcept { return allows_emulation_; }
  // Whether the NIC reads and writes the memory of GPUs (FI_HMEM).
  bool takes_gpu_memory() const noexcept { return (info_->caps & FI_HMEM) != 0; }
  // Whether completion queues have a descriptor to sleep on. Otherwise they have to be polled.
  bool waits_by_descriptor() const noexcept { return waits_by_descriptor_; }
  // Whether accepted connections that have not identified themselves outlive their endpoint. They lead to its freed
  // memory once they send something (a known "TODO" in xnet_pep_close(), from net 1.16 to tcp 2.6). Any process that
  // reaches the port can make such a connection.
  bool leaves_half_open() const { return provider() == "net" || provider() == "tcp"; }
  // Returns the longest write, which is also the longest page: the pieces of a page could not be counted as one.
  uint64_t max_write() const noexcept { return info_->ep_attr->max_msg_size; }

  // Registers memory for local use (`access` of FI_SEND and FI_RECV) or for peers' writes as well (FI_WRITE and
  // FI_REMOTE_WRITE). GPU memory returns kNotReachable unless takes_gpu_memory(). If the device requires regions bound
  // to an endpoint (FI_MR_ENDPOINT), the memory is bound to `endpoint`. Any thread; blocks: seconds for many GiB.
  Result<Memory> register_memory(std::byte* base, uint64_t bytes, uint64_t access, fid_ep* endpoint) const;
  // Returns the description by which a peer can write there. Any thread; does not block.
  Result<RemoteMemory> describe(fid_mr& memory, const std::byte* base, uint64_t bytes) const;
  // Converts a peer's description for use in writes; a raw key is unpacked. Any thread; does not block.
  Result<PeerMemory> map(const RemoteMemory& memory) const;
  // Opens a queue of at least `entries`, in FI_CQ_FORMAT_DATA. Control thread.
  Result<Fid<fid_cq>> open_queue(size_t entries) const;
  // Closes memory or an endpoint. If it is still bound or in use by the provider (-FI_EBUSY), waits up to 100 ms, far
  // longer than an operation takes to end. Returns false if that was not enough. Blocks.
  bool close(fid& object) const noexcept;

  // Held while memory is registered and while anything is opened or closed, and around each call that may carry out a
  // peer's write. It locks only tcp before 1.19, which searches its table of keys under one lock and changes it under
  // another.
  std::unique_lock<std::mutex> turn() const {
    return takes_turns_ ? std::unique_lock(turns_) : std::unique_lock<std::mutex>();
  }

 private:
  Device(const Library& library, Info info) : library_(library), info_(std::move(info)) {}
  Status start();

  const Library& library_;
  Info info_;
  bool allows_emulation_ = false;
  bool memory_per_endpoint_ = false;
  bool waits_by_descriptor_ = true;
  bool takes_turns_ = false;
  mutable std::mutex turns_;
  Fid<fid_fabric> fabric_;
  Fid<fid_domain> domain_;
};

}  // namespace kvc::libfabric
