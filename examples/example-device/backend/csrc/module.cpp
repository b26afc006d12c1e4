// The functions of the device that the Python module torch.example needs.

#include "generator.h"
#include "memory.h"
#include "operators.h"
#include "stream.h"

#include <torch/csrc/utils/pybind.h>

namespace py = pybind11;

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  // A call that waits must not keep other Python threads from running.
  using released = py::call_guard<py::gil_scoped_release>;
  module.def("device_count", &example::device_count);
  module.def("current_device", &example::current_device);
  module.def("set_device", &example::set_device);
  module.def("in_bad_fork", &example::in_bad_fork);
  module.def("synchronize", &example::synchronize_device, released());
  module.def("default_generator", &example::default_generator);
  module.def("fallback_calls", &example::fallback_calls);
  module.def("clear_fallback_calls", &example::clear_fallback_calls);
  module.def("allow_fallback", &example::allow_fallback);
  module.def("fallback_allowed", &example::fallback_allowed);
}
