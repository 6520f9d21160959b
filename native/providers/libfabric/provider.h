// The libfabric provider: load() and create() are all that it exports.
#pragma once

#include "lane/domain.h"

namespace kvc::libfabric {

// Loads the library, once in a process; the rules are those of load_libraries(). Blocks.
void load();

// Opens one libfabric domain, both halves of it. Blocks. `control` outlives them.
//
// config.device is PROVIDER[:DOMAIN][,emulated] in libfabric's names: "efa", "efa:rdmap0s31-rdm", "tcp", "shm",
// "verbs;ofi_rxm". Empty: the library's first choice. ",emulated" allows writes that the library carries out on the
// peer's CPU where the NIC cannot (see efa.h); without it such an endpoint is refused.
// config.address: the local address, for providers that use IP addresses and where no DOMAIN is named.
Result<OpenedDomain> create(const DomainConfig& config, ControlQueue& control);

}  // namespace kvc::libfabric
