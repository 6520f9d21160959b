#include "providers/tcp/wire.h"

#include <cstring>

#include "base/byte_codec.h"

namespace kvc::tcp {
namespace {

constexpr uint32_t kOfferMagic = 0x314f564b;   // "KVO1"
constexpr uint32_t kAnswerMagic = 0x3141564b;  // "KVA1"
constexpr size_t kMaxAddress = 64;             // the longest numeric IPv6 address with a scope is shorter

Secret take_secret(ByteReader& reader) {
  Secret secret;
  const auto bytes = reader.blob(secret.bytes.size());
  if (bytes.size() == secret.bytes.size()) {
    std::memcpy(secret.bytes.data(), bytes.data(), bytes.size());
  } else {
    reader.fail();
  }
  return secret;
}

Status check_prefix(ByteReader& reader, uint32_t magic, std::string_view what) {
  const auto got_magic = reader.number<uint32_t>();
  const auto version = reader.number<uint16_t>();
  if (reader.failed() || got_magic != magic) {
    return tcp_error(ErrorCode::kInvalidArgument, what,
                     "the bytes are not a valid " + std::string(what) + " of the tcp provider");
  }
  if (version != kVersion) {
    return tcp_error(ErrorCode::kRefused, what,
                     "the peer speaks version " + std::to_string(version) + " of the tcp lane and this side version " +
                         std::to_string(kVersion) + ": install the same release of kv-connector on both");
  }
  return {};
}

}  // namespace

Bytes Offer::encode() const {
  ByteWriter writer;
  writer.number(kOfferMagic);
  writer.number(kVersion);
  writer.number(connections);
  writer.number(link);
  writer.number(port);
  writer.blob(dialer.bytes);
  writer.blob(listener.bytes);
  writer.text(address);
  return writer.take();
}

Result<Offer> Offer::decode(std::span<const std::byte> bytes) {
  ByteReader reader(bytes);
  if (Status prefix = check_prefix(reader, kOfferMagic, "offer"); !prefix) return prefix.error();
  Offer offer;
  offer.connections = reader.number<uint16_t>();
  offer.link = reader.number<LinkId>();
  offer.port = reader.number<uint16_t>();
  offer.dialer = take_secret(reader);
  offer.listener = take_secret(reader);
  offer.address = reader.text(kMaxAddress);
  if (!reader.complete() || offer.address.empty() || offer.port == 0 || offer.connections == 0 ||
      offer.connections > kMaxConnections) {
    return tcp_error(ErrorCode::kInvalidArgument, "offer", "the offer is malformed");
  }
  return offer;
}

Bytes Answer::encode() const {
  ByteWriter writer;
  writer.number(kAnswerMagic);
  writer.number(kVersion);
  writer.number(connections);
  writer.number(link);
  return writer.take();
}

Result<Answer> Answer::decode(std::span<const std::byte> bytes) {
  ByteReader reader(bytes);
  if (Status prefix = check_prefix(reader, kAnswerMagic, "answer"); !prefix) return prefix.error();
  Answer answer;
  answer.connections = reader.number<uint16_t>();
  answer.link = reader.number<LinkId>();
  if (!reader.complete() || answer.connections == 0 || answer.connections > kMaxConnections) {
    return tcp_error(ErrorCode::kInvalidArgument, "answer", "the answer is malformed");
  }
  return answer;
}

size_t head_bytes(const FrameHeader& header) noexcept {
  switch (header.type) {
    case FrameType::kWrite:
      return sizeof(FrameHeader) + (header.page_bytes > 0 ? header.count * sizeof(uint64_t) : 0);
    case FrameType::kRefusal:
    case FrameType::kMessage:
      return sizeof(FrameHeader) + header.count;
    case FrameType::kAck:
      break;
  }
  return sizeof(FrameHeader);
}

std::optional<std::string> malformed(const FrameHeader& header) {
  if (header.magic != FrameHeader::kMagic) return "bytes that are not a frame";
  switch (header.type) {
    case FrameType::kWrite:
      if (header.count == 0 || header.count > kMaxPages) {
        return "a write of " + std::to_string(header.count) + " pages, allowed are 1 to " + std::to_string(kMaxPages);
      }
      if (header.page_bytes > kMaxPageBytes) {
        return "a write of pages of " + std::to_string(header.page_bytes) + " bytes, allowed are up to " +
               std::to_string(kMaxPageBytes);
      }
      if (header.counted > 1 || (header.counted == 1 && Immediate::decode(header.value).multiplicity != header.count)) {
        return "a write whose immediate does not count its pages";
      }
      return std::nullopt;
    case FrameType::kAck:
      if (header.count != 0) return "an ack with a body";
      return std::nullopt;
    case FrameType::kRefusal:
      if (header.count > kMaxRefusalText) return "a refusal that is too long";
      return std::nullopt;
    case FrameType::kMessage:
      if (header.count == 0 || header.count > kMaxMessageBytes) {
        return "a message of " + std::to_string(header.count) + " bytes, allowed are 1 to " +
               std::to_string(kMaxMessageBytes);
      }
      if (header.value >= kMessageSlots) return "a message in slot " + std::to_string(header.value);
      return std::nullopt;
  }
  return "a frame of unknown type " + std::to_string(static_cast<unsigned>(header.type));
}

ErrorCode refusal_code(uint32_t value) noexcept {
  for (const ErrorCode code : {ErrorCode::kUnknownRegion, ErrorCode::kOutOfRange, ErrorCode::kInvalidArgument}) {
    if (value == static_cast<uint32_t>(code)) return code;
  }
  return ErrorCode::kRefused;
}

std::string printable(std::string_view text) {
  std::string clean(text);
  for (char& c : clean) {
    if (c < 0x20 || c > 0x7e) c = '?';
  }
  return clean;
}

Error tcp_error(ErrorCode code, std::string_view operation, std::string message) {
  Error error;
  error.code = code;
  error.provider = "tcp";
  error.operation = operation;
  error.message = std::move(message);
  return error;
}

}  // namespace kvc::tcp
