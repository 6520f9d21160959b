// Helpers for tests of expert groups: ranks as processes, memory on a host or a GPU, and steps. The steps define what
// dispatch and combine do to memory, without any code of moe/cpu_exchange.h.
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/unique_fd.h"
#include "cuda/driver.h"
#include "moe/far_ranks.h"
#include "moe/group.h"
#include "tests/cuda_test_support.h"
#include "tests/rig.h"

namespace kvc::moe {

using test::must;

// --- Memory

// Bytes that launches read and write, on the heap or on a GPU.
class Place {
 public:
  Place(std::shared_ptr<cuda::Context> gpu, size_t bytes) : gpu_(std::move(gpu)), bytes_(bytes) {
    if (!gpu_) {
      heap_.resize(bytes + 64);
      const auto address = reinterpret_cast<uintptr_t>(heap_.data());
      data_ = heap_.data() + (64 - address % 64) % 64;
      return;
    }
    const cuda::Context::Scope scope(*gpu_);
    cuda::DevicePointer address = 0;
    EXPECT_EQ(gpu_->driver().cuMemAlloc_v2(&address, bytes), cuda::kSuccess);
    data_ = reinterpret_cast<unsigned char*>(address);
  }
  Place(const Place&) = delete;
  Place& operator=(const Place&) = delete;
  ~Place() {
    if (!gpu_) return;
    const cuda::Context::Scope scope(*gpu_);
    gpu_->driver().cuMemFree_v2(reinterpret_cast<cuda::DevicePointer>(data_));
  }
  unsigned char* data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  std::shared_ptr<cuda::Context> gpu_;
  size_t bytes_;
  std::vector<unsigned char> heap_;
  unsigned char* data_ = nullptr;
};

inline void put(const std::shared_ptr<cuda::Context>& gpu, unsigned char* target, const void* source, size_t bytes) {
  if (bytes == 0) return;
  if (!gpu) {
    std::memcpy(target, source, bytes);
    return;
  }
  const cuda::Context::Scope scope(*gpu);
  EXPECT_EQ(gpu->driver().cuMemcpyHtoD_v2(reinterpret_cast<cuda::DevicePointer>(target), source, bytes), 0);
  gpu->driver().cuStreamSynchronize(nullptr);
}
inline std::vector<unsigned char> get(const std::shared_ptr<cuda::Context>& gpu, const unsigned char* source,
                                      size_t bytes) {
  std::vector<unsigned char> data(bytes);
  if (bytes == 0) return data;
  if (!gpu) {
    std::memcpy(data.data(), source, bytes);
    return data;
  }
  const cuda::Context::Scope scope(*gpu);
  EXPECT_EQ(gpu->driver().cuMemcpyDtoH_v2(data.data(), reinterpret_cast<cuda::DevicePointer>(source), bytes), 0);
  return data;
}

// --- Ranks

// Exchanges numbers and descriptors between two processes.
class Wire {
 public:
  explicit Wire(int fd = -1) : fd_(fd) {}
  int fd() const { return fd_.get(); }
  void send(uint64_t number, int descriptor = -1) const {
    iovec part{&number, sizeof(number)};
    std::array<char, CMSG_SPACE(sizeof(int))> room{};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    if (descriptor >= 0) {
      message.msg_control = room.data();
      message.msg_controllen = room.size();
      cmsghdr* header = CMSG_FIRSTHDR(&message);
      header->cmsg_level = SOL_SOCKET;
      header->cmsg_type = SCM_RIGHTS;
      header->cmsg_len = CMSG_LEN(sizeof(int));
      std::memcpy(CMSG_DATA(header), &descriptor, sizeof(int));
    }
    sendmsg(fd_.get(), &message, MSG_NOSIGNAL);  // the other process may be gone
  }
  // No value: the other process is gone.
  std::optional<uint64_t> receive(UniqueFd* descriptor = nullptr) const {
    uint64_t number = 0;
    iovec part{&number, sizeof(number)};
    std::array<char, CMSG_SPACE(sizeof(int))> room{};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = room.data();
    message.msg_controllen = room.size();
    if (recvmsg(fd_.get(), &message, MSG_CMSG_CLOEXEC) != sizeof(number)) return std::nullopt;
    if (const cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr && descriptor != nullptr) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(header), sizeof(int));
      *descriptor = UniqueFd(fd);
    }
    return number;
  }

 private:
  UniqueFd fd_;
};

