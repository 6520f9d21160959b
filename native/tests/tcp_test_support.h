// Helpers for tests of the tcp provider: two domains with memory, and raw sockets.
#pragma once

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <cerrno>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "providers/tcp/provider.h"
#include "providers/tcp/wire.h"
#include "tests/domain_test_support.h"

namespace kvc::tcp {

using test::Batch;
using test::Driven;
using test::kLinkOfA;
using test::kLinkOfB;
using test::post;
using test::run_idle;
using test::run_until;

// A domain with one registered region.
struct End {
  explicit End(const Tuning& tuning = {}, uint32_t connections = 2, size_t bytes = 4 << 20,
               const std::string& address = "127.0.0.1")
      : memory(bytes) {
    DomainConfig config;
    config.provider = "tcp";
    config.address = address;
    config.connections = connections;
    domain = std::make_unique<Driven>([&](ControlQueue& control) { return tcp::open(config, control, tuning); });
    rkey = domain->register_region(memory.data(), memory.size()).value();
  }

  // Deterministic bytes that differ between pages and between seeds.
  void fill(uint64_t seed) { test::fill_random(memory.data(), memory.size(), seed); }
  test::Record& record() { return domain->record; }

  std::vector<std::byte> memory;
  std::unique_ptr<Driven> domain;
  uint64_t rkey = 0;
};

// Two domains with one link between them. A offered, B connected.
struct Pair {
  explicit Pair(const Tuning& tuning = {}, uint32_t connections = 2, size_t bytes = 4 << 20)
      : a(tuning, connections, bytes), b(tuning, connections, bytes) {}

  void connect() { test::connect(*a.domain, *b.domain); }
  std::vector<Driven*> both() { return {a.domain.get(), b.domain.get()}; }
  void run_until(const std::function<bool()>& done, const char* what = "condition") {
    test::run_until(both(), done, what);
  }

  End a;
  End b;
};

// --- Raw sockets.

inline sockaddr_in loopback(uint16_t port) {
  sockaddr_in name{};
  name.sin_family = AF_INET;
  name.sin_port = htons(port);
  name.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return name;
}

// A blocking socket that sends what the test gives it. Receiving stops after 10 s, which means a hang.
class RawSocket {
 public:
  static RawSocket dial(uint16_t port) {
    RawSocket raw(UniqueFd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)));
    const sockaddr_in name = loopback(port);
    EXPECT_EQ(::connect(raw.fd_.get(), reinterpret_cast<const sockaddr*>(&name), sizeof(name)), 0);
    return raw;
  }
  explicit RawSocket(UniqueFd fd) : fd_(std::move(fd)) {
    const timeval limit{10, 0};
    ::setsockopt(fd_.get(), SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
    const int at_once = 1;  // each piece is received separately
    ::setsockopt(fd_.get(), IPPROTO_TCP, TCP_NODELAY, &at_once, sizeof(at_once));
  }

  void send(std::span<const std::byte> bytes) {
    ASSERT_EQ(::send(fd_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL), static_cast<ssize_t>(bytes.size()));
  }
  template <typename T>
  void send(const T& value) {
    send(std::as_bytes(std::span(&value, 1)));
  }
  // Like send(), for connections that may be closed already.
  void try_send(std::span<const std::byte> bytes) { ::send(fd_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL); }
  template <typename T>
  T receive() {
    T value{};
    EXPECT_EQ(::recv(fd_.get(), &value, sizeof(value), MSG_WAITALL), static_cast<ssize_t>(sizeof(value)));
    return value;
  }
  // Returns true if the opposite side has closed, gracefully or not; false otherwise.
  bool closed() {
    std::byte byte;
    const ssize_t got = ::recv(fd_.get(), &byte, 1, MSG_DONTWAIT);
    return got == 0 || (got < 0 && errno != EAGAIN && errno != EWOULDBLOCK);
  }
  // Returns true if the connection is gone in both directions. The end of one direction is not enough.
  bool gone() {
    pollfd entry{fd_.get(), 0, 0};
    return ::poll(&entry, 1, 0) == 1;
  }
  // The error that broke it; 0: it ended in good order.
  int error() {
    int error_number = 0;
    socklen_t length = sizeof(error_number);
    ::getsockopt(fd_.get(), SOL_SOCKET, SO_ERROR, &error_number, &length);
    return error_number;
  }
  bool readable() {
    pollfd entry{fd_.get(), POLLIN, 0};
    return ::poll(&entry, 1, 0) == 1;
  }
  void close() { fd_.reset(); }
  int fd() const { return fd_.get(); }

 private:
  UniqueFd fd_;
};

inline Hello hello_for(const Offer& offer, uint16_t index = 0) {
  Hello hello;
  hello.index = index;
  hello.link = offer.link;
  hello.secret = offer.dialer;
  return hello;
}

}  // namespace kvc::tcp
