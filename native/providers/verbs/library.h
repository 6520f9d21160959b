// Library: libibverbs, opened at run time through this table of functions.
#pragma once

#include "base/error.h"
#include "providers/verbs/abi.h"

namespace kvc::verbs {

// Immutable once opened. The library stays loaded until the process ends. Tests fill their own table.
struct Library {
  // Opens libibverbs.so.1 once for the process. kRefused if it is absent or too old; the error says what to install.
  // Any thread may call it. The first call blocks.
  static Result<const Library*> load();

  abi::ibv_device** (*get_device_list)(int* num_devices);
  void (*free_device_list)(abi::ibv_device** list);
  const char* (*get_device_name)(abi::ibv_device* device);
  abi::ibv_context* (*open_device)(abi::ibv_device* device);
  int (*close_device)(abi::ibv_context* context);
  int (*query_device)(abi::ibv_context* context, abi::ibv_device_attr* attr);
  int (*query_port)(abi::ibv_context* context, uint8_t port, abi::ibv_port_attr* attr);
  int (*query_gid_ex)(abi::ibv_context* context, uint32_t port, uint32_t index, abi::ibv_gid_entry* entry,
                      uint32_t flags, size_t entry_size);
  int (*query_pkey)(abi::ibv_context* context, uint8_t port, int index, uint16_t* big_endian_pkey);
  abi::ibv_pd* (*alloc_pd)(abi::ibv_context* context);
  int (*dealloc_pd)(abi::ibv_pd* pd);
  abi::ibv_mr* (*reg_mr_iova2)(abi::ibv_pd* pd, void* address, size_t bytes, uint64_t iova, unsigned int access);
  int (*dereg_mr)(abi::ibv_mr* mr);
  abi::ibv_comp_channel* (*create_comp_channel)(abi::ibv_context* context);
  int (*destroy_comp_channel)(abi::ibv_comp_channel* channel);
  abi::ibv_cq* (*create_cq)(abi::ibv_context* context, int cqe, void* cq_context, abi::ibv_comp_channel* channel,
                            int comp_vector);
  int (*destroy_cq)(abi::ibv_cq* cq);
  int (*get_cq_event)(abi::ibv_comp_channel* channel, abi::ibv_cq** cq, void** cq_context);
  void (*ack_cq_events)(abi::ibv_cq* cq, unsigned int events);
  abi::ibv_srq* (*create_srq)(abi::ibv_pd* pd, abi::ibv_srq_init_attr* attr);
  int (*destroy_srq)(abi::ibv_srq* srq);
  abi::ibv_qp* (*create_qp)(abi::ibv_pd* pd, abi::ibv_qp_init_attr* attr);
  int (*modify_qp)(abi::ibv_qp* qp, abi::ibv_qp_attr* attr, int mask);
  int (*destroy_qp)(abi::ibv_qp* qp);
  int (*get_async_event)(abi::ibv_context* context, abi::ibv_async_event* event);
  void (*ack_async_event)(abi::ibv_async_event* event);
  const char* (*event_type_str)(int event_type);
  const char* (*wc_status_str)(int status);
  int (*fork_init)();
  // Null before rdma-core 34: GPU memory is registered through the peer memory module only then.
  abi::ibv_mr* (*reg_dmabuf_mr)(abi::ibv_pd* pd, uint64_t offset, size_t bytes, uint64_t iova, int fd, int access);
};

// Returns an Error of this provider.
Error verbs_error(ErrorCode code, std::string_view operation, std::string message);
// Returns an Error whose message ends with the text of an errno.
Error verbs_error(ErrorCode code, std::string_view operation, std::string message, int error_number);

}  // namespace kvc::verbs
