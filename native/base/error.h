// Error and Result: errors as values, which transfer engine operations return instead of throwing.
//
// A peer's failure must never stop another peer's traffic, so the code of the transfer thread neither unwinds nor
// aborts. Every error names the provider, the peer and the operation, and quotes the message of the library.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>

namespace kvc {

enum class ErrorCode : uint8_t {
  kInvalidArgument,  // the arguments of the caller can never work
  kUnknownPeer,      // the peer does not exist or was disconnected
  kUnknownRegion,    // the memory region does not exist, or its key was revoked
  kOutOfRange,       // bytes outside a registered region
  // The provider does not lead to this peer (another machine, another kind of memory). Another provider may.
  kNotReachable,
  kRefused,    // the kernel, the library or the peer forbids it
  kPeerDown,   // the link to the peer broke, or its process is gone
  kResources,  // a bounded resource is used up (counters, descriptors, memory)
  kTimeout,
  kCancelled,
  kClosed,  // the transfer engine is shutting down
  kSystem,  // a system call failed, and no other code fits
};

// Returns the stable name of the code, as logs and Python show it ("PEER_DOWN").
std::string_view name(ErrorCode code) noexcept;

struct Error {
  ErrorCode code = ErrorCode::kSystem;
  std::string provider;   // "tcp"; empty if no provider was involved
  std::string peer;       // the peer's name; empty if no peer was involved
  std::string operation;  // "write_pages", "accept", ...
  std::string message;    // message of the library or the kernel, and a remedy if one is known

  // One line: "PEER_DOWN in write_pages over tcp to decode-0: connection reset by peer".
  std::string to_string() const;
};

// Returns the error of a call whose arguments the transfer engine refuses.
inline Error invalid(std::string operation, std::string message) {
  return Error{ErrorCode::kInvalidArgument, {}, {}, std::move(operation), std::move(message)};
}

// Returns an Error with the system's message for `error_number` (an errno value).
Error system_error(std::string_view provider, std::string_view operation, int error_number);

// A T or an Error. Call ok() before value(). Calling value() on an error is a programming mistake.
template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value) : state_(std::in_place_index<0>, std::move(value)) {}      // NOLINT: implicit by design
  Result(Error error) : state_(std::in_place_index<1>, std::move(error)) {}  // NOLINT: implicit by design
  bool ok() const noexcept { return state_.index() == 0; }
  explicit operator bool() const noexcept { return ok(); }
  T& value() { return *std::get_if<0>(&state_); }
  const T& value() const { return *std::get_if<0>(&state_); }
  Error& error() { return *std::get_if<1>(&state_); }
  const Error& error() const { return *std::get_if<1>(&state_); }

 private:
  std::variant<T, Error> state_;
};

// Success, or an Error.
template <>
class [[nodiscard]] Result<void> {
 public:
  Result() = default;
  Result(Error error) : error_(std::move(error)) {}  // NOLINT: implicit by design
  bool ok() const noexcept { return !error_.has_value(); }
  explicit operator bool() const noexcept { return ok(); }
  Error& error() { return *error_; }
  const Error& error() const { return *error_; }

 private:
  std::optional<Error> error_;
};

using Status = Result<void>;

}  // namespace kvc
