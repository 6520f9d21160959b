// Tuning: the tcp provider's numbers, each with its reason. Tests make them small; nobody else sets them.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>

namespace kvc::tcp {

struct Tuning {
  // SO_SNDBUF and SO_RCVBUF in bytes; 0 leaves both to the kernel's autotuning, which also grows with a long path's
  // bandwidth x delay. Fixed sizes from 128 KiB to 4 MiB were no faster over loopback and took no less CPU per byte.
  int socket_buffer = 0;

  // Most bytes that one connection moves in one direction before its neighbours get their turn: 40 us at 6.5 GB/s.
  // Measured over loopback with 64 KiB pages on two idle cores: 128 KiB 2.5 to 4.2 GB/s, 256 KiB and 512 KiB 6.0 to
  // 6.6, 1 MiB 4.6 to 5.3 (the bytes in flight outgrow the 1 MiB L2 cache); a plain blocking loop 4.6.
  size_t turn_bytes = 256 << 10;
  // Connections served in each direction by one poll(): both of a link at the default, or those of two peers at once.
  // The longest poll() is then 4 x 40 us each way, when four connections are busy both ways.
  int turns = 4;

  // Written and not yet acknowledged, per connection; beyond either, post() says busy. 16 MiB keep 100 Gb/s busy over
  // 1.3 ms, and are twice what the engine keeps in flight on a link. 128 full batches of 4 KiB pages are 32 MiB, and
  // their unsent frames (1.1 KiB each) take 140 KiB at most.
  uint64_t queue_bytes = 16 << 20;
  size_t queue_batches = 128;

  // Received and not yet acknowledged while more is waiting to be read (a drained socket acknowledges at once). An
  // acknowledgement is a system call of 2 to 3 us: 1 MiB takes 150 us to read, and is an eighth of what the engine
  // keeps in flight.
  uint64_t unacknowledged_bytes = 1 << 20;

  // An accepted connection must have proved itself by then: a round trip and a peer's busy moment.
  std::chrono::milliseconds hello_timeout{5000};
  // All connections of a link must be up by then: room for three of the kernel's SYN retries (after 1, 3 and 7 s).
  std::chrono::milliseconds connect_timeout{10000};
  // A link whose end has begun waits so long for what its peer still says, and a socket that this side has ended so long
  // for its peer's end. A live peer answers within a round trip; two lost packets in a row cost 200 + 400 ms (the
  // kernel's least retransmission timeout, doubled).
  std::chrono::milliseconds closing_timeout{1000};
  // Ended sockets that are kept so: those of 128 links at the default; one more ends the oldest.
  size_t max_lingering = 256;
  // Accepted connections that have not proved themselves; one more pushes out the oldest. A peer's Hello is there
  // after a round trip, so only a flood of strangers can push it out.
  size_t max_strangers = 64;
};

}  // namespace kvc::tcp
