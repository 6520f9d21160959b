// Helpers for tests of the host provider: domains with memory, and forked children.
#pragma once

#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/shared_memory.h"
#include "providers/host/link.h"
#include "providers/host/provider.h"
#include "providers/host/wire.h"
#include "providers/same_host/system.h"
#include "tests/domain_test_support.h"

namespace kvc::host {

using namespace same_host;  // the words of a link, and system calls for hostile peers

using test::Driven;
using test::kLinkOfA;
using test::kLinkOfB;
using test::run_idle;
using test::run_until;

enum class Backing : uint8_t { kPrivate, kMemfd };

// A domain with one registered region.
struct End {
  explicit End(Backing backing = Backing::kPrivate, size_t size = 1 << 20)
      : bytes(size),
        domain(std::make_unique<Driven>([](ControlQueue& control) { return create(DomainConfig{}, control); })) {
    if (backing == Backing::kMemfd) {
      shared.emplace(std::move(SharedMemory::create("host-test", size).value()));
      memory = shared->data();
    } else {
      heap.resize(size);
      memory = heap.data();
    }
    rkey = domain->register_region(memory, bytes, shared ? shared->fd() : -1, 0).value();
  }

  const test::Record& record() const { return domain->record; }
  // Deterministic bytes that differ between positions and between seeds.
  void fill(uint64_t seed) { test::fill_random(memory, bytes, seed); }
  std::vector<std::byte> contents() const { return {memory, memory + bytes}; }

  std::vector<std::byte> heap;
  std::optional<SharedMemory> shared;
  std::byte* memory = nullptr;
  size_t bytes = 0;
  std::unique_ptr<Driven> domain;  // ends before its memory
  uint64_t rkey = 0;
};

// One page of `page_bytes` per list entry. `from` is an offset in the source's memory, `to` in the target's region.
struct TestBatch {
  WorkId work = 1;
  uint64_t page_bytes = 4096;
  std::vector<std::pair<uint64_t, uint64_t>> pages{{0, 0}};
  bool counted = true;
};

inline Posted post(End& source, LinkId link, uint64_t rkey, const TestBatch& batch) {
  std::vector<PageWrite> pages;
  for (const auto& [from, to] : batch.pages) pages.push_back({source.memory + from, to});
  WriteBatch write;
  write.work = batch.work;
  write.rkey = rkey;
  write.page_bytes = batch.page_bytes;
  write.counted = batch.counted;
  write.immediate = test::immediate_of(pages.size());
  write.pages = pages;
  return source.domain->post(link, write);
}

// Two domains of this process with one link between them. A offers, B accepts.
struct Pair {
  explicit Pair(Backing backing = Backing::kPrivate, size_t size = 1 << 20) : a(backing, size), b(backing, size) {}

  void connect() {
    test::connect(*a.domain, *b.domain);
    run_idle(both());
  }
  std::vector<Driven*> both() const { return {a.domain.get(), b.domain.get()}; }

  End a;
  End b;
};

// This process's mappings of memfds with that name, in any order. Tests use them to access the words of a link.
inline std::vector<std::byte*> mappings_of(const std::string& name) {
  std::vector<std::byte*> found;
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    if (line.find("/memfd:" + name + " ") == std::string::npos) continue;
    found.push_back(reinterpret_cast<std::byte*>(std::stoull(line, nullptr, 16)));
  }
  return found;
}

// The words of the only link of this process.
inline Segment& only_segment() {
  const std::vector<std::byte*> found = mappings_of("kvc-link");
  EXPECT_FALSE(found.empty());
  return *reinterpret_cast<Segment*>(found.at(0));
}

// Carries whole messages between the processes of a test.
class Pipe {
 public:
  explicit Pipe(int fd) : fd_(fd) {}
  void send(const Bytes& bytes) const {
    ASSERT_EQ(::send(fd_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL), static_cast<ssize_t>(bytes.size()));
  }
  void send_number(uint64_t value) const {
    Bytes bytes(sizeof(value));
    std::memcpy(bytes.data(), &value, sizeof(value));
    send(bytes);
  }
  // Empty if the other process is gone.
  Bytes receive() const {
    Bytes bytes(4096);
    const ssize_t length = ::recv(fd_.get(), bytes.data(), bytes.size(), 0);
    bytes.resize(length > 0 ? static_cast<size_t>(length) : 0);
    return bytes;
  }
  uint64_t receive_number() const {
    uint64_t value = 0;
    const Bytes bytes = receive();
    if (bytes.size() == sizeof(value)) std::memcpy(&value, bytes.data(), sizeof(value));
    return value;
  }
  bool readable() const {
    pollfd entry{fd_.get(), POLLIN, 0};
    return ::poll(&entry, 1, 0) == 1;
  }

 private:
  UniqueFd fd_;
};

// A forked process that runs `work` and exits with 0 if no expectation in it failed. It is killed with its parent's
// test.
class Child {
 public:
  explicit Child(const std::function<void(const Pipe&)>& work) {
    std::array<int, 2> ends{};
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends.data()), 0);
    std::fflush(nullptr);  // otherwise the child prints it again
    pid_ = fork();
    if (pid_ == 0) {
      close(ends[0]);
      {
        const Pipe pipe(ends[1]);
        work(pipe);
      }
      _exit(testing::Test::HasFailure() ? 1 : 0);
    }
    close(ends[1]);
    pipe = std::make_unique<Pipe>(ends[0]);
  }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;
  ~Child() {
    if (pid_ > 0) {
      signal(SIGKILL);
      wait();
    }
  }

  pid_t pid() const { return pid_; }
  void signal(int number) const { kill(pid_, number); }
  // Sends SIGSTOP and waits until it has taken effect.
  void stop() const {
    signal(SIGSTOP);
    int status = 0;
    ASSERT_EQ(waitpid(pid_, &status, WUNTRACED), pid_);
    ASSERT_TRUE(WIFSTOPPED(status));
  }
  // Returns the exit status, or the negative number of the signal that ended the process.
  int wait() {
    int status = 0;
    EXPECT_EQ(waitpid(std::exchange(pid_, 0), &status, 0) > 0, true);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  }

  std::unique_ptr<Pipe> pipe;

 private:
  pid_t pid_ = 0;
};

// The three steps with another process. This end accepts, and sends its key after the answer.
inline void accept_over(const Pipe& pipe, End& end) {
  Result<Bytes> answer = end.domain->accept(kLinkOfB, pipe.receive());
  ASSERT_TRUE(answer.ok()) << answer.error().to_string();
  pipe.send(answer.value());
  pipe.send_number(end.rkey);
}

// This end offers. Returns the key of the opposite end.
inline uint64_t offer_over(const Pipe& pipe, End& end) {
  pipe.send(end.domain->offer(kLinkOfA).value());
  Status completed = end.domain->complete(kLinkOfA, pipe.receive());
  EXPECT_TRUE(completed.ok()) << completed.error().to_string();
  return pipe.receive_number();
}

}  // namespace kvc::host
