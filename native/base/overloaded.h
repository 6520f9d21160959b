// Overloaded: combines several function objects into one, for std::visit.
#pragma once

namespace kvc {

template <typename... Ts>
struct Overloaded : Ts... {
  using Ts::operator()...;
};
template <typename... Ts>
Overloaded(Ts...) -> Overloaded<Ts...>;

}  // namespace kvc