// A rank, in its process.
class Rank {
 public:
  // `text`: what run_ranks() put into the environment.
  explicit Rank(const std::string& text) {
    std::istringstream stream(text);
    int call = 0;
    bool gpu = false;
    int parent = -1;
    stream >> call >> rank >> ranks >> gpu >> parent;
    parent_ = Wire(parent);
    for (uint32_t peer = 0; peer < ranks; ++peer) {
      int fd = -1;
      stream >> fd;
      peers_.emplace_back(fd);
    }
    if (!gpu) return;
    const cuda::Driver* driver = test::find_driver();
    if (driver == nullptr) throw std::runtime_error("no driver");
    int devices = 0;
    driver->cuDeviceGetCount(&devices);
    device = static_cast<int>(rank) % devices;
    context = must(cuda::Context::retain(device));
    const cuda::Context::Scope scope(*context);
    stream_ = must(cuda::OwnedStream::create(*driver, cuda::OwnedStream::Priority::kHighest));
  }
  Rank(const Rank&) = delete;
  Rank& operator=(const Rank&) = delete;
  ~Rank() { stop_watching(); }

  // Creates the group, and attaches the segments of all ranks.
  Group& form(GroupConfig config) {
    config.rank = rank;
    config.ranks = ranks;
    config.device = device;
    stop_watching();
    group = must(Group::create(config));
    for (uint32_t peer = 0; peer < ranks; ++peer) {
      if (peer != rank && !is_far(peer)) peers_[peer].send(0, must(group->descriptor()).get());
    }
    for (uint32_t peer = 0; peer < ranks; ++peer) {
      if (peer == rank || is_far(peer)) continue;
      UniqueFd segment;
      if (!peers_[peer].receive(&segment) || !segment) throw std::runtime_error("no segment");
      must(group->attach(peer, segment.get()));
    }
    if (far != nullptr) must(group->join(*far));
    watch();
    return *group;
  }
  void barrier() {
    for (uint32_t peer = 0; peer < ranks; ++peer) {
      if (peer != rank) peers_[peer].send(1);
    }
    for (uint32_t peer = 0; peer < ranks; ++peer) {
      if (peer != rank && !peers_[peer].receive()) throw std::runtime_error("a rank is gone");
    }
  }
  const Wire& parent() const { return parent_; }
  const Wire& peer(uint32_t process) const { return peers_[process]; }
  // Sends a number to the parent, and waits for its reply.
  void report(uint64_t number) {
    parent_.send(number);
    parent_.receive();
  }
  void stop_watching() {
    if (!watcher_.joinable()) return;
    const uint64_t one = 1;
    EXPECT_EQ(write(end_.get(), &one, sizeof(one)), static_cast<ssize_t>(sizeof(one)));
    watcher_.join();
  }
  cuda::Stream stream() const { return stream_.get(); }
  // Waits until the enqueued work has ended.
  void finish() const {
    if (!context) return;
    const cuda::Context::Scope scope(*context);
    EXPECT_EQ(context->driver().cuStreamSynchronize(stream_.get()), cuda::kSuccess);
  }

  uint32_t rank = 0;
  uint32_t ranks = 0;
  int device = -1;
  std::shared_ptr<cuda::Context> context;
  FarRanks* far = nullptr;  // outlives the group; null: all ranks are on one node
  std::unique_ptr<Group> group;

 private:
  bool is_far(uint32_t peer) const { return far != nullptr && (far->config().far >> peer & 1U) != 0; }
  // As in the product: a thread that sees the end of a peer's process reports it to the group. A rank that fails its
  // test thus makes the tests of the other ranks fail.
  void watch() {
    end_ = UniqueFd(eventfd(0, EFD_CLOEXEC));
    watcher_ = std::thread([this] {
      std::vector<pollfd> entries;
      for (const Wire& peer : peers_) entries.push_back({peer.fd(), POLLRDHUP, 0});
      entries.push_back({end_.get(), POLLIN, 0});
      for (;;) {
        ::poll(entries.data(), entries.size(), -1);
        if (entries.back().revents != 0) return;
        for (uint32_t peer = 0; peer < ranks; ++peer) {
          if (entries[peer].revents == 0) continue;
          entries[peer].fd = -1;
          group->lose(peer);
        }
      }
    });
  }

