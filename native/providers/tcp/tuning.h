// Tuning: the tcp provider's numbers, each with its reason. Only tests set them, to smaller values.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>

namespace kvc::tcp {

struct Tuning {
  // SO_SNDBUF and SO_RCVBUF in bytes; 0 leaves both to the kernel's autotuning, which also grows with a long path's
  // bandwidth x delay. Fixed sizes from 128 KiB to 4 MiB were no faster over loopback and took no less CPU per byte.
  int socket_buffer = 0;

  // The most bytes that one connection moves in one direction in one turn: 40 us at 6.5 GB/s. Measured over loopback
  // with 64 KiB pages on two idle cores:
  // - 128 KiB: 2.5 to 4.2 GB/s
  // - 256 KiB and 512 KiB: 6.0 to 6.6 GB/s
  // - 1 MiB: 4.6 to 5.3 GB/s (the bytes in flight outgrow the 1 MiB L2 cache)
  // - a plain blocking loop: 4.6 GB/s
  size_t turn_bytes = 256 << 10;
  // Connections served in each direction by one poll(): both connections of a link at the default, or of two peers at
  // once. The longest poll() is 4 x 40 us each way, when four connections are busy both ways.
  int turns = 4;

  // Written and not yet acknowledged, per connection. Beyond either limit, post() returns kBusy. 16 MiB keep 100 Gb/s
  // busy over 1.3 ms, and are twice what the transfer engine keeps in flight on a link. 128 full batches of 4 KiB pages
  // are 32 MiB, and their unsent frames (1.1 KiB each) take 140 KiB at most.
  uint64_t queue_bytes = 16 << 20;
  size_t queue_batches = 128;

  // Received and not yet acknowledged while more is waiting to be read (a drained socket acknowledges at once). An
  // acknowledgement is a system call of 2 to 3 us. Reading 1 MiB takes 150 us, and 1 MiB is an eighth of what the
  // transfer engine keeps in flight.
  uint64_t unacknowledged_bytes = 1 << 20;

  // An accepted connection must prove itself within this time: a round trip and a peer's busy moment.
  std::chrono::milliseconds hello_timeout{5000};
  // All connections of a link must be up within this time: room for three of the kernel's SYN retries (after 1, 3 and 7
  // s).
  std::chrono::milliseconds connect_timeout{10000};
  // A link that ends waits this long for its peer's last bytes, and a socket that this side has ended waits this long
  // for its peer's end. A live peer answers within a round trip. Two lost packets in a row cost 200 + 400 ms (the
  // kernel's least retransmission timeout, doubled).
  std::chrono::milliseconds closing_timeout{1000};
  // Ended sockets that linger at a time: the sockets of 128 links at the default. One more ends the oldest.
  size_t max_lingering = 256;
  // Accepted connections that have not proved themselves. One more pushes out the oldest. A peer's Hello arrives after
  // a round trip, so only a flood of strangers can push it out.
  size_t max_strangers = 64;
};

}  // namespace kvc::tcp
