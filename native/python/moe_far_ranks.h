// The lanes of an expert group to ranks of other nodes, as a Python class.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <mutex>

#include "moe/far_ranks.h"

namespace kvc::python {

// close() and the destructor give up this object's share. A group that has joined keeps its own share until it is
// closed, so its launches never use freed memory. The last share closes the transfer engine.
class PythonFarRanks {
 public:
  explicit PythonFarRanks(std::unique_ptr<moe::FarRanks> far) : far_(std::move(far)) {}
  PythonFarRanks(const PythonFarRanks&) = delete;
  PythonFarRanks& operator=(const PythonFarRanks&) = delete;
  ~PythonFarRanks() { close(); }

  std::shared_ptr<moe::FarRanks> far();  // raises CLOSED after close()
  void close();

 private:
  std::mutex mutex_;
  std::shared_ptr<moe::FarRanks> far_;  // null once closed; guarded by mutex_
};

void bind_moe_far_ranks(pybind11::module_& module);

}  // namespace kvc::python
