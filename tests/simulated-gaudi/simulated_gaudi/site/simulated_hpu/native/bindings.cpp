// What Python sees of the extension.
#include "device.h"
#include "hccl_groups.h"
#include "hccl_sends.h"

#include <torch/csrc/utils/pybind.h>

#include <map>

namespace simulated_hpu {

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("installed", &installed);
  m.def("announce", &announce);
  m.def("memory_counts", &memory_counts);
  m.def("copies_to_host", &copies_to_host);
  m.def("reset_peak", &reset_peak);
  m.def("reset_counts", &reset_counts);
  m.def("default_generator", [] { return default_generator(); });
  m.def("make_hccl", &make_hccl);
  m.def("leave_all", &leave_all, pybind11::call_guard<pybind11::gil_scoped_release>());
  m.def("note_step", [] { ++groups().steps; });
  m.def("hccl_counts", [] {
    return std::map<std::string, int64_t>{
        {"Work.is_completed", completion_questions()}, {"hccl late group", groups().late}};
  });
  m.def("first_uses", [] { return groups().first_uses; });
  m.def("reset_hccl_counts", [] {
    completion_questions() = groups().late = 0;
    groups().first_uses.clear();
  });
  m.def("leave", &leave, pybind11::call_guard<pybind11::gil_scoped_release>());
}

}  // namespace simulated_hpu
