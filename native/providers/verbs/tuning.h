// Tuning: the verbs provider's numbers, each with its reason. Tests make them small; nobody else sets them.
#pragma once

#include <chrono>
#include <cstdint>

namespace kvc::verbs {

struct Tuning {
  // Send queue of a link's writes. 512 pages of 4 KiB are 2 MiB on the wire: 40 us at 400 Gb/s, twice a long round
  // trip. A slot takes 64 to 192 bytes of the device's queue, so an idle link costs about 64 KiB.
  uint32_t write_slots = 512;
  // Send queue of a link's messages: kMessageSlots that the peer has not taken, and as much for what the link itself has
  // to say.
  uint32_t message_slots = 32;

  // Receives for WriteImms, shared by all links: one is used up by each batch that arrives. 4,096 batches of one page
  // keep a 400 Gb/s port busy for 300 us of the worker's absence at 4 KiB; beyond that the senders wait (RNR).
  uint32_t write_receives = 4096;
  // Receives for messages, shared by all links, and buffers for messages being sent: half a MiB each. A message is copied
  // and its receive given back as it comes, so what the engine has not taken holds none.
  uint32_t message_receives = 128;
  uint32_t message_buffers = 128;
  // Receives given back at a time: one call (a doorbell on hardware, a system call's worth on rxe) for this many.
  uint32_t receive_batch = 128;

  // Completion queue entries at most; never more work requests are posted than fit, as an overrun kills the device's
  // queue. Links share them: 28,000 writes in flight on one NIC.
  uint32_t completions = 32000;
  // Completions handled by one poll(): 100 ns each at most, so about 25 us.
  uint32_t poll_completions = 256;

  // Pages up to this size are copied into the work request itself: one DMA read less in a small write's latency.
  // Larger limits make every slot of the queue larger.
  uint32_t inline_bytes = 64;

  // A lost packet is sent again after 4.096 us x 2^14 = 67 ms (the paper's code and perftest use 14 too), six times
  // (rxe takes 7 for "for ever"): a dead path is an error after half a second on rxe, and after up to 4 s on a NIC that
  // backs off.
  uint8_t timeout = 14;
  uint8_t retry_count = 6;
  // A receiver that is out of receives is asked again after 0.64 ms (code 12), for ever (7): it is slow, not gone. What
  // decides that it is gone is the control plane.
  uint8_t min_rnr_timer = 12;
  uint8_t rnr_retry = 7;

  // A port that is down this long takes its links with it: twice what the queue pairs try by themselves. They should say
  // so themselves, but rxe (Linux 6.1) forgets requests whose acknowledgements were lost as the port went down.
  std::chrono::milliseconds port_timeout{1000};
  // A queue pair hears nothing of a peer that is gone until it sends: each idle link writes nothing to its peer this
  // often. With the tries above, half of the five seconds after which agents give a silent peer up.
  std::chrono::milliseconds ask_interval{2000};
  // From accept() to the offerer's hello: a round trip of the control plane and one of the network.
  std::chrono::milliseconds connect_timeout{10000};
  // How long a stopped queue pair is given to flush its receives, where no event says that it has (QueuePairTeardown). A device
  // writes those entries in microseconds, and an event takes an interrupt and a turn of the worker, many times less than
  // this; where it never comes, the end of each link takes this long.
  std::chrono::milliseconds flush_timeout{50};
  // How long a queue pair is kept to say goodbye to a peer whose receives are all in use.
  std::chrono::milliseconds goodbye_timeout{2000};
  // The same while the whole domain closes: the peer's NIC acknowledges in microseconds unless it is gone.
  std::chrono::milliseconds close_timeout{100};
};

}  // namespace kvc::verbs
