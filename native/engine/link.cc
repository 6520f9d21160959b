#include "engine/link.h"

#include "engine/link_keeper.h"

namespace kvc {

// Here, because LinkRepair is complete here.
Link::Link() = default;
Link::Link(LinkId link_id, Domain* of, uint32_t local, uint32_t remote)
    : id(link_id), domain(of), local_domain(local), remote_domain(remote) {}
Link::~Link() = default;
Link::Link(Link&&) noexcept = default;
Link& Link::operator=(Link&&) noexcept = default;

}  // namespace kvc