  Wire parent_;
  std::vector<Wire> peers_;  // the entry of this rank is empty
  cuda::OwnedStream stream_;
  UniqueFd end_;
  std::thread watcher_;
};

// A rank's process, as the test's process sees it.
struct RankProcess {
  pid_t pid = 0;
  Wire wire;
  // Returns the next number that it reports. Fails the test if the process is gone.
  uint64_t told() const {
    const std::optional<uint64_t> number = wire.receive();
    EXPECT_TRUE(number.has_value()) << "the rank's process is gone";
    return number.value_or(~0ULL);
  }
  void go() const { wire.send(0); }
  void kill() const { ::kill(pid, SIGKILL); }
  void stop() const {
    ::kill(pid, SIGSTOP);
    int status = 0;
    ASSERT_EQ(waitpid(pid, &status, WUNTRACED), pid);
    ASSERT_TRUE(WIFSTOPPED(status));
  }
};
using RankProcesses = std::vector<RankProcess>;

inline constexpr const char* kRankVariable = "KVC_TEST_MOE_RANK";
inline constexpr int kWorked = 42;  // exit status of a rank whose work ran successfully

// Runs the work in this process, which is a rank's, and ends it.
[[noreturn]] inline void be_rank(const std::string& text, const std::function<void(Rank&)>& work) {
  try {
    Rank rank(text);
    work(rank);
    rank.stop_watching();
  } catch (const std::exception& error) {
    ADD_FAILURE() << error.what();
  }
  std::fflush(nullptr);
  _exit(testing::Test::HasFailure() ? 1 : kWorked);
}

// Runs `work` in `ranks` processes. A real driver does not survive a fork, so with one the processes start again with
// this test. `control` runs here meanwhile. `lost` names processes that it has killed or stopped.
inline void run_ranks(
    uint32_t ranks, bool gpu, const std::function<void(Rank&)>& work,
    const std::function<void(RankProcesses&)>& control = [](RankProcesses&) {},
    const std::vector<uint32_t>& lost = {}) {
  static const testing::TestInfo* test = nullptr;
  static int calls = 0;  // in this test
  const testing::TestInfo* const info = testing::UnitTest::GetInstance()->current_test_info();
  if (std::exchange(test, info) != info) calls = 0;
  const int call = ++calls;
  if (const char* text = std::getenv(kRankVariable)) {
    if (std::atoi(text) == call) be_rank(text, work);
    return;
  }
  if (gpu && cuda::kernel_image().empty()) GTEST_SKIP() << "needs GPU kernels: this build had no nvcc";
  const std::string name = std::string(info->test_suite_name()) + "." + info->name();
  std::vector<std::vector<UniqueFd>> mesh(ranks);
  for (std::vector<UniqueFd>& row : mesh) row.resize(ranks + 1);
  const auto connect = [](UniqueFd& a, UniqueFd& b) {
    std::array<int, 2> ends{};
    ASSERT_EQ(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, ends.data()), 0);
    a = UniqueFd(ends[0]);
    b = UniqueFd(ends[1]);
  };
  const bool begin_anew = cuda::loaded_driver() != nullptr && !test::HeldCopies::possible();
  RankProcesses processes(ranks);
  std::vector<UniqueFd> own(ranks);
  for (uint32_t a = 0; a < ranks; ++a) {
    connect(own[a], mesh[a][ranks]);
    for (uint32_t b = a + 1; b < ranks; ++b) connect(mesh[a][b], mesh[b][a]);
  }
  std::fflush(nullptr);
  for (uint32_t rank = 0; rank < ranks; ++rank) {
    std::string text = std::to_string(call) + " " + std::to_string(rank) + " " + std::to_string(ranks) + " " +
                       (gpu ? "1" : "0") + " " + std::to_string(mesh[rank][ranks].get());
    for (uint32_t peer = 0; peer < ranks; ++peer) text += " " + std::to_string(mesh[rank][peer].get());
    processes[rank].pid = fork();
    if (processes[rank].pid != 0) continue;
    for (uint32_t other = 0; other < ranks; ++other) {
      own[other].reset();
      if (other != rank) mesh[other].clear();
    }
    if (!begin_anew) be_rank(text, work);
    setenv(kRankVariable, text.c_str(), 1);
    setenv("GTEST_BRIEF", "1", 1);
    test::become_test(name.c_str());
  }
  mesh.clear();
  for (uint32_t rank = 0; rank < ranks; ++rank) {
    const int fd = dup(own[rank].get());
    fcntl(fd, F_SETFD, FD_CLOEXEC);
    processes[rank].wire = Wire(fd);
  }
  own.clear();
  control(processes);
  for (uint32_t rank = 0; rank < ranks; ++rank) {
    const bool is_lost = std::find(lost.begin(), lost.end(), rank) != lost.end();
    if (is_lost) processes[rank].kill();
    int status = 0;
    EXPECT_EQ(waitpid(processes[rank].pid, &status, 0), processes[rank].pid);
    if (!is_lost) {
      EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == kWorked) << "rank " << rank << ": " << status;
    }
  }
}

