// Owned: an object of libibverbs, destroyed by the library's function for it.
#pragma once

#include <memory>

namespace kvc::verbs {

template <typename T>
using Owned = std::unique_ptr<T, int (*)(T*)>;

template <typename T>
Owned<T> owned(T* object, int (*destroy)(T*)) {
  return Owned<T>(object, destroy);
}

}  // namespace kvc::verbs
