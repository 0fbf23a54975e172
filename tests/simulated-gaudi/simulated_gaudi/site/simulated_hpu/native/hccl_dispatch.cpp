// Collectives of torch.distributed on tensors of the device.
#include "device.h"

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/version.h>

namespace simulated_hpu {

// torch registers its collectives for the devices it has itself. Each takes the tensors and a group, and calls the
// group's backend for its device: the CPU's serves ours when it is handed a group whose backend for the CPU is HCCL.
void run_on_hccl(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  for (size_t i = stack->size() - op.schema().arguments().size(); i < stack->size(); ++i) {
    auto& value = (*stack)[i];
    if (value.isCustomClass() && *value.type() == *c10::getCustomClassType<c10::intrusive_ptr<c10d::ProcessGroup>>()) {
      auto group = value.toCustomClass<c10d::ProcessGroup>();
      auto stand_in = c10::make_intrusive<c10d::ProcessGroup>(group->getRank(), group->getSize());
      stand_in->setBackend(c10::DeviceType::CPU, c10d::ProcessGroup::BackendType::CUSTOM, group->getBackend(kType));
      value = c10::IValue(stand_in);
    }
  }
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
}

}  // namespace simulated_hpu
