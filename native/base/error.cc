#include "base/error.h"

#include <system_error>

namespace kvc {

std::string_view name(ErrorCode code) noexcept {
  switch (code) {
    case ErrorCode::kInvalidArgument:
      return "INVALID_ARGUMENT";
    case ErrorCode::kUnknownPeer:
      return "UNKNOWN_PEER";
    case ErrorCode::kUnknownRegion:
      return "UNKNOWN_REGION";
    case ErrorCode::kOutOfRange:
      return "OUT_OF_RANGE";
    case ErrorCode::kNotReachable:
      return "NOT_REACHABLE";
    case ErrorCode::kRefused:
      return "REFUSED";
    case ErrorCode::kPeerDown:
      return "PEER_DOWN";
    case ErrorCode::kResources:
      return "RESOURCES";
    case ErrorCode::kTimeout:
      return "TIMEOUT";
    case ErrorCode::kCancelled:
      return "CANCELLED";
    case ErrorCode::kClosed:
      return "CLOSED";
    case ErrorCode::kSystem:
      return "SYSTEM";
  }
  return "UNKNOWN";  // a value outside the enum: only a wrong cast gives one
}

std::string Error::to_string() const {
  std::string text{name(code)};
  if (!operation.empty()) text += " in " + operation;
  if (!provider.empty()) text += " over " + provider;
  if (!peer.empty()) text += " to " + peer;
  if (!message.empty()) text += ": " + message;
  return text;
}

Error system_error(std::string_view provider, std::string_view operation, int error_number) {
  return Error{ErrorCode::kSystem,
               std::string(provider),
               {},
               std::string(operation),
               std::system_category().message(error_number)};
}

}  // namespace kvc
