#include "providers/verbs/library.h"

#include <dlfcn.h>

#include <cstring>
#include <string>

namespace kvc::verbs {

namespace {

constexpr const char* kInstall =
    "install rdma-core (Debian and Ubuntu: apt install ibverbs-providers; RHEL: dnf install libibverbs)";

Result<Library> open_library() {
  void* const handle = ::dlopen("libibverbs.so.1", RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    return verbs_error(ErrorCode::kRefused, "open", std::string(::dlerror()) + ": " + kInstall);
  }
  Library library{};
  std::string missing;
  const auto find = [&](auto*& function, const char* name, bool required = true) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(::dlsym(handle, name));
    if (function == nullptr && required) missing += (missing.empty() ? "" : ", ") + std::string(name);
  };
  find(library.get_device_list, "ibv_get_device_list");
  find(library.free_device_list, "ibv_free_device_list");
  find(library.get_device_name, "ibv_get_device_name");
  find(library.open_device, "ibv_open_device");
  find(library.close_device, "ibv_close_device");
  find(library.query_device, "ibv_query_device");
  find(library.query_port, "ibv_query_port");
  find(library.query_gid_ex, "_ibv_query_gid_ex");
  find(library.query_pkey, "ibv_query_pkey");
  find(library.alloc_pd, "ibv_alloc_pd");
  find(library.dealloc_pd, "ibv_dealloc_pd");
  find(library.reg_mr_iova2, "ibv_reg_mr_iova2");
  find(library.dereg_mr, "ibv_dereg_mr");
  find(library.create_comp_channel, "ibv_create_comp_channel");
  find(library.destroy_comp_channel, "ibv_destroy_comp_channel");
  find(library.create_cq, "ibv_create_cq");
  find(library.destroy_cq, "ibv_destroy_cq");
  find(library.get_cq_event, "ibv_get_cq_event");
  find(library.ack_cq_events, "ibv_ack_cq_events");
  find(library.create_srq, "ibv_create_srq");
  find(library.destroy_srq, "ibv_destroy_srq");
  find(library.create_qp, "ibv_create_qp");
  find(library.modify_qp, "ibv_modify_qp");
  find(library.destroy_qp, "ibv_destroy_qp");
  find(library.get_async_event, "ibv_get_async_event");
  find(library.ack_async_event, "ibv_ack_async_event");
  find(library.event_type_str, "ibv_event_type_str");
  find(library.wc_status_str, "ibv_wc_status_str");
  find(library.fork_init, "ibv_fork_init");
  find(library.reg_dmabuf_mr, "ibv_reg_dmabuf_mr", false);
  if (!missing.empty()) {
    return verbs_error(ErrorCode::kRefused, "open",
                       "libibverbs.so.1 is older than rdma-core 31 (it lacks " + missing + "): " + kInstall);
  }
  // A child process (Python's subprocess, a loader's workers) must not inherit pinned pages. On kernels before 5.12,
  // the parent's next write would move its page away from the NIC's mapping. On later kernels this call does nothing.
  if (const int error = library.fork_init(); error != 0) {
    return verbs_error(ErrorCode::kRefused, "open", "ibv_fork_init", error);
  }
  return library;
}

}  // namespace

Result<const Library*> Library::load() {
  static const Result<Library> library = open_library();
  if (!library) return library.error();
  return &library.value();
}

Error verbs_error(ErrorCode code, std::string_view operation, std::string message) {
  return Error{code, "verbs", {}, std::string(operation), std::move(message)};
}

Error verbs_error(ErrorCode code, std::string_view operation, std::string message, int error_number) {
  return verbs_error(code, operation, std::move(message) + ": " + system_error({}, {}, error_number).message);
}

}  // namespace kvc::verbs
