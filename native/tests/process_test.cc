// Effects of a process on its transfer engines: a fork, and a lack of threads.
#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

#include <optional>

#include "tests/rig.h"

namespace kvc::test::processes {
namespace {

TEST(EngineProcess, AForkThatEndsItsCopyOfTheEnginesEndsWell) {
  std::optional<Pair> pair(std::in_place, "sim", 4096);
  const pid_t child = fork();
  if (child == 0) {
    alarm(30);  // joining a thread that does not exist may also wait without limit
    pair->sender.engine.reset();
    pair->receiver.engine.reset();
    _exit(0);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "status " << status;
  const TransferId write = must(pair->sender.engine->write_one(pair->to_receiver, pair->sender.region, 0,
                                                               pair->receiver_region, 0, 64, std::nullopt));
  EXPECT_EQ(ended(*pair->sender.engine, write).kind, EventKind::kTransferDone) << "the parent's go on";
}

// A stack size that no address space can hold. It replaces a limit of threads, which does not apply to root.
class NoThreads {
 public:
  NoThreads() {
    pthread_getattr_default_np(&before_);
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, size_t{1} << 46);
    EXPECT_EQ(pthread_setattr_default_np(&attributes), 0);
    pthread_attr_destroy(&attributes);
  }
  NoThreads(const NoThreads&) = delete;
  NoThreads& operator=(const NoThreads&) = delete;
  ~NoThreads() {
    pthread_setattr_default_np(&before_);
    pthread_attr_destroy(&before_);
  }

 private:
  pthread_attr_t before_{};
};

TEST(EngineProcess, WithoutAThreadAnEngineIsRefusedWithAnError) {
  EngineConfig several = config("several", "sim", 2);
  several.workers = 3;
  const NoThreads none;
  for (EngineConfig engine_config : {config("one", "sim"), several}) {
    const auto engine = TransferEngine::create(engine_config);
    ASSERT_FALSE(engine.ok());
    EXPECT_EQ(engine.error().code, ErrorCode::kResources) << engine.error().to_string();
  }
}

}  // namespace
}  // namespace kvc::test::processes