// --- Steps

enum class Routing : uint8_t { kAnywhere, kToLast, kNotToFirst, kToNobody };

struct Shape {
  uint32_t row_bytes;
  bool to_all;
  uint32_t misaligned = 0;  // offset in bytes of the source from a multiple of 64
};

struct Step {
  uint64_t seed = 1;
  uint32_t slot = 0;
  std::vector<uint32_t> sizes;
  uint32_t top_k = 2;
  uint32_t ids_bytes = 4;
  uint32_t experts = 8;
  std::vector<uint32_t> owners;  // empty: every row goes to every rank
  Routing routing = Routing::kAnywhere;
  std::vector<Shape> shapes{{64, false}};
  uint32_t hidden = 8;
  bool accumulate = false;
  bool halves = false;

  uint32_t ranks() const { return static_cast<uint32_t>(sizes.size()); }
  uint32_t before(uint32_t rank) const {
    uint32_t sum = 0;
    for (uint32_t i = 0; i < rank; ++i) sum += sizes[i];
    return sum;
  }
  uint32_t rows() const { return before(ranks()); }
  uint64_t offset(size_t column) const {
    uint64_t at = 0;
    for (size_t i = 0; i < column; ++i) at += (uint64_t{rows()} * shapes[i].row_bytes + 255) / 256 * 256;
    return at;
  }
  template <typename Number>
  std::vector<Number> random(uint64_t what, uint64_t rank, size_t count) const {
    std::vector<Number> numbers(count);
    test::fill_random(reinterpret_cast<std::byte*>(numbers.data()), count * sizeof(Number),
                      (seed * 4096 + what) * 16 + rank);
    return numbers;
  }

  // The ids that `rank` sends.
  std::vector<int64_t> ids(uint32_t rank) const {
    std::vector<int64_t> possible;
    for (uint32_t expert = 0; expert < experts; ++expert) {
      const uint32_t owner = owners.empty() ? 0 : owners[expert];
      if (routing == Routing::kToLast && owner != ranks() - 1) continue;
      if (routing == Routing::kNotToFirst && owner == 0) continue;
      if (routing != Routing::kToNobody) possible.push_back(expert);
    }
    for (const int64_t nobody : {int64_t{-1}, int64_t{experts}, int64_t{experts} + 7, int64_t{INT32_MIN}}) {
      possible.push_back(nobody);
    }
    if (ids_bytes == 8) {  // the lower half contains experts
      possible.push_back(int64_t{1} << 32);
      possible.push_back(INT64_MIN);
    }
    std::vector<int64_t> found;
    for (const auto number : random<uint64_t>(1, rank, size_t{sizes[rank]} * top_k)) {
      found.push_back(possible[number % possible.size()]);
    }
    if (seed % 4 == 0 && !found.empty()) std::fill(found.begin(), found.end(), found[0]);  // duplicates
    return found;
  }
  std::vector<std::byte> column(uint32_t rank, size_t index) const {
    std::vector<std::byte> data(size_t{sizes[rank]} * shapes[index].row_bytes);
    test::fill_random(data.data(), data.size(), seed * 64 + rank * 8 + index);
    return data;
  }
  // Whether `rank` has an expert of the token.
  bool wanted(const std::vector<int64_t>& ids_of_source, uint32_t token, uint32_t rank) const {
    if (owners.empty()) return true;
    for (uint32_t i = 0; i < top_k; ++i) {
      const int64_t id = ids_of_source[size_t{token} * top_k + i];
      if (id >= 0 && id < int64_t{experts} && owners[static_cast<size_t>(id)] == rank) return true;
    }
    return false;
  }

