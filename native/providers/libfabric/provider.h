// The libfabric provider: create() is all that it exports.
#pragma once

#include <memory>

#include "engine/domain.h"

namespace kvc::libfabric {

// Opens one libfabric domain. Called on the worker thread; `sink` outlives the domain.
//
// config.device is PROVIDER[:DOMAIN][,emulated] in libfabric's names: "efa", "efa:rdmap0s31-rdm", "tcp", "shm",
// "verbs;ofi_rxm". Empty: the library's first choice. ",emulated" allows writes that the library carries out on the
// peer's CPU where the NIC cannot (see efa.h); without it such an endpoint is refused.
// config.address: the local address, for providers that use IP addresses and where no DOMAIN is named.
Result<std::unique_ptr<Domain>> create(const DomainConfig& config, DomainSink& sink);

}  // namespace kvc::libfabric
