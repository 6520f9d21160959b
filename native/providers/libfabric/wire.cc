#include "providers/libfabric/wire.h"

#include "providers/libfabric/library.h"

namespace kvc::libfabric {
namespace {

constexpr uint32_t kCardMagic = 0x3143464b;  // "KFC1"
constexpr size_t kMaxNameBytes = 64;

void put(ByteWriter& writer, const RemoteMemory& memory) {
  writer.number(memory.address);
  writer.number(memory.bytes);
  writer.blob(memory.key);
}

RemoteMemory take_memory(ByteReader& reader) {
  RemoteMemory memory;
  memory.address = reader.number<uint64_t>();
  memory.bytes = reader.number<uint64_t>();
  const auto key = reader.blob(kMaxKeyBytes);
  memory.key.assign(key.begin(), key.end());
  if (memory.key.size() < sizeof(uint64_t)) reader.fail();
  return memory;
}

Error malformed(std::string_view what) {
  return fabric_error(ErrorCode::kInvalidArgument, std::string(what), "malformed bytes");
}

}  // namespace

Bytes Card::encode() const {
  ByteWriter writer;
  writer.number(kCardMagic);
  writer.number(kVersion);
  writer.text(provider);
  writer.number(protocol);
  writer.number(protocol_version);
  writer.number(address_format);
  writer.number(secret);
  writer.text(machine.boot_id);
  writer.number(machine.processes);
  writer.number(machine.shared_memory);
  writer.number(pid);
  writer.blob(address);
  put(writer, doorbell);
  return writer.take();
}

Result<Card> Card::decode(std::string_view operation, std::span<const std::byte> bytes) {
  ByteReader reader(bytes);
  if (reader.number<uint32_t>() != kCardMagic) return malformed(operation);
  const auto version = reader.number<uint16_t>();
  if (reader.failed()) return malformed(operation);
  if (version != kVersion) {
    return fabric_error(ErrorCode::kRefused, std::string(operation),
                        "the peer speaks version " + std::to_string(version) + " of the libfabric lane and this side " +
                            std::to_string(kVersion) + ": install the same release of kv-connector on both");
  }
  Card card;
  card.provider = reader.text(kMaxNameBytes);
  card.protocol = reader.number<uint32_t>();
  card.protocol_version = reader.number<uint32_t>();
  card.address_format = reader.number<uint32_t>();
  card.secret = reader.number<uint64_t>();
  card.machine.boot_id = reader.text(kMaxNameBytes);
  card.machine.processes = reader.number<uint64_t>();
  card.machine.shared_memory = reader.number<uint64_t>();
  card.pid = reader.number<uint32_t>();
  const auto address = reader.blob(kMaxAddressBytes);
  card.address.assign(address.begin(), address.end());
  card.doorbell = take_memory(reader);
  if (!reader.complete() || card.address.empty() || card.secret == 0) return malformed(operation);
  return card;
}

Bytes Ask::encode() const {
  ByteWriter writer;
  writer.number(serial);
  writer.number(rkey);
  return writer.take();
}

Result<Ask> Ask::decode(std::span<const std::byte> bytes) {
  ByteReader reader(bytes);
  Ask ask;
  ask.serial = reader.number<uint32_t>();
  ask.rkey = reader.number<uint64_t>();
  if (!reader.complete()) return malformed("ask");
  return ask;
}

Bytes Tell::encode() const {
  ByteWriter writer;
  writer.number(serial);
  writer.number(rkey);
  writer.number(static_cast<uint8_t>(known));
  if (known) put(writer, memory);
  return writer.take();
}

Result<Tell> Tell::decode(std::span<const std::byte> bytes) {
  ByteReader reader(bytes);
  Tell tell;
  tell.serial = reader.number<uint32_t>();
  tell.rkey = reader.number<uint64_t>();
  tell.known = reader.number<uint8_t>() != 0;
  if (tell.known) tell.memory = take_memory(reader);
  if (!reader.complete()) return malformed("tell");
  return tell;
}

}  // namespace kvc::libfabric