  // Does the work of dispatch on the dispatch area of `rank`.
  void dispatch(std::vector<unsigned char>& area, uint32_t rank) const {
    for (uint32_t source = 0; source < ranks(); ++source) {
      const std::vector<int64_t> chosen = ids(source);
      for (size_t i = 0; i < shapes.size(); ++i) {
        const std::vector<std::byte> data = column(source, i);
        const uint32_t bytes = shapes[i].row_bytes;
        for (uint32_t token = 0; token < sizes[source]; ++token) {
          if (!shapes[i].to_all && !wanted(chosen, token, rank)) continue;
          std::memcpy(area.data() + offset(i) + uint64_t{before(source) + token} * bytes,
                      data.data() + size_t{token} * bytes, bytes);
        }
      }
    }
  }
  // The experts' result for a row on `rank`: any bits in the first half of a row, sums that need rounding in the second
  // half.
  std::vector<uint16_t> result(uint32_t rank, uint32_t row) const {
    auto values = random<uint16_t>(100 + row, rank, hidden);
    for (uint32_t i = hidden / 2; i < hidden; ++i) values[i] = static_cast<uint16_t>(0x3f00U + (values[i] & 0x81ffU));
    return values;
  }
  std::vector<uint16_t> out_before(uint32_t rank) const {
    auto values = random<uint16_t>(50, rank, size_t{sizes[rank]} * hidden);
    for (uint16_t& value : values) value = static_cast<uint16_t>(0x3f80U + (value & 0x807fU));
    return values;
  }
  // The result of combine for `rank`, by its definition.
  std::vector<uint16_t> combined(uint32_t rank) const {
    std::vector<uint16_t> out = out_before(rank);
    const std::vector<int64_t> chosen = ids(rank);
    for (uint32_t token = 0; token < sizes[rank]; ++token) {
      std::vector<float> sums(hidden, 0.0F);
      const auto add = [&](const uint16_t* row) {
        for (uint32_t i = 0; i < hidden; ++i) sums[i] = sums[i] + std::bit_cast<float>(uint32_t{row[i]} << 16);
      };
      for (uint32_t expert_rank = 0; expert_rank < ranks(); ++expert_rank) {
        if (wanted(chosen, token, expert_rank)) add(result(expert_rank, before(rank) + token).data());
      }
      uint16_t* row = out.data() + size_t{token} * hidden;
      if (accumulate) add(row);
      for (uint32_t i = 0; i < hidden; ++i) row[i] = nearest(sums[i]);
    }
    return out;
  }
  // The bf16 nearest to a float; of two equally near values, the even one.
  static uint16_t nearest(float value) {
    const auto bits = std::bit_cast<uint32_t>(value);
    auto below = static_cast<uint16_t>(bits >> 16);
    if (std::isnan(value)) return 0x7fc0;
    if (std::isinf(value)) return below;
    const uint32_t rest = bits & 0xffffU;
    const bool up = rest > 0x8000U || (rest == 0x8000U && below % 2 == 1);
    return static_cast<uint16_t>(below + (up ? 1 : 0));
  }
  // Whether the bits are equal. All NaNs count as equal.
  static bool same(uint16_t a, uint16_t b) {
    const auto is_nan = [](uint16_t bits) { return (bits & 0x7fffU) > 0x7f80U; };
    return a == b || (is_nan(a) && is_nan(b));
  }
};

