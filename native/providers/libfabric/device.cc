#include "providers/libfabric/device.h"

#include <rdma/fi_errno.h>
#include <sys/mman.h>
#include <sys/uio.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <string_view>
#include <thread>
#include <utility>

#include "base/random.h"
#include "cuda/driver.h"
#include "cuda/gpu_memory.h"

namespace kvc::libfabric {
namespace {

bool is_old(const Library& library) { return FI_VERSION_LT(library.version, FI_VERSION(1, 18)); }

// The parts of config.device.
struct Choice {
  std::string provider;  // empty: the library's first provider
  std::string domain;    // empty: the provider's first domain, at config.address
  bool allows_emulation = false;
};

Choice parse(std::string_view device, const Library& library) {
  Choice choice;
  constexpr std::string_view kEmulated = ",emulated";
  if (device.ends_with(kEmulated)) {
    choice.allows_emulation = true;
    device.remove_suffix(kEmulated.size());
  }
  const size_t colon = device.find(':');
  choice.provider = device.substr(0, colon);
  if (colon != std::string_view::npos) choice.domain = device.substr(colon + 1);
  // Today's tcp provider, which has its own reliable datagrams, was called "net" until 1.18.
  if (choice.provider == "tcp" && is_old(library)) choice.provider = "net";
  return choice;
}

bool uses_ip(const fi_info& info) {
  return info.addr_format == FI_SOCKADDR || info.addr_format == FI_SOCKADDR_IN || info.addr_format == FI_SOCKADDR_IN6;
}

// Returns the ordinal of the GPU that holds this memory, or -1 for other memory.
int gpu_of(const std::byte* base) {
  if (!cuda::is_gpu_memory(base)) return -1;
  const auto driver = cuda::driver();
  if (!driver) return -1;
  const auto placement = cuda::placement(*driver.value(), base);
  return placement ? placement.value().device : -1;
}

// Returns the requirements for every provider. Bits of `mode` and `mr_mode` declare what we are ready to do, not
// requirements: the provider clears those that it does not need.
Info make_hints(const Library& library, const Choice& choice, bool gpu_memory) {
  Info hints(library.dupinfo(nullptr), FreeInfo{&library});
  if (hints == nullptr) return hints;
  hints->caps = FI_MSG | FI_RMA | FI_SEND | FI_RECV | FI_WRITE | FI_REMOTE_WRITE;
  hints->mode = FI_CONTEXT | FI_CONTEXT2 | FI_RX_CQ_DATA;
  hints->ep_attr->type = FI_EP_RDM;
  // A completion has to mean that the bytes are in the peer's memory. No order is requested. Every write is counted by
  // itself, so that EFA's unordered datagrams and tcp's streams are treated alike.
  hints->tx_attr->op_flags = FI_COMPLETION | FI_DELIVERY_COMPLETE;
  // FI_THREAD_DOMAIN, by which providers leave out locks, is not safe here. The control thread closes endpoints and
  // registers memory while the driving thread works on other endpoints. Those share more than the manual says ("control
  // interfaces are always considered thread safe"):
  // - tcp: one progress engine
  // - EFA: its queues of peers and its table of queue pairs (srx_lock)
  // - verbs: its pool of work requests
  // No call waits for another for longer than a short lock.
  hints->domain_attr->threading = FI_THREAD_SAFE;
  // The provider queues, or returns FI_EAGAIN, in cases in which it would otherwise lose something.
  hints->domain_attr->resource_mgmt = FI_RM_ENABLED;
  hints->domain_attr->mr_mode =
      FI_MR_LOCAL | FI_MR_RAW | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY | FI_MR_ENDPOINT;
  if (gpu_memory) {
    hints->caps |= FI_HMEM;
    hints->domain_attr->mr_mode |= FI_MR_HMEM;
  }
  // strdup(), because freeinfo() frees the name.
  if (!choice.provider.empty()) hints->fabric_attr->prov_name = strdup(choice.provider.c_str());
  return hints;
}

// Returns the reason for which an entry of fi_getinfo()'s list must not be used, whatever it reports; null if no fault
// is known. A peer that dies may cost its link, and nothing else.
const char* known_fault(const fi_info& info, const Library& library) {
  const std::string_view name = info.fabric_attr->prov_name;
  // The ofi_rxm layer over tcp, or over "net", as tcp's successor was called in 1.17. A counted write of the peer may
  // be cut short, because the peer died or because we closed the endpoint to fence it. There that is an error without a
  // context. ofi_rxm follows the context all the same (rxm_handle_comp_error()), to address 0. Seen with 1.17 and
  // 2.5.1, and the code is unchanged in 2.6. Nothing is lost by the refusal: "net" and, since 1.18, tcp have their own
  // reliable datagrams.
  if (name == "tcp;ofi_rxm" || name == "net;ofi_rxm") {
    return "ofi_rxm over tcp crashes when its peer dies or is fenced amid a write: use tcp by itself";
  }
  // Until 2.4 two processes guard their shared state by spin locks in the shared memory itself. A process holds its own
  // lock in 1.17 while it handles arrivals, copies of pages included. If it is killed then, its peers spin in
  // fi_writemsg() for ever: seen with 1.17, in one of a few kills amid writes. 2.5 has no such lock any more.
  if (name == "shm" && FI_VERSION_LT(library.version, FI_VERSION(2, 5))) {
    return "shm before libfabric 2.5 hangs when its peer is killed while it holds a lock: use the host lane";
  }
  // Over software NICs, with 1.17, three of five runs of tests/conformance crashed as links were closed. With 2.5.1
  // three of three passed.
  if (name == "verbs;ofi_rxm" && FI_VERSION_LT(library.version, FI_VERSION(2, 5))) {
    return "verbs;ofi_rxm before libfabric 2.5 crashes when a link is closed: use the verbs lane";
  }
  return nullptr;
}

// Whether an entry of fi_getinfo()'s list fulfils the contract, on the device that was chosen. The names are compared
// here, because not every provider compares them: ofi_rxm 1.17 returns any. EFA's have a suffix: "rdmap0s31-rdm".
bool fits(const fi_info& info, const Choice& choice, const Library& library) {
  if (known_fault(info, library) != nullptr) return false;
  const std::string_view name = info.domain_attr->name;
  const bool named = choice.domain.empty() || name == choice.domain || name.starts_with(choice.domain + "-");
  // 4 bytes of remote CQ data: verbs and EFA carry them, and an immediate has no more.
  return named && info.domain_attr->cq_data_size >= sizeof(uint32_t) &&
         info.domain_attr->mr_key_size <= sizeof(uint64_t);
}

// Returns the entry to use: the one of the provider with exactly this name ("tcp" rather than "tcp;ofi_rxm"), or else
// the first usable one.
fi_info* pick(fi_info* list, const Choice& choice, const Library& library) {
  fi_info* first = nullptr;
  for (fi_info* info = list; info != nullptr; info = info->next) {
    if (!fits(*info, choice, library)) continue;
    if (info->fabric_attr->prov_name == choice.provider) return info;
    if (first == nullptr) first = info;
  }
  return first;
}

Result<Info> find(const Library& library, const Choice& choice, const char* address, bool gpu_memory) {
  const std::string what = choice.provider.empty() ? "" : " '" + choice.provider + "'";
  const Info hints = make_hints(library, choice, gpu_memory);
  if (hints == nullptr) return fabric_error(ErrorCode::kResources, "open", "out of memory");
  fi_info* list = nullptr;
  // FI_SOURCE: the node names our own end.
  const uint64_t flags = address == nullptr ? 0 : FI_SOURCE | FI_NUMERICHOST;
  const int result = library.getinfo(library.interface_version(), address, nullptr, flags, hints.get(), &list);
  const Info owner(list, FreeInfo{&library});
  fi_info* info = result == 0 ? pick(list, choice, library) : nullptr;
  if (info == nullptr) {
    for (const fi_info* entry = list; entry != nullptr; entry = entry->next) {
      if (entry->fabric_attr->prov_name != choice.provider) continue;  // another provider than the configured one
      if (const char* fault = known_fault(*entry, library)) {
        return fabric_error(ErrorCode::kRefused, "open", "libfabric " + library.description() + ": " + fault);
      }
    }
    Error error = fabric_error("open", "fi_getinfo", result == 0 ? -FI_ENODATA : result);
    error.code = ErrorCode::kRefused;
    error.message += ": libfabric " + library.description() + " has no provider" + what +
                     " with reliable datagrams, counted writes (4 bytes of remote CQ data) and delivery-complete" +
                     (choice.domain.empty() ? "" : " on a device named " + choice.domain) +
                     (address == nullptr ? "" : " at address " + std::string(address)) +
                     "; `fi_info` lists the available ones";
    return error;
  }
  Info chosen(library.dupinfo(info), FreeInfo{&library});
  // The default of every operation. Some providers return it empty although it was requested.
  chosen->tx_attr->op_flags = hints->tx_attr->op_flags;
  chosen->tx_attr->size = std::min(chosen->tx_attr->size, kTransmits);
  chosen->rx_attr->size = std::min(chosen->rx_attr->size, kReceives);
  return chosen;
}

}  // namespace

Result<std::shared_ptr<const Device>> Device::open(const DomainConfig& config, const Tuning& tuning) {
  const Result<const Library*> loaded = libfabric::library();
  if (!loaded) return loaded.error();
  const Library& library = *loaded.value();
  const Choice choice = parse(config.device, library);
  // If the machine has a GPU, a NIC must declare whether it reaches GPU memory (EFA's "HMEM", by dmabuf or peer
  // memory). Providers without a NIC are not asked: they would reach it by copies through the CUDA API.
  const bool is_nic = choice.provider.starts_with("efa") || choice.provider.starts_with("verbs");
  const bool asks_for_gpus = is_nic && cuda::driver().ok();
  Result<Info> info = find(library, choice, nullptr, asks_for_gpus);
  if (!info && asks_for_gpus) info = find(library, choice, nullptr, false);
  if (!info) return info.error();
  const bool gpu_memory = (info.value()->caps & FI_HMEM) != 0;
  // Without a device's name, the address selects the device: a provider over IP has one for each interface.
  if (choice.domain.empty() && uses_ip(*info.value())) {
    Choice same = choice;
    same.provider = info.value()->fabric_attr->prov_name;
    info = find(library, same, config.address.c_str(), gpu_memory);
    if (!info) return info.error();
  }
  std::shared_ptr<Device> device(new Device(library, std::move(info.value())));
  device->allows_emulation_ = choice.allows_emulation;
  device->memory_per_endpoint_ = tuning.memory_per_endpoint;
  device->takes_turns_ =
      device->provider() == "net" || (device->provider() == "tcp" && FI_VERSION_LT(library.version, FI_VERSION(1, 19)));
  if (Status started = device->start(); !started) return started.error();
  return std::shared_ptr<const Device>(std::move(device));
}

Status Device::start() {
  fid_fabric* fabric = nullptr;
  if (const int result = library_.fabric(info_->fabric_attr, &fabric, nullptr); result != 0) {
    return fabric_error("open", "fi_fabric", result);
  }
  fabric_.reset(fabric);
  fid_domain* domain = nullptr;
  if (const int result = fi_domain(fabric, info_.get(), &domain, nullptr); result != 0) {
    return fabric_error("open", "fi_domain", result);
  }
  domain_.reset(domain);
  // "net" 1.17 has a descriptor, but its fi_trywait() never makes it unreadable again.
  waits_by_descriptor_ = provider() != "net";
  Result<Fid<fid_cq>> probe = open_queue(1);
  if (waits_by_descriptor_) {
    // Some providers have no descriptor, and some accept the request and then have none (udp;ofi_rxd).
    int descriptor = -1;
    waits_by_descriptor_ = probe && fi_control(&probe.value()->fid, FI_GETWAIT, &descriptor) == 0;
    if (!waits_by_descriptor_) probe = open_queue(1);
  }
  if (!probe) return probe.error();
  return {};
}

Result<Fid<fid_cq>> Device::open_queue(size_t entries) const {
  fi_cq_attr attributes{};
  attributes.size = entries;
  attributes.format = FI_CQ_FORMAT_DATA;
  attributes.wait_obj = waits_by_descriptor_ ? FI_WAIT_FD : FI_WAIT_NONE;
  fid_cq* queue = nullptr;
  if (const int result = fi_cq_open(domain_.get(), &attributes, &queue, nullptr); result != 0) {
    return fabric_error("open", "fi_cq_open", result);
  }
  return Fid<fid_cq>(queue);
}

std::string Device::description() const {
  return provider() + " " + info_->domain_attr->name + ", library " + library_.description();
}

uint64_t Device::bits_per_second() const noexcept {
  const fid_nic* nic = info_->nic;
  return nic == nullptr || nic->link_attr == nullptr ? 0 : nic->link_attr->speed;
}

bool Device::close(fid& object) const noexcept {
  constexpr int kTries = 100;
  for (int tries = 0; tries < kTries; ++tries) {
    {
      const auto own_turn = turn();
      if (fi_close(&object) != -FI_EBUSY) return true;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return false;
}

void CloseMemory::operator()(fid_mr* memory) const noexcept { device->close(memory->fid); }

Result<Memory> Device::register_memory(std::byte* base, uint64_t bytes, uint64_t access, fid_ep* endpoint) const {
  // The library may be newer than our headers, and its fi_mr_attr longer. The additional fields must exist and be 0.
  struct {
    fi_mr_attr attributes{};
    std::byte later_fields[128]{};
  } request;
  const iovec range{base, bytes};
  request.attributes.mr_iov = &range;
  request.attributes.iov_count = 1;
  request.attributes.access = access;
  request.attributes.iface = FI_HMEM_SYSTEM;
  const int gpu = gpu_of(base);
  if (gpu >= 0) {
    if (!takes_gpu_memory()) {
      return fabric_error(ErrorCode::kNotReachable, "register_memory",
                          "this is GPU memory, and " + provider() +
                              " does not reach it here (FI_HMEM): EFA needs libfabric 1.18 or later, and a kernel with "
                              "dmabuf or the driver's peer memory module; or use the provider bounce over libfabric, "
                              "which goes through host memory");
    }
    if (Status synchronous = cuda::make_synchronous(base); !synchronous) return synchronous.error();
    request.attributes.iface = FI_HMEM_CUDA;
    request.attributes.device.cuda = gpu;
  }
  // FI_MR_ALLOCATED: "physical pages must be there when memory is registered" (fi_mr(3)). The call fails on kernels
  // before 5.14, where the provider's own pinning allocates the pages.
  if (needs(FI_MR_ALLOCATED) && gpu < 0) ::madvise(base, bytes, MADV_POPULATE_WRITE);
  fid_mr* region = nullptr;
  int result = 0;
  do {
    // The key must not exceed the provider's key size, and must not be 2^64-1, which means "none".
    if (!needs(FI_MR_PROV_KEY)) {
      request.attributes.requested_key = random_key() >> (64 - 8 * info_->domain_attr->mr_key_size) >> 1;
    }
    const auto own_turn = turn();
    result = fi_mr_regattr(domain_.get(), &request.attributes, 0, &region);
  } while (result == -FI_ENOKEY && !needs(FI_MR_PROV_KEY));  // that key is in use
  if (result != 0) return fabric_error("register_memory", "fi_mr_regattr", result);
  Memory owner(region, CloseMemory{this});
  if (needs(FI_MR_ENDPOINT)) {
    result = endpoint == nullptr ? -FI_EINVAL : fi_mr_bind(region, &endpoint->fid, 0);
    if (result == 0) result = fi_mr_enable(region);
    if (result != 0) return fabric_error("register_memory", "fi_mr_bind and fi_mr_enable", result);
  }
  return owner;
}

Result<RemoteMemory> Device::describe(fid_mr& memory, const std::byte* base, uint64_t bytes) const {
  RemoteMemory told;
  told.bytes = bytes;
  // With FI_MR_VIRT_ADDR, remote memory is addressed by its virtual address. Otherwise it begins at 0.
  told.address = needs(FI_MR_VIRT_ADDR) ? reinterpret_cast<uintptr_t>(base) : 0;
  if (needs(FI_MR_RAW)) {
    size_t length = kMaxKeyBytes;
    told.key.resize(length);
    const int result = fi_mr_raw_attr(&memory, &told.address, reinterpret_cast<uint8_t*>(told.key.data()), &length, 0);
    if (result != 0) return fabric_error("register_memory", "fi_mr_raw_attr", result);
    told.key.resize(std::max(length, sizeof(uint64_t) + 1));  // longer than a plain key, which distinguishes the two
    return told;
  }
  const uint64_t key = fi_mr_key(&memory);
  told.key.resize(sizeof(key));
  std::memcpy(told.key.data(), &key, sizeof(key));
  return told;
}

Result<PeerMemory> Device::map(const RemoteMemory& memory) const {
  PeerMemory mapped{memory.address, memory.bytes};
  if (memory.key.size() == sizeof(mapped.key)) {
    std::memcpy(&mapped.key, memory.key.data(), sizeof(mapped.key));
    return mapped;
  }
  Bytes raw = memory.key;
  const int result =
      fi_mr_map_raw(domain_.get(), memory.address, reinterpret_cast<uint8_t*>(raw.data()), raw.size(), &mapped.key, 0);
  if (result != 0) return fabric_error("connect", "fi_mr_map_raw", result);
  mapped.mapping = {domain_.get(), [key = mapped.key](fid_domain* domain) { fi_mr_unmap_key(domain, key); }};
  return mapped;
}

}  // namespace kvc::libfabric
