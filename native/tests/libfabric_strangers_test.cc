// Strangers that reach the port of a libfabric endpoint and are no peer. Connections that libfabric's tcp had accepted,
// and not yet read from, used to outlive the endpoint. When such a stranger sent data, freed memory was read: the
// sanitizers detect that.
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <iterator>
#include <string>

#include "base/unique_fd.h"
#include "tests/libfabric_test_support.h"

namespace kvc::libfabric {
namespace {

// Connects to the endpoint of an offer, and sends nothing yet.
class Stranger {
 public:
  explicit Stranger(const Bytes& offer) {
    const Bytes address = must(Card::decode("accept", offer)).address;
    sockaddr_storage target{};
    std::memcpy(&target, address.data(), address.size());
    socket_ = UniqueFd(::socket(target.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
    const auto* const peer = reinterpret_cast<const sockaddr*>(&target);
    EXPECT_EQ(::connect(socket_.get(), peer, static_cast<socklen_t>(address.size())), 0) << std::strerror(errno);
  }
  // Sends a connection request of libfabric's tcp. It has a header of 32 bytes: version 3, type 0, length 8 in network
  // order, a 1 in the byte order of the sender. Then follow 8 bytes that begin with the version 1.
  void speak() {
    std::array<unsigned char, 40> request{3, 0, 0, 8};
    request[24] = 1;
    request[32] = 1;
    (void)::send(socket_.get(), request.data(), request.size(), MSG_NOSIGNAL);
  }
  // Waits until the connection is closed.
  bool is_hung_up_on() {
    pollfd entry{socket_.get(), POLLIN, 0};
    std::byte answer{};
    constexpr int kWait = std::chrono::milliseconds(kLong).count();
    return ::poll(&entry, 1, kWait) == 1 && ::recv(socket_.get(), &answer, 1, 0) <= 0;
  }

 private:
  UniqueFd socket_;
};

size_t descriptors() {
  return static_cast<size_t>(std::distance(std::filesystem::directory_iterator("/proc/self/fd"), {}));
}

class LibfabricStrangers : public Libfabric {
 protected:
  static constexpr LinkId kOther = 33;

  void SetUp() override {
    Libfabric::SetUp();
    if (IsSkipped()) return;
    connect();
    post(1, 1, b->rkey);
    EXPECT_FALSE(ended(1).has_value());
  }
  // Runs until the latest connection is accepted.
  void run_until_accepted() {
    const size_t before = descriptors();
    run([&] { return descriptors() > before; }, "the connection to be accepted");
  }
  // The device still works.
  void expect_all_is_well() {
    test::run_idle({a->domain.get(), b->domain.get()});
    post(2, 64, b->rkey);
    EXPECT_FALSE(ended(2).has_value());
    EXPECT_TRUE(a->record().down.empty());
  }
};

// Only tcp has this problem.
INSTANTIATE_TEST_SUITE_P(Devices, LibfabricStrangers, testing::Values("tcp"),
                         [](const auto& info) { return test::label(info.param); });

TEST_P(LibfabricStrangers, AreHungUpOnWhenAnOfferIsWithdrawn) {
  const size_t before = descriptors();
  {
    const Bytes offer = must(a->domain->offer(kOther));
    Stranger accepted(offer);
    run_until_accepted();
    Stranger waiting(offer);
    a->domain->connector().withdraw(kOther);
    accepted.speak();
    waiting.speak();
    EXPECT_TRUE(accepted.is_hung_up_on());
    EXPECT_TRUE(waiting.is_hung_up_on());
    expect_all_is_well();
  }
  EXPECT_EQ(descriptors(), before);
}

TEST_P(LibfabricStrangers, AreHungUpOnWhenALinkIsFenced) {
  const Bytes offer = must(a->domain->offer(kOther));
  must(a->domain->complete(kOther, must(b->domain->accept(kOther, offer))));
  post(3, 1, b->rkey, 0, kOther);
  EXPECT_FALSE(ended(3).has_value());
  Stranger stranger(offer);
  run_until_accepted();
  run([&] { return a->domain->fence(kOther); }, "the fence");
  stranger.speak();
  EXPECT_TRUE(stranger.is_hung_up_on());
  b->record().down.clear();
  expect_all_is_well();
}

}  // namespace
}  // namespace kvc::libfabric
