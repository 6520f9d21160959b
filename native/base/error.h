// Errors are values: what an engine operation returns instead of throwing.
//
// Background: one peer's failure must never stop another peer's traffic, so nothing on the worker's path may
// unwind or abort. Every failure carries who (provider, peer), what (operation) and the library's own words.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>

namespace kvc {

enum class ErrorCode : uint8_t {
  kInvalidArgument,  // the caller passed something that can never work
  kUnknownPeer,      // no such peer, or it was disconnected
  kUnknownRegion,    // no such memory region, or its key was revoked
  kOutOfRange,       // bytes outside a registered region
  kNotReachable,  // this provider does not lead there (another machine, memory of another kind); another provider may
  kRefused,       // the kernel, the library or the peer forbids it
  kPeerDown,      // the link to the peer broke, or its process is gone
  kResources,     // a bounded resource is used up (counters, descriptors, memory)
  kTimeout,
  kCancelled,
  kClosed,  // the engine is shutting down
  kSystem,  // a system call failed in a way that has no better code
};

// The code's stable name, as logs and Python show it ("PEER_DOWN").
std::string_view name(ErrorCode code) noexcept;

struct Error {
  ErrorCode code = ErrorCode::kSystem;
  std::string provider;   // "tcp"; empty where no provider was involved
  std::string peer;       // the peer's name; empty where no peer was involved
  std::string operation;  // "write_pages", "accept", ...
  std::string message;    // the library's or the kernel's own words, and what to do where we know it

  // One line: "PEER_DOWN in write_pages over tcp to decode-0: connection reset by peer".
  std::string to_string() const;
};

// The engine's own refusal of what its caller asks for.
inline Error invalid(std::string operation, std::string message) {
  return Error{ErrorCode::kInvalidArgument, {}, {}, std::move(operation), std::move(message)};
}

// An Error built from errno's words.
Error system_error(std::string_view provider, std::string_view operation, int error_number);

// A T or an Error. Check ok() before value(); value() of an error is a programming mistake (asserts).
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
