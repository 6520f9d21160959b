#include "engine/link_message.h"

#include "base/byte_codec.h"

namespace kvc {

Bytes encode(const LinkMessage& message) {
  ByteWriter writer;
  writer.number(static_cast<uint8_t>(message.tag));
  writer.number(message.link);
  writer.number(message.epoch);
  writer.number(message.part);
  writer.number(static_cast<uint16_t>(message.numbers.size()));
  for (const uint32_t number : message.numbers) writer.number(number);
  writer.blob(message.bytes);
  return writer.take();
}

std::optional<LinkMessage> decode_link_message(std::span<const std::byte> bytes) {
  ByteReader reader(bytes);
  LinkMessage message;
  const auto tag = reader.number<uint8_t>();
  if (tag < static_cast<uint8_t>(MessageTag::kLinkLost) || tag > static_cast<uint8_t>(MessageTag::kLinkHello)) {
    return std::nullopt;
  }
  message.tag = static_cast<MessageTag>(tag);
  message.link = reader.number<uint8_t>();
  message.epoch = reader.number<uint32_t>();
  message.part = reader.number<uint16_t>();
  const uint32_t numbers = reader.number<uint16_t>();
  if (numbers > LinkMessage::kMaxNumbers) reader.fail();
  for (uint32_t i = 0; i < numbers && !reader.failed(); ++i) message.numbers.push_back(reader.number<uint32_t>());
  const std::span<const std::byte> blob = reader.blob(LinkMessage::kMaxBytes);
  message.bytes.assign(blob.begin(), blob.end());
  if (!reader.complete()) return std::nullopt;
  return message;
}

}  // namespace kvc
