// Compares our declarations of libibverbs' binary interface with its header, if that is installed (libibverbs-dev).
#include <gtest/gtest.h>

#if __has_include(<infiniband/verbs.h>)

// The header is written in C, with some anonymous structs.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wpedantic"
#include <infiniband/verbs.h>
#pragma GCC diagnostic pop

#include "providers/verbs/abi.h"

namespace kvc::verbs {
namespace {

#define SAME_SIZE(type) static_assert(sizeof(abi::type) == sizeof(::type), #type)
#define SAME_PLACE(type, member)                                                             \
  static_assert(offsetof(abi::type, member) == offsetof(::type, member), #type "." #member); \
  static_assert(sizeof(abi::type::member) == sizeof(decltype(::type::member)), #type "." #member)
#define SAME_VALUE(name) static_assert(static_cast<long>(abi::name) == static_cast<long>(::name), #name)

SAME_SIZE(ibv_gid_entry);
SAME_PLACE(ibv_gid_entry, gid);
SAME_PLACE(ibv_gid_entry, gid_type);
SAME_PLACE(ibv_device, node_type);
SAME_PLACE(ibv_device, transport_type);
SAME_SIZE(ibv_device_attr);
SAME_PLACE(ibv_device_attr, max_qp_wr);
SAME_PLACE(ibv_device_attr, max_cqe);
SAME_PLACE(ibv_device_attr, max_srq_wr);
SAME_PLACE(ibv_device_attr, phys_port_cnt);
// The structure grows at its end, for the header's inline function, which passes the size of its caller's structure. We
// call the exported ibv_query_port, which fills the fields before port_cap_flags2 in any version of the library.
static_assert(sizeof(abi::ibv_port_attr) <= sizeof(::ibv_port_attr), "ibv_port_attr");
SAME_PLACE(ibv_port_attr, port_cap_flags2);
SAME_PLACE(ibv_port_attr, state);
SAME_PLACE(ibv_port_attr, active_mtu);
SAME_PLACE(ibv_port_attr, gid_tbl_len);
SAME_PLACE(ibv_port_attr, max_msg_sz);
SAME_PLACE(ibv_port_attr, pkey_tbl_len);
SAME_PLACE(ibv_port_attr, lid);
SAME_PLACE(ibv_port_attr, active_width);
SAME_PLACE(ibv_port_attr, active_speed);
SAME_PLACE(ibv_port_attr, link_layer);
SAME_SIZE(ibv_parent_domain_init_attr);
SAME_PLACE(ibv_parent_domain_init_attr, td);
SAME_SIZE(ibv_mr);
SAME_PLACE(ibv_mr, lkey);
SAME_PLACE(ibv_mr, rkey);
SAME_PLACE(ibv_comp_channel, fd);
SAME_PLACE(ibv_qp, qp_num);
SAME_SIZE(ibv_qp_init_attr);
SAME_PLACE(ibv_qp_init_attr, cap);
SAME_PLACE(ibv_qp_init_attr, qp_type);
SAME_SIZE(ibv_srq_init_attr);
SAME_PLACE(ibv_srq_init_attr, attr);
SAME_SIZE(ibv_ah_attr);
SAME_PLACE(ibv_ah_attr, grh);
SAME_PLACE(ibv_ah_attr, dlid);
SAME_PLACE(ibv_ah_attr, port_num);
SAME_PLACE(ibv_global_route, sgid_index);
SAME_PLACE(ibv_global_route, traffic_class);
SAME_SIZE(ibv_qp_attr);
SAME_PLACE(ibv_qp_attr, path_mtu);
SAME_PLACE(ibv_qp_attr, rq_psn);
SAME_PLACE(ibv_qp_attr, sq_psn);
SAME_PLACE(ibv_qp_attr, dest_qp_num);
SAME_PLACE(ibv_qp_attr, qp_access_flags);
SAME_PLACE(ibv_qp_attr, ah_attr);
SAME_PLACE(ibv_qp_attr, pkey_index);
SAME_PLACE(ibv_qp_attr, max_rd_atomic);
SAME_PLACE(ibv_qp_attr, min_rnr_timer);
SAME_PLACE(ibv_qp_attr, port_num);
SAME_PLACE(ibv_qp_attr, rnr_retry);
SAME_SIZE(ibv_sge);
SAME_SIZE(ibv_send_wr);
SAME_PLACE(ibv_send_wr, opcode);
SAME_PLACE(ibv_send_wr, send_flags);
SAME_PLACE(ibv_send_wr, imm_data);
SAME_PLACE(ibv_send_wr, wr.rdma.remote_addr);
SAME_PLACE(ibv_send_wr, wr.rdma.rkey);
SAME_SIZE(ibv_recv_wr);
SAME_PLACE(ibv_recv_wr, num_sge);
SAME_SIZE(ibv_wc);
SAME_PLACE(ibv_wc, status);
SAME_PLACE(ibv_wc, opcode);
SAME_PLACE(ibv_wc, byte_len);
SAME_PLACE(ibv_wc, imm_data);
SAME_PLACE(ibv_wc, qp_num);
SAME_PLACE(ibv_wc, wc_flags);
SAME_SIZE(ibv_async_event);
SAME_PLACE(ibv_async_event, event_type);
SAME_SIZE(ibv_context_ops);
SAME_PLACE(ibv_context_ops, poll_cq);
SAME_PLACE(ibv_context_ops, req_notify_cq);
SAME_PLACE(ibv_context_ops, post_srq_recv);
SAME_PLACE(ibv_context_ops, post_send);
SAME_SIZE(ibv_context);
SAME_PLACE(ibv_context, ops);
SAME_PLACE(ibv_context, async_fd);
SAME_PLACE(ibv_context, abi_compat);
// The structure grows at its beginning: offsets count from the context at its end.
#define SAME_BEFORE(member)                                                                     \
  static_assert(offsetof(abi::verbs_context, context) - offsetof(abi::verbs_context, member) == \
                    offsetof(::verbs_context, context) - offsetof(::verbs_context, member),     \
                "verbs_context." #member)
SAME_BEFORE(sz);
SAME_BEFORE(alloc_td);
SAME_BEFORE(dealloc_td);
SAME_BEFORE(alloc_parent_domain);

SAME_VALUE(IBV_TRANSPORT_IWARP);
SAME_VALUE(IBV_PORT_ACTIVE);
SAME_VALUE(IBV_LINK_LAYER_INFINIBAND);
SAME_VALUE(IBV_LINK_LAYER_ETHERNET);
SAME_VALUE(IBV_GID_TYPE_ROCE_V1);
SAME_VALUE(IBV_GID_TYPE_ROCE_V2);
SAME_VALUE(IBV_MTU_4096);
SAME_VALUE(IBV_ACCESS_REMOTE_WRITE);
SAME_VALUE(IBV_ACCESS_RELAXED_ORDERING);
SAME_VALUE(IBV_QPT_RC);
SAME_VALUE(IBV_QPS_RTS);
SAME_VALUE(IBV_QPS_ERR);
SAME_VALUE(IBV_QP_STATE);
SAME_VALUE(IBV_QP_ACCESS_FLAGS);
SAME_VALUE(IBV_QP_PKEY_INDEX);
SAME_VALUE(IBV_QP_PORT);
SAME_VALUE(IBV_QP_AV);
SAME_VALUE(IBV_QP_PATH_MTU);
SAME_VALUE(IBV_QP_TIMEOUT);
SAME_VALUE(IBV_QP_RETRY_CNT);
SAME_VALUE(IBV_QP_RNR_RETRY);
SAME_VALUE(IBV_QP_RQ_PSN);
SAME_VALUE(IBV_QP_MAX_QP_RD_ATOMIC);
SAME_VALUE(IBV_QP_MIN_RNR_TIMER);
SAME_VALUE(IBV_QP_SQ_PSN);
SAME_VALUE(IBV_QP_MAX_DEST_RD_ATOMIC);
SAME_VALUE(IBV_QP_DEST_QPN);
SAME_VALUE(IBV_WR_RDMA_WRITE);
SAME_VALUE(IBV_WR_RDMA_WRITE_WITH_IMM);
SAME_VALUE(IBV_WR_SEND_WITH_IMM);
SAME_VALUE(IBV_SEND_SIGNALED);
SAME_VALUE(IBV_SEND_INLINE);
SAME_VALUE(IBV_WC_LOC_PROT_ERR);
SAME_VALUE(IBV_WC_WR_FLUSH_ERR);
SAME_VALUE(IBV_WC_REM_ACCESS_ERR);
SAME_VALUE(IBV_WC_RETRY_EXC_ERR);
SAME_VALUE(IBV_WC_RECV);
SAME_VALUE(IBV_WC_RECV_RDMA_WITH_IMM);
SAME_VALUE(IBV_WC_WITH_IMM);
SAME_VALUE(IBV_EVENT_CQ_ERR);
SAME_VALUE(IBV_EVENT_QP_FATAL);
SAME_VALUE(IBV_EVENT_QP_ACCESS_ERR);
SAME_VALUE(IBV_EVENT_DEVICE_FATAL);
SAME_VALUE(IBV_EVENT_PORT_ACTIVE);
SAME_VALUE(IBV_EVENT_PORT_ERR);
SAME_VALUE(IBV_EVENT_SRQ_ERR);
SAME_VALUE(IBV_EVENT_QP_LAST_WQE_REACHED);

TEST(VerbsAbi, OurDeclarationsAreTheLibrarys) {
  // The static assertions above are checked by the compiler. At run time remains how a library marks its extended
  // contexts.
  EXPECT_EQ(__VERBS_ABI_IS_EXTENDED, reinterpret_cast<void*>(UINTPTR_MAX));
}

}  // namespace
}  // namespace kvc::verbs

#else

TEST(VerbsAbi, OurDeclarationsAreTheLibrarys) {
  GTEST_SKIP() << "no <infiniband/verbs.h> to compare with when this was built (Debian: libibverbs-dev)";
}

#endif
