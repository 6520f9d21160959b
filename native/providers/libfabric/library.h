// The libfabric library, opened at run time, so that the wheel loads on machines without it.
//
// Only the functions that the library exports by name are looked up here. The rest of its interface is inline code in
// its headers, which calls through the function tables of the objects that these functions return.
//
// The headers are Debian's libfabric-dev, not our own declarations, for this reason: the interface is some forty
// structures of function pointers whose layout is the ABI. A second copy would have to be kept in step by hand, and an
// error in it would be memory corruption. A build without the headers works, and its create() reports what is missing.
#pragma once

#include <rdma/fabric.h>

#include <cstdint>
#include <string>

#include "base/error.h"

namespace kvc::libfabric {

struct Library {
  std::string path;      // the path that the dynamic linker found
  uint32_t version = 0;  // the library's version: FI_VERSION(major, minor)
  decltype(&::fi_getinfo) getinfo = nullptr;
  decltype(&::fi_freeinfo) freeinfo = nullptr;
  decltype(&::fi_dupinfo) dupinfo = nullptr;
  decltype(&::fi_fabric) fabric = nullptr;
  decltype(&::fi_strerror) strerror = nullptr;

  // The interface version that is requested from the library. 1.18, because "RDMA is enabled by default on any hardware
  // which supports it" only for programs that request 1.18 or later (fi_efa(7), FI_OPT_EFA_USE_DEVICE_RDMA). Not later,
  // because from 1.20 on a provider may expect fields that our headers do not have.
  uint32_t interface_version() const noexcept {
    return FI_VERSION_LT(version, FI_VERSION(1, 18)) ? version : FI_VERSION(1, 18);
  }
  // Describes the library: "1.17 (/usr/lib/x86_64-linux-gnu/libfabric.so.1)".
  std::string description() const;
};

// Returns the library. The first call opens it. It is never closed, because its providers start threads and install
// signal handlers. It is searched in this order:
//   1. the path in the environment variable KV_CONNECTOR_LIBFABRIC, and then nowhere else;
//   2. where the dynamic linker looks for libfabric.so.1 (LD_LIBRARY_PATH, ldconfig: Debian's libfabric1, AWS's
//      installer);
//   3. in the Python environment in which kv-connector is installed (or which is active): lib/mpich/libfabric.so.1,
//      which `pip install mpich` puts there.
// The first call sets FI_PROVIDER_PATH for the libraries of 1 and 3: libfabric finds its plug-ins by that variable
// alone, and has no function for it. setenv() is undefined while another thread reads the environment. So the transfer
// engine makes the first call by load_libraries(), before it has threads. From then on any thread may call.
// kRefused: no library was found. The error names what was tried and what to install.
Result<const Library*> library();

// Returns an Error of this provider. `result` is a libfabric function's (negative) result, whose text becomes part of
// the message.
Error fabric_error(ErrorCode code, std::string operation, std::string message);
Error fabric_error(std::string operation, const char* call, ssize_t result);

}  // namespace kvc::libfabric
