// The emulator's counters and switches, for Python. A library apart from the kernels', whose thread-local
// memory is all shared arrays.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "counters.h"

namespace py = pybind11;
using namespace memkern_emulated;

static py::dict as_dict(const Traffic& traffic) {
  return py::dict(py::arg("bytes") = traffic.bytes, py::arg("warp_accesses") = traffic.warp_accesses,
                  py::arg("sectors") = traffic.sectors, py::arg("sectors_needed") = traffic.sectors_needed);
}

static py::list launches_as_dicts() {
  py::list result;
  for (const Launch& launch : launches())
    result.append(py::dict(py::arg("kernel") = launch.kernel, py::arg("grid") = launch.grid,
                           py::arg("block") = launch.block, py::arg("shared_bytes") = launch.shared_bytes,
                           py::arg("loaded") = as_dict(launch.loaded), py::arg("stored") = as_dict(launch.stored)));
  return result;
}

PYBIND11_MODULE(memkern_emulator, m) {
  m.def("count", &count);
  m.def("launches", &launches_as_dicts);
  m.def("set_order", &set_order);
  m.def("name_kernels", &name_kernels);
}
