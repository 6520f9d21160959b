// Tuning: the verbs provider's numbers, each with its reason. Only tests set them, to smaller values.
#pragma once

#include <chrono>
#include <cstdint>

namespace kvc::verbs {

struct Tuning {
  // Slots of the send queue for a link's writes. 512 pages of 4 KiB are 2 MiB on the wire: 40 us at 400 Gb/s, twice a
  // long round trip. A slot takes 64 to 192 bytes of the device's queue, so an idle link costs about 64 KiB.
  uint32_t write_slots = 512;
  // Slots of the send queue for a link's messages: kMessageSlots that the peer has not taken, and as many for the
  // link's own control messages.
  uint32_t message_slots = 32;

  // Receives for WriteImms, shared by all links. Each arriving batch uses up one. 4,096 batches of one page of 4 KiB
  // keep a 400 Gb/s port busy while the transfer thread is away for 300 us. After that the senders wait (RNR).
  uint32_t write_receives = 4096;
  // Receives for messages, shared by all links, and buffers for messages being sent: half a MiB each. An arriving
  // message is copied and its receive is returned at once, so untaken messages hold no receives.
  uint32_t message_receives = 128;
  uint32_t message_buffers = 128;
  // Receives posted at a time: one call (a doorbell on hardware, about a system call on rxe) for this many.
  uint32_t receive_batch = 128;

  // The most completion queue entries. Never are more work requests posted than fit, because an overrun kills the
  // device's queue. Links share the entries: 28,000 writes in flight on one NIC.
  uint32_t completions = 32000;
  // Completions handled by one poll(): 100 ns each at most, so about 25 us.
  uint32_t poll_completions = 256;

  // Pages up to this size are copied into the work request itself, which saves a DMA read in a small write's latency.
  // Larger limits make every slot of the queue larger.
  uint32_t inline_bytes = 64;

  // A lost packet is sent again after 4.096 us x 2^14 = 67 ms (the paper's code and perftest use 14 too), six times
  // (rxe takes 7 as "for ever"). So a dead path is an error after half a second on rxe, and after up to 4 s on a NIC
  // that backs off.
  uint8_t timeout = 14;
  uint8_t retry_count = 6;
  // If a receiver is out of receives, the sender tries again after 0.64 ms (code 12), for ever (7): the receiver is
  // slow, not gone. Only the control plane decides that it is gone.
  uint8_t min_rnr_timer = 12;
  uint8_t rnr_retry = 7;

  // If a port is down for this long, its links end. It is twice the time for which the queue pairs try by themselves.
  // They should report the failure, but rxe (Linux 6.1) forgets requests whose acknowledgements were lost as the port
  // went down.
  std::chrono::milliseconds port_timeout{1000};
  // A queue pair notices that a peer is gone only when it sends. So each idle link posts a write of 0 bytes this often.
  // Together with the retries above, this is half of the five seconds after which agents give up a silent peer.
  std::chrono::milliseconds ask_interval{2000};
  // Time from accept() to the offerer's hello: a round trip of the control plane and one of the network.
  std::chrono::milliseconds connect_timeout{10000};
  // Time for a stopped queue pair to flush its receives if no event reports it (QueuePairTeardown). A device writes
  // those entries in microseconds. An event takes an interrupt and a turn of the transfer thread, which is many times
  // less than this. If the event never comes, the end of each link takes this long.
  std::chrono::milliseconds flush_timeout{50};
  // Time for which a queue pair is kept to send a goodbye to a peer whose receives are all in use.
  std::chrono::milliseconds goodbye_timeout{2000};
  // The same while the whole domain closes. The peer's NIC acknowledges in microseconds unless it is gone.
  std::chrono::milliseconds close_timeout{100};
};

}  // namespace kvc::verbs
