// Two TransferEngines in two processes, with one GPU each. The receiver does what the sender requests over a pipe.
#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <thread>
#include <utility>

#include "bench/gpu/support.h"
#include "engine/transfer_engine.h"

namespace kvc::gpu_bench {

// A pipe in each direction. Bytes are sent with their length.
struct Pipe {
  int in = -1;
  int out = -1;
  void put(const void* data, size_t bytes) const {
    for (size_t at = 0; at < bytes;) {
      const ssize_t n = write(out, static_cast<const char*>(data) + at, bytes - at);
      if (n <= 0) die("the other process is gone");
      at += static_cast<size_t>(n);
    }
  }
  void get(void* data, size_t bytes) const {
    for (size_t at = 0; at < bytes;) {
      const ssize_t n = read(in, static_cast<char*>(data) + at, bytes - at);
      if (n <= 0) die("the other process is gone");
      at += static_cast<size_t>(n);
    }
  }
  void send(const Bytes& bytes) const {
    const uint64_t size = bytes.size();
    put(&size, sizeof(size));
    put(bytes.data(), bytes.size());
  }
  Bytes receive() const {
    uint64_t size = 0;
    get(&size, sizeof(size));
    Bytes bytes(size);
    get(bytes.data(), size);
    return bytes;
  }
};

inline EngineConfig config(const char* name, uint32_t blocks) {
  EngineConfig config;
  config.name = name;
  config.spin_us = 300;  // measures the lane, and not the wake-up of a processor
  DomainConfig domain;
  domain.provider = "nvlink";
  domain.copy_blocks = blocks;
  config.domains = {domain};
  return config;
}

// The sender's request: wait for counters with this target. The answer is the time at which they were reached. A target
// of 0 ends the receiver.
struct Ask {
  uint64_t target = 0;
  uint64_t check_page = 0;  // if not 0, the receiver then sends all its memory back for a check of pages of this size
};

inline int receive_pages(const Pipe& pipe, uint64_t bytes) {
  const auto gpu = must(cuda::Context::retain(1));
  Buffer memory(gpu, bytes, 2);
  auto engine = must(TransferEngine::create(config("receiver", 16)));
  const RegionId region = must(engine->register_memory(memory.data(), bytes));
  const Handshake answer = must(engine->accept("sender", pipe.receive()));
  pipe.send(answer.bytes);
  pipe.send(must(engine->region_descriptor(region)));
  for (;;) {
    Ask ask;
    pipe.get(&ask, sizeof(ask));
    if (ask.target == 0) return 0;
    CounterSet set = must(engine->alloc_counters(1));
    std::atomic<int64_t> counted{0};
    must(engine->expect(set.id, {ask.target}, [&](const Event&) { counted.store(now_ns()); }));
    pipe.put(&set.immediates[0], sizeof(uint32_t));
    while (counted.load() == 0) std::this_thread::sleep_for(std::chrono::microseconds(20));
    const int64_t when = counted.load();
    pipe.put(&when, sizeof(when));
    if (ask.check_page != 0) pipe.send(memory.read());
    must(engine->release_counters(set.id));
  }
}

struct Sender {
  Sender(const Pipe& to, uint64_t size, uint32_t blocks)
      : pipe(to), gpu(must(cuda::Context::retain(0))), memory(gpu, size, 1) {
    engine = must(TransferEngine::create(config("sender", blocks)));
    region = must(engine->register_memory(memory.data(), size));
    const Handshake offer = must(engine->offer("receiver"));
    pipe.send(offer.bytes);
    must(engine->complete(offer.peer, pipe.receive()));
    peer = offer.peer;
    target = must(engine->import_region(peer, pipe.receive()));
  }
  uint32_t ask(uint64_t count, uint64_t check_page = 0) const {
    const Ask ask{count, check_page};
    pipe.put(&ask, sizeof(ask));
    uint32_t immediate = 0;
    pipe.get(&immediate, sizeof(immediate));
    return immediate;
  }
  int64_t counted() const {
    int64_t when = 0;
    pipe.get(&when, sizeof(when));
    return when;
  }
  const Pipe& pipe;
  const std::shared_ptr<cuda::Context> gpu;
  Buffer memory;
  std::unique_ptr<TransferEngine> engine;
  RegionId region = 0;
  PeerId peer = 0;
  RemoteRegionId target = 0;
};

// Runs `receiver` in a child process. The child must not inherit a CUDA context, so call this first.
inline int two_processes(const std::function<int(const Pipe&)>& receiver,
                         const std::function<void(const Pipe&)>& sender) {
  int there[2];
  int back[2];
  if (pipe(there) != 0 || pipe(back) != 0) die("pipe");
  const pid_t child = fork();
  if (child == 0) {
    close(there[1]);
    close(back[0]);
    _exit(receiver(Pipe{there[0], back[1]}));
  }
  close(there[0]);
  close(back[1]);
  sender(Pipe{back[0], there[1]});
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 1;
}

}  // namespace kvc::gpu_bench
