// The part of libibverbs' binary interface (libibverbs.so.1, rdma-core) that this provider uses, in our own
// declarations.
//
// The library is opened at run time and never linked, and building needs no RDMA package: every wheel contains this
// provider. The interface is frozen: distributions' programs built years apart run on one library. Names are the
// library's own, in our namespace. So native/tests/verbs_abi_test.cc can compare every size and offset with the real
// <infiniband/verbs.h> if that is installed. Objects that only the library creates (queue pairs, ...) are declared up
// to the last member that is read here, or not at all.
#pragma once

#include <pthread.h>

#include <cstddef>
#include <cstdint>

namespace kvc::verbs::abi {

// --- Constants.

enum { IBV_TRANSPORT_IB = 0, IBV_TRANSPORT_IWARP = 1 };
enum { IBV_PORT_ACTIVE = 4 };
enum { IBV_LINK_LAYER_INFINIBAND = 1, IBV_LINK_LAYER_ETHERNET = 2 };
enum : uint32_t { IBV_GID_TYPE_IB = 0, IBV_GID_TYPE_ROCE_V1 = 1, IBV_GID_TYPE_ROCE_V2 = 2 };
enum { IBV_MTU_256 = 1, IBV_MTU_4096 = 5 };

enum : uint32_t {
  IBV_ACCESS_LOCAL_WRITE = 1,
  IBV_ACCESS_REMOTE_WRITE = 1 << 1,
  IBV_ACCESS_RELAXED_ORDERING = 1 << 20,  // an optional flag: ibv_reg_mr_iova2 drops it on kernels that lack it
};

enum { IBV_QPT_RC = 2 };
enum { IBV_QPS_RESET = 0, IBV_QPS_INIT = 1, IBV_QPS_RTR = 2, IBV_QPS_RTS = 3, IBV_QPS_ERR = 6 };
enum {
  IBV_QP_STATE = 1 << 0,
  IBV_QP_ACCESS_FLAGS = 1 << 3,
  IBV_QP_PKEY_INDEX = 1 << 4,
  IBV_QP_PORT = 1 << 5,
  IBV_QP_AV = 1 << 7,
  IBV_QP_PATH_MTU = 1 << 8,
  IBV_QP_TIMEOUT = 1 << 9,
  IBV_QP_RETRY_CNT = 1 << 10,
  IBV_QP_RNR_RETRY = 1 << 11,
  IBV_QP_RQ_PSN = 1 << 12,
  IBV_QP_MAX_QP_RD_ATOMIC = 1 << 13,
  IBV_QP_MIN_RNR_TIMER = 1 << 15,
  IBV_QP_SQ_PSN = 1 << 16,
  IBV_QP_MAX_DEST_RD_ATOMIC = 1 << 17,
  IBV_QP_DEST_QPN = 1 << 20,
};

enum { IBV_WR_RDMA_WRITE = 0, IBV_WR_RDMA_WRITE_WITH_IMM = 1, IBV_WR_SEND = 2, IBV_WR_SEND_WITH_IMM = 3 };
enum : uint32_t { IBV_SEND_SIGNALED = 1 << 1, IBV_SEND_INLINE = 1 << 3 };

enum {
  IBV_WC_SUCCESS = 0,
  IBV_WC_LOC_LEN_ERR = 1,
  IBV_WC_LOC_QP_OP_ERR = 2,
  IBV_WC_LOC_PROT_ERR = 4,
  IBV_WC_WR_FLUSH_ERR = 5,
  IBV_WC_REM_ACCESS_ERR = 10,
  IBV_WC_REM_OP_ERR = 11,
  IBV_WC_RETRY_EXC_ERR = 12,
  IBV_WC_RNR_RETRY_EXC_ERR = 13,
};
enum { IBV_WC_RECV = 1 << 7, IBV_WC_RECV_RDMA_WITH_IMM = (1 << 7) + 1 };
enum : uint32_t { IBV_WC_WITH_IMM = 1 << 1 };

enum {
  IBV_EVENT_CQ_ERR = 0,
  IBV_EVENT_QP_FATAL = 1,
  IBV_EVENT_QP_REQ_ERR = 2,
  IBV_EVENT_QP_ACCESS_ERR = 3,
  IBV_EVENT_DEVICE_FATAL = 8,
  IBV_EVENT_PORT_ACTIVE = 9,
  IBV_EVENT_PORT_ERR = 10,
  IBV_EVENT_SRQ_ERR = 14,
  IBV_EVENT_QP_LAST_WQE_REACHED = 16,
};

// --- Structures.

union ibv_gid {
  uint8_t raw[16];
};

struct ibv_gid_entry {
  ibv_gid gid;
  uint32_t gid_index;
  uint32_t port_num;
  uint32_t gid_type;
  uint32_t ndev_ifindex;
};

struct ibv_device {
  void* ops[2];
  int node_type;
  int transport_type;
  // more members follow
};

struct ibv_device_attr {
  char fw_ver[64];
  uint64_t node_guid;  // big-endian
  uint64_t sys_image_guid;
  uint64_t max_mr_size;
  uint64_t page_size_cap;
  uint32_t vendor_id;
  uint32_t vendor_part_id;
  uint32_t hw_ver;
  int max_qp;
  int max_qp_wr;
  unsigned int device_cap_flags;
  int max_sge;
  int max_sge_rd;
  int max_cq;
  int max_cqe;
  int max_mr;
  int max_pd;
  int rd_atomics[5];
  int atomic_cap;
  int max_ee;
  int max_rdd;
  int max_mw;
  int raw_qps[2];
  int multicast[3];
  int max_ah;
  int max_fmr;
  int max_map_per_fmr;
  int max_srq;
  int max_srq_wr;
  int max_srq_sge;
  uint16_t max_pkeys;
  uint8_t local_ca_ack_delay;
  uint8_t phys_port_cnt;
};

struct ibv_port_attr {
  int state;
  int max_mtu;
  int active_mtu;
  int gid_tbl_len;
  uint32_t port_cap_flags;
  uint32_t max_msg_sz;
  uint32_t bad_pkey_cntr;
  uint32_t qkey_viol_cntr;
  uint16_t pkey_tbl_len;
  uint16_t lid;
  uint16_t sm_lid;
  uint8_t lmc;
  uint8_t max_vl_num;
  uint8_t sm_sl;
  uint8_t subnet_timeout;
  uint8_t init_type_reply;
  uint8_t active_width;
  uint8_t active_speed;
  uint8_t phys_state;
  uint8_t link_layer;
  uint8_t flags;
  uint16_t port_cap_flags2;
};

struct ibv_pd;
struct ibv_td;
struct ibv_cq;
struct ibv_srq;

struct ibv_td_init_attr {
  uint32_t comp_mask;
};

struct ibv_parent_domain_init_attr {
  ibv_pd* pd;
  ibv_td* td;
  uint32_t comp_mask;
  void* (*alloc)(ibv_pd* pd, void* pd_context, size_t size, size_t alignment, uint64_t resource_type);
  void (*free)(ibv_pd* pd, void* pd_context, void* ptr, uint64_t resource_type);
  void* pd_context;
};

struct ibv_context;

struct ibv_mr {
  ibv_context* context;
  ibv_pd* pd;
  void* addr;
  size_t length;
  uint32_t handle;
  uint32_t lkey;
  uint32_t rkey;
};

struct ibv_comp_channel {
  ibv_context* context;
  int fd;
  int refcnt;
};

struct ibv_qp {
  ibv_context* context;
  void* qp_context;
  ibv_pd* pd;
  ibv_cq* send_cq;
  ibv_cq* recv_cq;
  ibv_srq* srq;
  uint32_t handle;
  uint32_t qp_num;
  // more members follow
};

struct ibv_qp_cap {
  uint32_t max_send_wr;
  uint32_t max_recv_wr;
  uint32_t max_send_sge;
  uint32_t max_recv_sge;
  uint32_t max_inline_data;
};

struct ibv_qp_init_attr {
  void* qp_context;
  ibv_cq* send_cq;
  ibv_cq* recv_cq;
  ibv_srq* srq;
  ibv_qp_cap cap;
  int qp_type;
  int sq_sig_all;
};

struct ibv_srq_attr {
  uint32_t max_wr;
  uint32_t max_sge;
  uint32_t srq_limit;
};

struct ibv_srq_init_attr {
  void* srq_context;
  ibv_srq_attr attr;
};

struct ibv_global_route {
  ibv_gid dgid;
  uint32_t flow_label;
  uint8_t sgid_index;
  uint8_t hop_limit;
  uint8_t traffic_class;
};

struct ibv_ah_attr {
  alignas(8) ibv_global_route grh;  // the library's gid holds 64-bit words
  uint16_t dlid;
  uint8_t sl;
  uint8_t src_path_bits;
  uint8_t static_rate;
  uint8_t is_global;
  uint8_t port_num;
};

struct ibv_qp_attr {
  int qp_state;
  int cur_qp_state;
  int path_mtu;
  int path_mig_state;
  uint32_t qkey;
  uint32_t rq_psn;
  uint32_t sq_psn;
  uint32_t dest_qp_num;
  unsigned int qp_access_flags;
  ibv_qp_cap cap;
  ibv_ah_attr ah_attr;
  ibv_ah_attr alt_ah_attr;
  uint16_t pkey_index;
  uint16_t alt_pkey_index;
  uint8_t en_sqd_async_notify;
  uint8_t sq_draining;
  uint8_t max_rd_atomic;
  uint8_t max_dest_rd_atomic;
  uint8_t min_rnr_timer;
  uint8_t port_num;
  uint8_t timeout;
  uint8_t retry_cnt;
  uint8_t rnr_retry;
  uint8_t alt_port_num;
  uint8_t alt_timeout;
  uint32_t rate_limit;
};

struct ibv_sge {
  uint64_t addr;
  uint32_t length;
  uint32_t lkey;
};

struct ibv_send_wr {
  uint64_t wr_id;
  ibv_send_wr* next;
  ibv_sge* sg_list;
  int num_sge;
  int opcode;
  unsigned int send_flags;
  uint32_t imm_data;  // big-endian
  union {
    struct {
      uint64_t remote_addr;
      uint32_t rkey;
    } rdma;
    uint64_t atomic[4];
  } wr;
  uint64_t qp_type;
  uint64_t bind_mw[6];
};

struct ibv_recv_wr {
  uint64_t wr_id;
  ibv_recv_wr* next;
  ibv_sge* sg_list;
  int num_sge;
};

// After an error only wr_id, status, vendor_err and qp_num are valid.
struct ibv_wc {
  uint64_t wr_id;
  int status;
  int opcode;
  uint32_t vendor_err;
  uint32_t byte_len;
  uint32_t imm_data;  // big-endian
  uint32_t qp_num;
  uint32_t src_qp;
  unsigned int wc_flags;
  uint16_t pkey_index;
  uint16_t slid;
  uint8_t sl;
  uint8_t dlid_path_bits;
};

struct ibv_async_event {
  union {
    ibv_cq* cq;
    ibv_qp* qp;
    ibv_srq* srq;
    int port_num;
  } element;
  int event_type;
};

// The library does not export the data path: calls go through the device's own functions.
struct ibv_context_ops {
  void* before_poll_cq[11];
  int (*poll_cq)(ibv_cq* cq, int num_entries, ibv_wc* wc);
  int (*req_notify_cq)(ibv_cq* cq, int solicited_only);
  void* before_post_srq_recv[7];
  int (*post_srq_recv)(ibv_srq* srq, ibv_recv_wr* recv_wr, ibv_recv_wr** bad_recv_wr);
  void* before_post_send[4];
  int (*post_send)(ibv_qp* qp, ibv_send_wr* wr, ibv_send_wr** bad_wr);
  int (*post_recv)(ibv_qp* qp, ibv_recv_wr* wr, ibv_recv_wr** bad_wr);
  void* after_post_recv[5];
};

struct ibv_context {
  ibv_device* device;
  ibv_context_ops ops;
  int cmd_fd;
  int async_fd;
  int num_comp_vectors;
  pthread_mutex_t mutex;
  void* abi_compat;  // all ones: this is the last member of a verbs_context
};

// The structure that contains an ibv_context at its end. It grows at its beginning: `sz` is its size.
struct verbs_context {
  ibv_pd* (*alloc_parent_domain)(ibv_context* context, ibv_parent_domain_init_attr* attr);
  int (*dealloc_td)(ibv_td* td);
  ibv_td* (*alloc_td)(ibv_context* context, ibv_td_init_attr* init_attr);
  void* others[21];
  uint64_t placeholder;
  size_t sz;
  ibv_context context;
};

}  // namespace kvc::verbs::abi
