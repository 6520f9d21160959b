// TcpLinkEnd: the new link's parts that the connector hands to the domain.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "base/unique_fd.h"
#include "lane/domain.h"
#include "providers/tcp/arrivals.h"
#include "providers/tcp/wire.h"

namespace kvc::tcp {

// A socket that is connecting, the Hello to send once it is connected, and the Welcome to expect.
struct Dialled {
  UniqueFd socket;
  Hello hello;
  Welcome welcome;
};

struct TcpLinkEnd final : LinkEnd {
  uint16_t connections = 0;
  std::vector<Dialled> dialled;        // on the accepting side: all connections, by index
  std::shared_ptr<Arrivals> arrivals;  // on the offering side: the queue of arriving connections
};

}  // namespace kvc::tcp
