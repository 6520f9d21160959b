// Lane: the names of one of the lanes between processes of one machine, and its way of reporting errors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "base/error.h"
#include "providers/same_host/wire.h"

namespace kvc::same_host {

// One constant for each lane. Any thread may use it; nothing here blocks.
struct Lane {
  std::string_view name;            // "host"
  uint32_t magic = 0;               // marks the bytes of this lane's handshake
  uint32_t version = 0;             // version of everything that two processes share
  const char* socket = nullptr;     // prefix of the names of its listening sockets
  const char* board = nullptr;      // the name of a board's memfd, as /proc shows it
  const char* segment = nullptr;    // the name of a segment's memfd
  size_t board_bytes = 0;           // size of a board, whose first word is the domain's Sleep
  size_t segment_bytes = 0;         // size of a segment: both directions of one link
  const char* if_other_users = "";  // advice for an error if the two processes belong to two users

  Error error(ErrorCode code, std::string_view operation, std::string message) const {
    return Error{code, std::string(name), {}, std::string(operation), std::move(message)};
  }
  // Returns an error of system.h or the CUDA driver, with this lane's name.
  Error named(Error error) const {
    error.provider = name;
    return error;
  }
  // Returns kRefused unless the peer uses our version.
  Status check_version(std::string_view operation, uint32_t theirs) const {
    if (theirs == version) return {};
    return error(ErrorCode::kRefused, operation,
                 "the peer speaks version " + std::to_string(theirs) + " of the " + std::string(name) +
                     " lane and this process " + std::to_string(version) + ": run one release on both sides");
  }
  // Decodes the bytes of a peer as the lane's Answer, which begins with a magic and a version.
  template <typename Answer>
  Result<Answer> read_answer(std::span<const std::byte> bytes) const {
    const std::optional<Answer> answer = from_bytes<Answer>(bytes, magic);
    if (!answer) return error(ErrorCode::kInvalidArgument, "complete", "malformed answer");
    if (Status fits = check_version("complete", answer->version); !fits) return fits.error();
    return *answer;
  }
};

}  // namespace kvc::same_host
