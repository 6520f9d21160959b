#include "engine/link.h"

#include "engine/link_keeper.h"

namespace kvc {

// Defined here, because LinkRepair is complete here.
Link::Link() = default;
Link::Link(Domain* of, Connector* makes, uint32_t place, uint32_t local, uint32_t remote)
    : domain(of), connector(makes), domain_place(place), local_domain(local), remote_domain(remote) {}
Link::~Link() = default;
Link::Link(Link&&) noexcept = default;
Link& Link::operator=(Link&&) noexcept = default;

}  // namespace kvc
