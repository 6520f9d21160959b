// ByteWriter and ByteReader: encode and decode the bytes that peers exchange (little-endian, length-prefixed).
//
// A reader never reads past its end and never throws. After the first field that does not fit, all later fields are
// zero or empty and complete() is false. A decoder can therefore read all fields and check complete() once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "base/bytes.h"

namespace kvc {

class ByteWriter {
 public:
  template <typename T>
  void number(T value) {
    for (size_t i = 0; i < sizeof(T); ++i) bytes_.push_back(static_cast<std::byte>((value >> (8 * i)) & 0xFF));
  }
  void blob(std::span<const std::byte> data) {
    number(static_cast<uint32_t>(data.size()));
    bytes_.insert(bytes_.end(), data.begin(), data.end());
  }
  void text(std::string_view value) { blob(std::as_bytes(std::span(value))); }
  Bytes take() { return std::move(bytes_); }

 private:
  Bytes bytes_;
};

class ByteReader {
 public:
  explicit ByteReader(std::span<const std::byte> bytes) : rest_(bytes) {}

  template <typename T>
  T number() {
    T value = 0;
    const std::span<const std::byte> raw = take(sizeof(T));
    for (size_t i = 0; i < raw.size(); ++i) value |= static_cast<T>(static_cast<T>(raw[i]) << (8 * i));
    return value;
  }
  std::span<const std::byte> blob(size_t max_bytes) {
    const uint32_t length = number<uint32_t>();
    if (length > max_bytes) fail();
    return take(length);
  }
  // Peer names end up in log lines and in Python strings, so every byte that is not printable ASCII becomes '?'.
  std::string text(size_t max_bytes) {
    const std::span<const std::byte> raw = blob(max_bytes);
    std::string name(reinterpret_cast<const char*>(raw.data()), raw.size());
    for (char& c : name) {
      if (c < ' ' || c > '~') c = '?';
    }
    return name;
  }
  void fail() {
    failed_ = true;
    rest_ = {};
  }
  bool failed() const { return failed_; }
  // True if every field was well-formed and no bytes are left.
  bool complete() const { return !failed_ && rest_.empty(); }

 private:
  std::span<const std::byte> take(size_t length) {
    if (length > rest_.size()) {
      fail();
      return {};
    }
    const std::span<const std::byte> taken = rest_.first(length);
    rest_ = rest_.subspan(length);
    return taken;
  }

  std::span<const std::byte> rest_;
  bool failed_ = false;
};

}  // namespace kvc
