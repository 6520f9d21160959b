// TcpLinkEnd: what the connector hands to the domain of a new link.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "base/unique_fd.h"
#include "lane/domain.h"
#include "providers/tcp/arrivals.h"
#include "providers/tcp/wire.h"

namespace kvc::tcp {

// A socket that is connecting, what it says once it has, and what it has to hear then.
struct Dialled {
  UniqueFd socket;
  Hello hello;
  Welcome welcome;
};

struct TcpLinkEnd final : LinkEnd {
  uint16_t connections = 0;
  std::vector<Dialled> dialled;        // where we accepted: all of them, by index
  std::shared_ptr<Arrivals> arrivals;  // where we offered: by which they come
};

}  // namespace kvc::tcp
