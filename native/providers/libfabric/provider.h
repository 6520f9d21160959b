// The libfabric provider. It exports load() and create() only.
#pragma once

#include "lane/domain.h"

namespace kvc::libfabric {

// Loads the library, once in a process. The rules of load_libraries() apply. Blocks.
void load();

// Opens both halves of one libfabric domain. Blocks. `control` outlives them.
//
// config.device is PROVIDER[:DOMAIN][,emulated] in libfabric's names: "efa", "efa:rdmap0s31-rdm", "tcp", "shm",
// "verbs;ofi_rxm". Empty: the library's first choice. ",emulated" allows writes that the library carries out on the
// peer's CPU if the NIC cannot (see efa.h). Without it such an endpoint is refused.
// config.address: the local address, for providers that use IP addresses, if no DOMAIN is named.
Result<OpenedDomain> create(const DomainConfig& config, ControlQueue& control);

}  // namespace kvc::libfabric