// Runs a rank's steps, and knows the expected contents of its segment after each.
class Stepper {
 public:
  static constexpr uint64_t kDispatchBytes = 224 << 10;
  static constexpr uint64_t kCombineBytes = 72 << 10;
  static constexpr uint32_t kMaxTokens = 32;
  static constexpr uint32_t kExperts = 8;

  static GroupConfig config() {
    GroupConfig config;
    config.dispatch_bytes = kDispatchBytes;
    config.combine_bytes = kCombineBytes;
    config.max_tokens = kMaxTokens;
    config.experts = kExperts;
    config.slots = 2;
    config.timeout_ns = 30'000'000'000;
    return config;
  }

  explicit Stepper(Rank& rank, const GroupConfig& wanted = config())
      : rank_(rank), group_(rank.form(wanted)), delays_(rank.rank + 1) {
    for (uint32_t slot = 0; slot < 2; ++slot) {
      Slot& mine = slots_[slot];
      mine.sources = std::make_unique<Place>(rank.context, kDispatchBytes);
      mine.ids = std::make_unique<Place>(rank.context, size_t{kMaxTokens} * 32 * 8);
      mine.out = std::make_unique<Place>(rank.context, kCombineBytes);
      mine.area.assign(kDispatchBytes, 0xEE);
      mine.results.assign(kCombineBytes, 0xEE);
      put(rank.context, dispatch_area(slot), mine.area.data(), mine.area.size());
      put(rank.context, combine_area(slot), mine.results.data(), mine.results.size());
    }
    rank.barrier();
  }

  // Runs dispatch, the experts and combine, and compares both with their definition.
  void run(const Step& step) {
    prepare(step);
    if (step.halves) {
      delay();
      dispatch(step, kSend);
    }
    delay();
    dispatch(step, step.halves ? kReceive : kSend | kReceive);
    experts(step);
    if (step.halves) {
      delay();
      combine(step, kSend);
    }
    delay();
    combine(step, step.halves ? kReceive : kSend | kReceive);
    check(step);
  }

