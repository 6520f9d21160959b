// What EFA needs beyond what every provider does. From the public manual fi_efa(7) and fi_endpoint(3) of libfabric 2.x.
//
// What of EFA the rest of this provider is built on:
//  - No order: SRD delivers packets in any order, and only sends are put in order again ("send-after-send"). So each
//    write is counted by its own remote CQ data, and messages carry what they refer to.
//  - Remote CQ data of 4 bytes: all that an immediate has.
//  - "The target side of a RMA operation must insert the initiator side's address into AV before the RMA operation is
//    kicked off, due to a current device limitation" (efa-direct): an acceptor writes only after the offerer's Hello.
//  - FI_MR_VIRT_ADDR, FI_MR_ALLOCATED and FI_MR_PROV_KEY with keys of 32 bits, which are easy to guess: a region's key
//    in the engine is a random one of ours, and the device's is only told over the link.
//  - "Provider needs to protect the resource (including CQ) from being overrun. But today efa and efa-direct doesn't
//    have that protection" (efa_fabric_comparison.md): immediates that the peer has not yet read are limited (link.h).
//  - A write of 0 bytes needs a valid address and key like any other: immediates without pages go to a doorbell.
//  - FI_CONTEXT2 (efa-direct): every operation has a context of that size.
#pragma once

#include "providers/libfabric/device.h"

namespace kvc::libfabric {

// Options to set before an endpoint is enabled. Those that a library does not know are left at its default.
void configure_efa(fid_ep& endpoint);

// After fi_enable(). kRefused if the endpoint's writes would be carried out by the peer's CPU, through packets and
// copies: not what a NIC with RDMA was configured for, and slower than tcp on the same machine may be.
Status check_efa(const Device& device, fid_ep& endpoint);

}  // namespace kvc::libfabric
