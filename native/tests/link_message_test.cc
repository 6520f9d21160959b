#include "engine/link_message.h"

#include <gtest/gtest.h>

#include <random>

#include "engine/message_window.h"

namespace kvc {
namespace {

TEST(LinkMessage, ComesBackAsItWas) {
  LinkMessage message{.tag = MessageTag::kTallies, .link = 7, .epoch = 0x01020304, .part = 513};
  for (uint32_t i = 0; i < LinkMessage::kMaxNumbers; ++i) message.numbers.push_back(i * 0x01010101);
  const Bytes bytes = encode(message);
  EXPECT_LE(bytes.size(), kMaxMessageBytes);
  const std::optional<LinkMessage> decoded = decode_link_message(bytes);
  ASSERT_TRUE(decoded.has_value());
  EXPECT_EQ(decoded->tag, message.tag);
  EXPECT_EQ(decoded->link, message.link);
  EXPECT_EQ(decoded->epoch, message.epoch);
  EXPECT_EQ(decoded->part, message.part);
  EXPECT_EQ(decoded->numbers, message.numbers);
  EXPECT_TRUE(decoded->bytes.empty());

  const LinkMessage offer{.tag = MessageTag::kLinkOffer, .bytes = Bytes(LinkMessage::kMaxBytes, std::byte{5})};
  EXPECT_EQ(encode(offer).size(), kMaxMessageBytes);
  EXPECT_EQ(decode_link_message(encode(offer))->bytes, offer.bytes);
}

TEST(LinkMessage, NothingElseIsOne) {
  const Bytes good = encode({.tag = MessageTag::kLinkLost, .link = 1, .numbers = {1, 2, 3}, .bytes = Bytes(5)});
  for (size_t length = 0; length < good.size(); ++length) {
    EXPECT_FALSE(decode_link_message(std::span(good).first(length)).has_value()) << length;
  }
  Bytes longer = good;
  longer.push_back(std::byte{});
  EXPECT_FALSE(decode_link_message(longer).has_value());
  for (const uint8_t tag : {0, 1, 7, 255}) {
    Bytes other = good;
    other[0] = static_cast<std::byte>(tag);
    EXPECT_FALSE(decode_link_message(other).has_value()) << tag;
  }
  std::mt19937_64 random(1);
  for (int i = 0; i < 10000; ++i) {
    Bytes noise(random() % 64);
    for (std::byte& b : noise) b = static_cast<std::byte>(random());
    (void)decode_link_message(noise);  // checked by the sanitizers
  }
}

TEST(MessageWindow, TakesEachNumberOnce) {
  MessageWindow window;
  for (const uint32_t number : {1U, 0U, 5U, 3U, 2U}) {
    EXPECT_FALSE(window.seen(number)) << number;
    window.add(number);
    EXPECT_TRUE(window.seen(number)) << number;
  }
  EXPECT_FALSE(window.seen(4));
}

TEST(MessageWindow, ANumberThatNeverComesIsGivenUpInTheEnd) {
  MessageWindow window;
  for (uint32_t number = 1; number < 200000; ++number) {
    ASSERT_FALSE(window.seen(number));
    window.add(number);
  }
  EXPECT_TRUE(window.seen(0));
  EXPECT_FALSE(window.seen(200000));
}

TEST(MessageWindow, NumbersGoRound) {
  MessageWindow window;
  uint32_t number = 0;
  // Up to the wrap-around in steps that the window accepts, then across it.
  while (number < UINT32_MAX - 70000) window.add(number += 60000);
  for (uint32_t i = 0; i < 200; ++i) {
    number += 1000;
    EXPECT_FALSE(window.seen(number));
    window.add(number);
    EXPECT_TRUE(window.seen(number));
  }
  EXPECT_LT(number, 200000U);
}

}  // namespace
}  // namespace kvc
