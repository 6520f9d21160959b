// Sums of pages in host or GPU memory as a Python class.
#pragma once

#include <pybind11/pybind11.h>

namespace kvc::python {

void bind_page_summer(pybind11::module_& module);

}  // namespace kvc::python