  // The parts of run().
  void prepare(const Step& step) {
    Slot& slot = slots_[step.slot];
    if (step.owners != owners_) must(group_.place(owners_ = step.owners));
    const std::vector<int64_t> ids = step.ids(rank_.rank);
    std::vector<unsigned char> packed(ids.size() * step.ids_bytes);
    for (size_t i = 0; i < ids.size(); ++i) {
      const auto narrow = static_cast<int32_t>(ids[i]);
      step.ids_bytes == 8 ? std::memcpy(packed.data() + i * 8, &ids[i], 8)
                          : std::memcpy(packed.data() + i * 4, &narrow, 4);
    }
    put(rank_.context, slot.ids->data(), packed.data(), packed.size());
    slot.columns.clear();
    size_t at = 0;
    for (size_t i = 0; i < step.shapes.size(); ++i) {
      const Shape& shape = step.shapes[i];
      const std::vector<std::byte> data = step.column(rank_.rank, i);
      unsigned char* const source = slot.sources->data() + at + shape.misaligned;
      put(rank_.context, source, data.data(), data.size());
      slot.columns.push_back({source, shape.row_bytes, step.offset(i), shape.to_all});
      at += (data.size() + shape.misaligned + 63) / 64 * 64;
    }
    const std::vector<uint16_t> out = step.out_before(rank_.rank);
    put(rank_.context, slot.out->data(), out.data(), out.size() * 2);
  }
  void dispatch(const Step& step, uint32_t phases) {
    Slot& slot = slots_[step.slot];
    must(group_.dispatch(rank_.stream(), step.slot, step.sizes, slot.ids->data(), step.ids_bytes, step.top_k,
                         slot.columns, phases));
  }
  // Compares the received rows, and writes the experts' results.
  void experts(const Step& step) {
    rank_.finish();
    Slot& slot = slots_[step.slot];
    step.dispatch(slot.area, rank_.rank);
    compare(get(rank_.context, dispatch_area(step.slot), kDispatchBytes), slot.area, "dispatch", step);
    compare(get(rank_.context, combine_area(step.slot), kCombineBytes), slot.results, "results before", step);
    write_results(step, slot.results);
    put(rank_.context, combine_area(step.slot), slot.results.data(), slot.results.size());
  }
  // Rows that are not wanted on this rank hold values that would ruin every sum.
  void write_results(const Step& step, std::vector<unsigned char>& area) const {
    for (uint32_t source = 0; source < step.ranks(); ++source) {
      const std::vector<int64_t> chosen = step.ids(source);
      for (uint32_t token = 0; token < step.sizes[source]; ++token) {
        const uint32_t row = step.before(source) + token;
        std::vector<uint16_t> values(step.hidden, 0x7fff);
        if (step.wanted(chosen, token, rank_.rank)) values = step.result(rank_.rank, row);
        std::memcpy(area.data() + size_t{row} * step.hidden * 2, values.data(), values.size() * 2);
      }
    }
  }
  void combine(const Step& step, uint32_t phases) {
    must(group_.combine(rank_.stream(), step.slot, step.sizes, slots_[step.slot].out->data(), step.hidden,
                        step.accumulate, phases));
  }
  void check(const Step& step) {
    rank_.finish();
    EXPECT_FALSE(group_.fault().has_value()) << "step " << step.seed;
    check_out(step,
              get(rank_.context, slots_[step.slot].out->data(), size_t{step.sizes[rank_.rank]} * step.hidden * 2));
  }
  void check_out(const Step& step, const std::vector<unsigned char>& bytes) const {
    std::vector<uint16_t> out(bytes.size() / 2);
    if (!bytes.empty()) std::memcpy(out.data(), bytes.data(), bytes.size());
    const std::vector<uint16_t> expected = step.combined(rank_.rank);
    ASSERT_EQ(out.size(), expected.size());
    for (size_t i = 0; i < out.size(); ++i) {
      ASSERT_TRUE(Step::same(out[i], expected[i]))
          << "step " << step.seed << ", rank " << rank_.rank << ", token " << i / step.hidden << ", column "
          << i % step.hidden << ": " << std::hex << out[i] << ", not " << expected[i];
    }
  }
  void compare(const std::vector<unsigned char>& found, const std::vector<unsigned char>& expected, const char* what,
               const Step& step) const {
    if (found == expected) return;
    const auto differ = std::mismatch(found.begin(), found.end(), expected.begin());
    FAIL() << what << ", step " << step.seed << ", rank " << rank_.rank << ": byte " << differ.first - found.begin()
           << " is " << int{*differ.first} << ", not " << int{*differ.second};
  }
  // Each rank has its own delays. Some are long enough for the other ranks to run ahead as far as they can.
  void delay() {
    if (delays_() % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(delays_() % 400));
  }

  unsigned char* dispatch_area(uint32_t slot) const { return group_.base() + group_.layout().dispatch(slot); }
  unsigned char* combine_area(uint32_t slot) const { return group_.base() + group_.layout().combine(slot); }
  unsigned char* out(uint32_t slot) const { return slots_[slot].out->data(); }
  std::vector<unsigned char>& expected_area(uint32_t slot) { return slots_[slot].area; }
  void expect_results(uint32_t slot, const std::vector<unsigned char>& results) { slots_[slot].results = results; }

 private:
  struct Slot {
    std::unique_ptr<Place> sources;
    std::unique_ptr<Place> ids;
    std::unique_ptr<Place> out;
    std::vector<ColumnSpec> columns;
    std::vector<unsigned char> area;     // the expected dispatch area
    std::vector<unsigned char> results;  // the expected combine area
  };

  Rank& rank_;
  Group& group_;
  std::mt19937 delays_;
  std::vector<uint32_t> owners_;
  std::array<Slot, 2> slots_;
};

inline std::vector<uint32_t> equal_blocks(uint32_t ranks, uint32_t experts = Stepper::kExperts) {
  std::vector<uint32_t> owners(experts);
  for (uint32_t i = 0; i < experts; ++i) owners[i] = i * ranks / experts;
  return owners;
}

}  // namespace kvc::moe
