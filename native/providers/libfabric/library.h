// The libfabric library, opened at run time: the wheel loads on machines that have none.
//
// Only the functions that the library exports by name are looked up here; everything else of its interface is inline
// code in its headers, which calls through the function tables of the objects that these return.
//
// Why the headers are Debian's libfabric-dev and not declarations of our own: the interface is some forty structures
// of function pointers whose layout is the ABI. A second copy of them would be one to keep in step by hand, and an
// error in it would be memory corruption. A build without the headers works, and its create() says what is missing.
#pragma once

#include <rdma/fabric.h>

#include <cstdint>
#include <string>

#include "base/error.h"

namespace kvc::libfabric {

struct Library {
  std::string path;      // as the dynamic linker found it
  uint32_t version = 0;  // the library's own: FI_VERSION(major, minor)
  decltype(&::fi_getinfo) getinfo = nullptr;
  decltype(&::fi_freeinfo) freeinfo = nullptr;
  decltype(&::fi_dupinfo) dupinfo = nullptr;
  decltype(&::fi_fabric) fabric = nullptr;
  decltype(&::fi_strerror) strerror = nullptr;

  // The interface version that we speak with it. 1.18: "RDMA is enabled by default on any hardware which supports it"
  // only for programs that ask for 1.18 or later (fi_efa(7), FI_OPT_EFA_USE_DEVICE_RDMA). Not later: from 1.20 on a
  // provider may expect fields that our headers do not have.
  uint32_t interface_version() const noexcept {
    return FI_VERSION_LT(version, FI_VERSION(1, 18)) ? version : FI_VERSION(1, 18);
  }
  // "1.17 (/usr/lib/x86_64-linux-gnu/libfabric.so.1)".
  std::string description() const;
};

// The library, opened at the first call and never closed: its providers start threads and install signal handlers.
// It is looked for in this order:
//   1. the path in the environment variable KV_CONNECTOR_LIBFABRIC, and then nowhere else;
//   2. where the dynamic linker looks for libfabric.so.1 (LD_LIBRARY_PATH, ldconfig: Debian's libfabric1, AWS's
//      installer);
//   3. in the Python environment that kv-connector is installed in (or that is active): lib/mpich/libfabric.so.1, which
//      `pip install mpich` puts there.
// The first call sets FI_PROVIDER_PATH for the libraries of 1 and 3: libfabric finds its plug-ins by that variable alone, and
// has no function for it. setenv() is undefined while another thread reads the environment, so the engine makes the first
// call by load_libraries(), before it has threads; from then on any thread may call.
// kRefused with what was tried and what to install.
Result<const Library*> library();

// An Error of this provider. `code` is what a libfabric function returned (negative), 0 where it was none.
Error fabric_error(ErrorCode code, std::string operation, std::string message);
Error fabric_error(std::string operation, const char* call, ssize_t result);

}  // namespace kvc::libfabric
