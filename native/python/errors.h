// Conversion of native errors into Python exceptions, and of results into values.
#pragma once

#include <pybind11/pybind11.h>

#include <string>
#include <tuple>
#include <utility>

#include "base/error.h"

namespace kvc::python {

using ErrorTuple = std::tuple<std::string, std::string, std::string, std::string, std::string>;

inline ErrorTuple to_tuple(const Error& error) {
  return {std::string(name(error.code)), error.provider, error.peer, error.operation, error.message};
}

// Raises kv_connector.engine.TransferError. The caller holds the GIL.
[[noreturn]] inline void raise(const Error& error) {
  namespace py = pybind11;
  const py::object type = py::module_::import("kv_connector.engine").attr("TransferError");
  const py::object exception = type.attr("_from_native")(std::string(name(error.code)), error.provider, error.peer,
                                                         error.operation, error.message);
  PyErr_SetObject(type.ptr(), exception.ptr());
  throw py::error_already_set();
}

template <typename T>
T unwrap(Result<T> result) {
  if (!result.ok()) raise(result.error());
  return std::move(result.value());
}
inline void unwrap(Status status) {
  if (!status.ok()) raise(status.error());
}

// Runs `f` without the GIL, for calls that may block.
template <typename F>
auto without_gil(F f) {
  const pybind11::gil_scoped_release release;
  return f();
}

}  // namespace kvc::python
