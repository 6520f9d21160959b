#include "providers/libfabric/efa.h"

#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>

namespace kvc::libfabric {
namespace {

// Names newer than our headers. Their values are the interface's ABI (rdma/fi_endpoint.h and fi_ext.h of 1.18 and
// later).
constexpr int kCudaApiPermitted = 10;                  // FI_OPT_CUDA_API_PERMITTED
constexpr int kSharedMemoryPermitted = 11;             // FI_OPT_SHARED_MEMORY_PERMITTED
constexpr int kEfaEmulatedWrite = -(0xefa << 16) + 2;  // FI_OPT_EFA_EMULATED_WRITE
constexpr int kEfaUseDeviceRdma = -(0xefa << 16) + 4;  // FI_OPT_EFA_USE_DEVICE_RDMA

void set(fid_ep& endpoint, int option, bool value) {
  (void)fi_setopt(&endpoint.fid, FI_OPT_ENDPOINT, option, &value, sizeof(value));
}

}  // namespace

void configure_efa(fid_ep& endpoint) {
  // Peers of the same machine are also written through the NIC, for one path with one behaviour. Another reason:
  // "FI_WAIT_FD is not supported for RDM endpoints with SHM transfers enabled".
  set(endpoint, kSharedMemoryPermitted, false);
  // "Control endpoint's behavior in making calls to CUDA API": such calls could wait for kernels of the model that runs
  // on the same GPU. GPU memory goes by peer-to-peer DMA or not at all.
  set(endpoint, kCudaApiPermitted, false);
  // "If the hardware does not support RDMA and the argument is true, then fi_setopt will return -FI_EOPNOTSUPP":
  // check_efa() reports that.
  set(endpoint, kEfaUseDeviceRdma, true);
}

Status check_efa(const Device& device, fid_ep& endpoint) {
  if (device.allows_emulation()) return {};
  // The manual: "Used to query the EFA provider to determine if the endpoint is emulating Read, Write, and Atomic
  // operations (return value is true), or if [...] assisted by hardware support". A library without this option (before
  // 1.18) emulates.
  bool emulated = true;
  size_t length = sizeof(emulated);
  const int result = fi_getopt(&endpoint.fid, FI_OPT_ENDPOINT, kEfaEmulatedWrite, &emulated, &length);
  if (result == 0 && !emulated) return {};
  return fabric_error(ErrorCode::kRefused, "open",
                      "this EFA device or libfabric " + device.library().description() +
                          " has no RDMA write, and would emulate it on the peer's CPU: use an instance type with EFA "
                          "RDMA write and libfabric 1.18 or later, or allow it: device 'efa,emulated'");
}

}  // namespace kvc::libfabric
