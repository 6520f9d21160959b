// The expert exchange's group as a Python class.
#pragma once

#include <pybind11/pybind11.h>

namespace kvc::python {

void bind_moe_group(pybind11::module_& module);

}  // namespace kvc::python
