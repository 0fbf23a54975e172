// torch.autocast("hpu"): the lists of operations that torch shares between devices.
#include <ATen/autocast_mode.h>
#include <torch/library.h>

namespace {

#define LOWER_PRECISION(...) KERNEL(c10::DeviceType::HPU, __VA_ARGS__, lower_precision_fp)
#define FP32(...) KERNEL(c10::DeviceType::HPU, __VA_ARGS__, fp32)
#define FP32_DTYPE(...) KERNEL(c10::DeviceType::HPU, __VA_ARGS__, fp32_set_opt_dtype)
#define PROMOTE(...) KERNEL(c10::DeviceType::HPU, __VA_ARGS__, promote)

TORCH_LIBRARY_IMPL(_, AutocastHPU, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, AutocastHPU, m) {
  AT_FORALL_LOWER_PRECISION_FP(LOWER_PRECISION)
  AT_FORALL_FP32(FP32)
  AT_FORALL_FP32_SET_OPT_DTYPE(FP32_DTYPE)
  AT_FORALL_PROMOTE(PROMOTE)
}

}  // namespace
