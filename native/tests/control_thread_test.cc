#include "engine/control_thread.h"

#include <gtest/gtest.h>

#include <atomic>
#include <future>

#include "tests/rig.h"

namespace kvc::test {
namespace {

TEST(ControlThread, DomainsAreWokenAfterEachTaskAndNotOnlyAfterALongOneBehindIt) {
  std::atomic<bool> mapped{false};
  std::promise<void> woken;
  bool told = false;  // used on the control thread
  ControlThread control([&] {
    if (mapped && !std::exchange(told, true)) woken.set_value();
  });
  must(control.start("test"));
  std::promise<void> go;
  std::future_status status{};
  control.run([&] { go.get_future().wait(); });
  control.run([&] { mapped = true; });
  control.run([&, waits = woken.get_future().share()] { status = waits.wait_for(kLimit); });
  go.set_value();  // all three tasks were submitted
  control.stop();
  EXPECT_EQ(status, std::future_status::ready);
}

}  // namespace
}  // namespace kvc::test
