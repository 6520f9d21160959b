// Objects whose destructor may block (for example, those that free GPU memory) end on the control thread. They end
// neither on the transfer thread nor under a lock that this thread takes.
#include <pthread.h>

#include <array>
#include <atomic>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "lane/completion_word.h"
#include "lane/layer_signal.h"
#include "tests/rig.h"

namespace kvc::test::control_owned {
namespace {

constexpr size_t kBytes = 4096;

std::string thread_name() {
  std::array<char, 16> name{};
  pthread_getname_np(pthread_self(), name.data(), name.size());
  return name.data();
}

// Records the thread on which it was destroyed.
struct Ends {
  std::promise<std::string>* where;
  ~Ends() { where->set_value(thread_name()); }
};

struct Signal final : LayerSignal {
  Signal(std::function<void()> wake, std::promise<std::string>& where) : LayerSignal(std::move(wake)), ends{&where} {}
  Ends ends;
};

struct Word final : CompletionWord {
  explicit Word(std::promise<std::string>& where) : ends{&where} {}
  Status store(uint64_t value) noexcept override {
    stored = value;
    return {};
  }
  Ends ends;
  std::atomic<uint64_t> stored{0};
};

std::string name_of(std::promise<std::string>& where) {
  std::future<std::string> name = where.get_future();
  if (name.wait_for(kLimit) != std::future_status::ready) return "nowhere";
  return name.get();
}

TEST(ControlOwned, ASignalThatItsUserDroppedEndsOnTheControlThread) {
  Pair pair("sim", kBytes);
  TransferEngine& engine = *pair.sender.engine;
  std::promise<std::string> where;
  // The value has been reached, so the plan ends at once and does not keep the signal.
  auto signal = std::make_shared<Signal>([] {}, where);
  signal->store(1);
  const TransferId transfer = must(engine.open_transfer(pair.to_receiver));
  std::vector<ArmedSlice> slices{{1, pair.sender.region, 0, pair.receiver_region, 0, 64, std::nullopt}};
  must(engine.arm_slices(transfer, std::move(signal), std::move(slices)));
  must(engine.seal(transfer));
  EXPECT_EQ(ended(engine, transfer).kind, EventKind::kTransferDone);
  EXPECT_EQ(name_of(where), "kvc-c-sender");
}

TEST(ControlOwned, ACompletionWordThatItsUserDroppedEndsOnTheControlThread) {
  Pair pair("sim", kBytes);
  TransferEngine& engine = *pair.receiver.engine;
  std::promise<std::string> where;
  auto word = std::make_shared<Word>(where);
  const CounterSet set = must(engine.alloc_counters(1));
  for (uint64_t step = 1; step <= 3; ++step) {
    must(engine.expect(set.id, {step}, {}, word, step));
    must(pair.sender.engine->write_one(pair.to_receiver, pair.sender.region, 0, pair.receiver_region, 0, 64,
                                       set.immediates[0]));
    must(engine.wait_counters(set.id, kLimit));
    EXPECT_EQ(word->stored, step);
  }
  word.reset();
  must(engine.release_counters(set.id));
  EXPECT_EQ(name_of(where), "kvc-c-receiver");
}

// The counters may be read after the end of the transfer engine, when the control thread is gone.
TEST(ControlOwned, ACompletionWordEndsWithItsEngineAlsoWhereAReaderIsLeft) {
  std::promise<std::string> where;
  std::optional<CounterReader> reader;
  {
    Pair pair("sim", kBytes);
    TransferEngine& engine = *pair.receiver.engine;
    const CounterSet set = must(engine.alloc_counters(1));
    reader = must(engine.counter_reader(set.id));
    must(engine.expect(set.id, {1}, {}, std::make_shared<Word>(where), 1));
  }
  EXPECT_EQ(name_of(where), "kvc-c-receiver");
  EXPECT_EQ(reader->value(0), 0U);
}

}  // namespace
}  // namespace kvc::test::control_owned
