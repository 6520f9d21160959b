// Which NIC, port and address the verbs provider chooses, over a stand-in for libibverbs.
#include <gtest/gtest.h>

#include <string>

#include "tests/verbs_test_support.h"

namespace kvc::verbs {
namespace {

TEST(VerbsDevices, TheSpecSaysWhatToUse) {
  const DeviceSpec spec = test::must(DeviceSpec::parse("mlx5_2:1,gid=3,tc=106,sl=5,pkey=0x8001"));
  EXPECT_EQ(spec.name, "mlx5_2");
  EXPECT_EQ(spec.port, 1);
  EXPECT_EQ(spec.gid_index, 3U);
  EXPECT_EQ(spec.traffic_class, 106);
  EXPECT_EQ(spec.service_level, 5);
  EXPECT_EQ(spec.pkey, 0x8001);
  EXPECT_EQ(test::must(DeviceSpec::parse("")).name, "");
  EXPECT_EQ(test::must(DeviceSpec::parse("rxe0")).port, 0);
  for (const char* wrong : {"a:0", "a:256", "a:x", "a,gid=", "a,gid=256", "a,tc=300", "a,sl=16", "a,pkey=0", "a,b=1",
                            "a,,tc=1", "a:1:2", "a,gid=-1", "a,gid=1x"}) {
    const Result<DeviceSpec> parsed = DeviceSpec::parse(wrong);
    ASSERT_FALSE(parsed.ok()) << wrong;
    EXPECT_NE(parsed.error().message.find("NAME[:PORT]"), std::string::npos) << "says what to write";
  }
}

std::string refusal(const std::string& device) {
  test::ManualControl control;
  DomainConfig config;
  config.device = device;
  const auto opened = VerbsConnector::open(config, control, fake::Fabric::library(), {});
  return opened.ok() ? "opened" : opened.error().message;
}

TEST(VerbsDevices, ARefusalNamesEachDeviceAndTheReasonAgainstIt) {
  fake::Fabric fabric;
  EXPECT_NE(refusal("").find("no RDMA device"), std::string::npos);
  fabric.add("down0", {{.state = 1, .gids = {{abi::IBV_GID_TYPE_ROCE_V2, fake::ipv4(1)}}}});
  fabric.add("siw0", {{}}).device.transport_type = abi::IBV_TRANSPORT_IWARP;
  fabric.add("bare0", {{}});
  const std::string message = refusal("");
  for (const char* part :
       {"down0: port 1 is not active", "siw0: iWARP carries no immediates", "bare0: its GID table is empty"}) {
    EXPECT_NE(message.find(part), std::string::npos) << message;
  }
  fabric.add_roce("good0", 3);
  EXPECT_EQ(refusal(""), "opened") << "the first that can do the work";
  EXPECT_NE(refusal("other0").find("no usable RDMA device 'other0'"), std::string::npos);
  EXPECT_NE(refusal("good0:2").find("port 2"), std::string::npos);
  EXPECT_NE(refusal("good0,gid=9").find("nothing at index 9"), std::string::npos);
  EXPECT_NE(refusal("good0,pkey=0x8005").find("pkey"), std::string::npos);
}

TEST(VerbsDevices, TheAnswerUsesAnAddressOfTheOffersFamily) {
  fake::Fabric fabric;
  fabric.add("v6", {{.gids = {{abi::IBV_GID_TYPE_ROCE_V2, fake::ipv6(1)}}}});
  fabric.add("both",
             {{.gids = {{abi::IBV_GID_TYPE_ROCE_V2, fake::ipv4(2)}, {abi::IBV_GID_TYPE_ROCE_V2, fake::ipv6(2)}}}});
  fabric.add("v4", {{.gids = {{abi::IBV_GID_TYPE_ROCE_V2, fake::ipv4(3)}}}});
  fabric.add(
      "ib",
      {{.link_layer = abi::IBV_LINK_LAYER_INFINIBAND, .lid = 7, .gids = {{abi::IBV_GID_TYPE_IB, fake::ipv6(4)}}}});
  fabric.add(
      "ib2",
      {{.link_layer = abi::IBV_LINK_LAYER_INFINIBAND, .lid = 8, .gids = {{abi::IBV_GID_TYPE_IB, fake::ipv6(5)}}}});
  {
    Pair p(fake::Fabric::library(), "v6", "both");
    p.connect();
    EXPECT_EQ(fabric.queue_pairs.back()->rtr.ah_attr.grh.sgid_index, 1);
    ASSERT_EQ(post(p.a, kLinkOfA, p.b, pages(1, 1)), Posted::kYes);
    p.run_until([&] { return p.b.record.counted == 1; });
  }
  {
    Pair p(fake::Fabric::library(), "v6", "v4");
    Result<Bytes> answer = p.b.domain->accept(kLinkOfB, test::must(p.a.domain->offer(kLinkOfA)));
    ASSERT_FALSE(answer.ok());
    EXPECT_EQ(answer.error().code, ErrorCode::kNotReachable);
  }
  {
    Pair p(fake::Fabric::library(), "ib", "v4");
    Result<Bytes> answer = p.b.domain->accept(kLinkOfB, test::must(p.a.domain->offer(kLinkOfA)));
    ASSERT_FALSE(answer.ok());
    EXPECT_EQ(answer.error().code, ErrorCode::kNotReachable);
  }
  {
    Pair p(fake::Fabric::library(), "ib", "ib2");
    p.connect();
    EXPECT_EQ(fabric.queue_pairs.back()->rtr.ah_attr.is_global, 0) << "one subnet: by LID";
    EXPECT_EQ(fabric.queue_pairs.back()->rtr.ah_attr.dlid, 7);
    ASSERT_EQ(post(p.a, kLinkOfA, p.b, pages(1, 1)), Posted::kYes);
    p.run_until([&] { return p.b.record.counted == 1; });
  }
}

}  // namespace
}  // namespace kvc::verbs
