// Ids: each kind of object is numbered separately, so that frequent objects do not use up the numbers of others.

#include "tests/rig.h"

namespace kvc::test {
namespace {

TEST(Ids, OfEachKindFollowEachOther) {
  Pair pair("sim", 4096);
  TransferEngine& engine = *pair.sender.engine;
  Side other(config("other", "sim"), 4096);
  TransferId last = must(engine.open_transfer(pair.to_receiver));
  for (int i = 0; i < 100; ++i) {
    const TransferId next = must(engine.open_transfer(pair.to_receiver));
    EXPECT_EQ(next, last + 1);
    last = next;
    EXPECT_EQ(must(engine.send(pair.to_receiver, Bytes(1))), ++last) << "a message is a transfer too";
  }
  EXPECT_EQ(must(engine.register_memory(pair.sender.data(), 64, pair.sender.memory.fd(), 0)), pair.sender.region + 1);
  EXPECT_EQ(
      must(engine.import_region(pair.to_receiver, must(pair.receiver.engine->region_descriptor(pair.receiver.region)))),
      pair.receiver_region + 1);
  EXPECT_EQ(connect(engine, *other.engine).first_to_second, pair.to_receiver + 1);
  const PeerGroupId group = must(engine.add_peer_group({pair.to_receiver}));
  EXPECT_EQ(must(engine.add_peer_group({pair.to_receiver})), group + 1);
  EXPECT_EQ(must(engine.open_transfer(pair.to_receiver)), last + 1) << "none of these was a transfer";
}

}  // namespace
}  // namespace kvc::test
