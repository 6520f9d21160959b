// Packet: all bytes that a rank sends to a rank of another node in one dispatch or combine, in one piece.
//
//   dispatch   header | for each token: its columns for all ranks | for each sent row: token number, its other columns
//   combine    header | for each row that came in the dispatch, in that order: its result
//
// A place in a packet depends on sizes and numbers alone, so a kernel's blocks could write rows in any order. Each column
// begins at a multiple of 16 bytes. A dispatch of no tokens and a combine of no rows have no bytes, only an immediate.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "cuda/moe_launch.h"

namespace kvc::moe {

struct PacketHeader {
  uint32_t epoch = 0;
  uint32_t rows = 0;
  uint32_t tokens = 0;  // of the sender; combine: 0
};

inline constexpr uint64_t kPacketHeaderBytes = 64;
inline constexpr uint64_t kPacketUnit = 16;

constexpr uint64_t packet_padded(uint64_t bytes) noexcept {
  return (bytes + kPacketUnit - 1) / kPacketUnit * kPacketUnit;
}

// Most bytes of a packet whose columns together have up to `row_bytes` bytes a row.
constexpr uint64_t max_dispatch_packet(uint64_t tokens, uint64_t row_bytes) noexcept {
  return kPacketHeaderBytes + tokens * packet_padded(kPacketUnit + row_bytes + kMaxColumns * (kPacketUnit - 1));
}
constexpr uint64_t combine_packet(uint64_t rows, uint64_t row_bytes) noexcept {
  return rows == 0 ? 0 : kPacketHeaderBytes + rows * row_bytes;
}

inline void write_header(unsigned char* packet, const PacketHeader& header) noexcept {
  std::memcpy(packet, &header, sizeof(header));
}
inline PacketHeader read_header(const unsigned char* packet) noexcept {
  PacketHeader header;
  std::memcpy(&header, packet, sizeof(header));
  return header;
}

// The packets of one dispatch, the same on all ranks.
class DispatchPackets {
 public:
  explicit DispatchPackets(const DispatchLaunch& launch) noexcept : launch_(launch) {
    for (uint32_t i = 0; i < launch.column_count; ++i) {
      const Column& column = launch.columns[i];
      (column.to_all != 0 ? token_ : row_) += packet_padded(column.row_bytes);
    }
  }

  uint64_t bytes(uint32_t tokens, uint32_t rows) const noexcept {
    return tokens == 0 ? 0 : kPacketHeaderBytes + tokens * token_ + rows * row_;
  }

  // Writes the packet for `rank` and returns its number of rows. launch.masks names the ranks of each token.
  uint32_t write(uint32_t rank, uint32_t epoch, unsigned char* packet) const noexcept {
    unsigned char* const rows = packet + kPacketHeaderBytes + launch_.tokens * token_;
    uint32_t count = 0;
    for (uint32_t token = 0; token < launch_.tokens; ++token) {
      copy(token, packet + kPacketHeaderBytes + token * token_, true);
      if ((launch_.masks[token] >> rank & 1U) == 0) continue;
      unsigned char* const row = rows + count++ * row_;
      std::memcpy(row, &token, sizeof(token));
      copy(token, row + kPacketUnit, false);
    }
    if (launch_.tokens > 0) write_header(packet, {epoch, count, launch_.tokens});
    return count;
  }

  // Copies the rows of `source` to their places in this rank's segment. `numbers` becomes the token numbers of the rows
  // in the packet. Returns false, and copies nothing, if the packet does not fit this launch.
  bool place(uint32_t source, const unsigned char* packet, std::vector<uint32_t>& numbers) const {
    numbers.clear();
    const uint32_t tokens = launch_.sizes[source];
    if (tokens == 0) return true;
    const PacketHeader header = read_header(packet);
    if (header.epoch != launch_.control->epoch || header.tokens != tokens || header.rows > tokens) return false;
    const unsigned char* const rows = packet + kPacketHeaderBytes + tokens * token_;
    for (uint32_t i = 0; i < header.rows; ++i) {
      uint32_t number = 0;
      std::memcpy(&number, rows + i * row_, sizeof(number));
      if (number >= tokens || (i > 0 && number <= numbers.back())) return false;
      numbers.push_back(number);
    }
    int64_t before = 0;  // rows of the source before those of this rank; negative: behind them
    for (uint32_t rank = 0; rank < launch_.ranks; ++rank) {
      if (rank < source) before += launch_.sizes[rank];
      if (rank < launch_.rank) before -= launch_.sizes[rank];
    }
    for (uint32_t token = 0; token < tokens; ++token) {
      put(before + token, packet + kPacketHeaderBytes + token * token_, true);
    }
    for (uint32_t i = 0; i < header.rows; ++i) put(before + numbers[i], rows + i * row_ + kPacketUnit, false);
    return true;
  }

 private:
  void copy(uint32_t token, unsigned char* target, bool to_all) const noexcept {
    for (uint32_t i = 0; i < launch_.column_count; ++i) {
      const Column& column = launch_.columns[i];
      if ((column.to_all != 0) != to_all) continue;
      std::memcpy(target, column.source + uint64_t{token} * column.row_bytes, column.row_bytes);
      target += packet_padded(column.row_bytes);
    }
  }
  // `row` counts from this rank's first row.
  void put(int64_t row, const unsigned char* source, bool to_all) const noexcept {
    for (uint32_t i = 0; i < launch_.column_count; ++i) {
      const Column& column = launch_.columns[i];
      if ((column.to_all != 0) != to_all) continue;
      std::memcpy(launch_.segments[launch_.rank] + column.target + row * column.row_bytes, source, column.row_bytes);
      source += packet_padded(column.row_bytes);
    }
  }

  const DispatchLaunch& launch_;
  uint64_t token_ = 0;          // bytes of a token's columns for all ranks
  uint64_t row_ = kPacketUnit;  // bytes of a row: its number, and its other columns
};

}  // namespace kvc::moe
