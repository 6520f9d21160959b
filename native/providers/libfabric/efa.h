// EFA's special requirements. From the public manual fi_efa(7) and fi_endpoint(3) of libfabric 2.x.
//
// Properties of EFA on which the rest of this provider is built:
// - No order. SRD delivers packets in any order, and only sends are put in order again ("send-after-send"). So each
//   write is counted by its own remote CQ data, and messages name what they refer to.
// - Remote CQ data of 4 bytes. An immediate has no more.
// - "The target side of a RMA operation must insert the initiator side's address into AV before the RMA operation is
//   kicked off, due to a current device limitation" (efa-direct). So an acceptor writes only after the offerer's Hello.
// - FI_MR_VIRT_ADDR, FI_MR_ALLOCATED and FI_MR_PROV_KEY with keys of 32 bits, which are easy to guess. So a region's
//   key in the transfer engine is our own random number, and the device's key is only sent over the link.
// - "Provider needs to protect the resource (including CQ) from being overrun. But today efa and efa-direct doesn't
//   have that protection" (efa_fabric_comparison.md). So immediates that the peer has not read yet are limited
//   (link.h).
// - A write of 0 bytes needs a valid address and key like any other. So immediates without pages go to a doorbell.
// - FI_CONTEXT2 (efa-direct). Every operation has a context of that size.
#pragma once

#include "providers/libfabric/device.h"

namespace kvc::libfabric {

// Sets options before an endpoint is enabled. Options that the library does not know stay at its defaults.
void configure_efa(fid_ep& endpoint);

// Checks an endpoint after fi_enable(). kRefused if the peer's CPU would carry out its writes, through packets and
// copies. A NIC with RDMA was not configured for that, and it may be slower than tcp on the same machine.
Status check_efa(const Device& device, fid_ep& endpoint);

}  // namespace kvc::libfabric
