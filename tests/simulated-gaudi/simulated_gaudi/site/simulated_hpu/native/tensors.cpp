// Operations on tensors of the device: each is the CPU's own, on the same memory.
#include "device.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <c10/core/CPUAllocator.h>
#include <torch/library.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <unordered_map>

namespace simulated_hpu {
namespace {

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::HPU);

at::Tensor make(c10::Storage storage, c10::DispatchKeySet keys, const at::Tensor& like) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys, like.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  return made;
}

// A view is of the kind of its base: made in inference mode or not, whatever the mode is now.
at::Tensor make_view(c10::Storage storage, const at::Tensor& base, const at::Tensor& like) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, std::move(storage), base.key_set(), like.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  return made;
}

void delete_storage(void* context) {
  delete static_cast<c10::Storage*>(context);
}

struct Adopted {
  c10::Storage storage;
  size_t bytes;
};

void free_adopted(void* context) {
  auto* adopted = static_cast<Adopted*>(context);
  count_free(adopted->bytes);
  delete adopted;
}

c10::DataPtr adopted_data(const c10::Storage& storage) {
  count_allocation(storage.nbytes());
  return {storage.mutable_data(), new Adopted{storage, storage.nbytes()}, &free_adopted, device()};
}

bool on_device(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kType;
}

// One operation: the tensors it was given as the host sees them, and the way back.
class Visit {
 public:
  at::Tensor enter(const at::Tensor& tensor, bool written) {
    if (!tensor.defined()) {
      return tensor;
    }
    if (!on_device(tensor)) {
      // A number may lie on the host, as everywhere in torch.
      if (tensor.device().is_cpu() && (tensor.dim() != 0 || written)) {
        stranger_ = true;
      }
      return tensor;
    }
    seen_ = true;
    for (const auto& [inside, outside] : guests_) {
      if (outside.is_same(tensor)) {
        return inside;
      }
    }
    auto inside = host(tensor);
    bases_.emplace(inside.storage().unsafeGetStorageImpl(), tensor);
    guests_.emplace_back(inside, tensor);
    return inside;
  }

  // An index may lie on the host.
  at::Tensor enter_index(const at::Tensor& tensor) { return on_device(tensor) ? enter(tensor, false) : tensor; }

  void check_same_device(const c10::OperatorHandle& op) const {
    TORCH_CHECK(
        !(seen_ && stranger_),
        "Expected all tensors to be on the same device, but found at least two devices, hpu:0 and cpu! (in ",
        op.schema().name(), ")");
  }

  // What was resized inside is resized outside.
  void settle() {
    for (auto& [inside, outside] : guests_) {
      const auto& storage = outside.storage();
      if (inside.storage().data() != storage.data() || inside.storage().nbytes() != storage.nbytes()) {
        auto* impl = storage.unsafeGetStorageImpl();
        impl->set_data_ptr_noswap(adopted_data(inside.storage()));
        impl->set_nbytes(inside.storage().nbytes());
      }
      if (inside.sizes() != outside.sizes() || inside.strides() != outside.strides() ||
          inside.storage_offset() != outside.storage_offset()) {
        outside.unsafeGetTensorImpl()->set_sizes_and_strides(
            inside.sizes(), inside.strides(), inside.storage_offset());
      }
    }
  }

  at::Tensor leave(const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.device().is_cpu()) {
      return tensor;
    }
    for (const auto& [inside, outside] : guests_) {
      if (inside.is_same(tensor)) {
        return outside;
      }
    }
    auto* impl = tensor.storage().unsafeGetStorageImpl();
    if (auto base = bases_.find(impl); base != bases_.end()) {
      return make_view(base->second.storage(), base->second, tensor);
    }
    auto known = storages_.find(impl);
    if (known == storages_.end()) {
      known = storages_.emplace(impl, adopt(tensor.storage())).first;
    }
    return make(known->second, kKeys, tensor);
  }

 private:
  std::vector<std::pair<at::Tensor, at::Tensor>> guests_;
  std::unordered_map<c10::StorageImpl*, at::Tensor> bases_;
  std::unordered_map<c10::StorageImpl*, c10::Storage> storages_;
  bool seen_ = false;
  bool stranger_ = false;
};

// Random operations that take no generator use the CPU's default one: lend it the state of ours.
class LentState {
 public:
  explicit LentState(bool lend) : lend_(lend) {
    if (lend_) {
      before_ = cpu_.get_state();
      cpu_.set_state(ours_.get_state());
    }
  }
  ~LentState() {
    if (lend_) {
      ours_.set_state(cpu_.get_state());
      cpu_.set_state(before_);
    }
  }

 private:
  bool lend_;
  at::Generator cpu_ = at::detail::getDefaultCPUGenerator();
  at::Generator ours_ = default_generator();
  at::Tensor before_;
};

bool is_generator(const c10::Argument& argument) {
  auto type = argument.type();
  if (auto optional = type->cast<c10::OptionalType>()) {
    type = optional->getElementType();
  }
  return type->kind() == c10::TypeKind::GeneratorType;
}

c10::IValue enter_value(Visit& visit, const c10::Argument& argument, const c10::IValue& value) {
  const bool written = argument.alias_info() != nullptr && argument.alias_info()->isWrite();
  if (value.isTensor()) {
    return visit.enter(value.toTensor(), written);
  }
  if (value.isTensorList()) {
    auto tensors = value.toTensorVector();
    for (auto& tensor : tensors) {
      tensor = visit.enter(tensor, written);
    }
    return tensors;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> entered;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
      entered.push_back(tensor ? std::optional<at::Tensor>(visit.enter_index(*tensor)) : tensor);
    }
    return entered;
  }
  if (value.isDevice()) {
    return c10::Device(at::kCPU);
  }
  if (is_generator(argument)) {
    return host_generator(value.isNone() ? default_generator() : value.toGenerator());
  }
  return value;
}

c10::IValue leave_value(Visit& visit, const c10::IValue& value) {
  if (value.isTensor()) {
    return visit.leave(value.toTensor());
  }
  if (value.isTensorList()) {
    auto tensors = value.toTensorVector();
    for (auto& tensor : tensors) {
      tensor = visit.leave(tensor);
    }
    return tensors;
  }
  return value;
}

void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  if (op.schema().name().rfind("c10d::", 0) == 0) {
    run_on_hccl(op, stack);
    return;
  }
  const auto& arguments = op.schema().arguments();
  const auto first = stack->size() - arguments.size();
  Visit visit;
  bool has_generator = false;
  for (size_t i = 0; i < arguments.size(); ++i) {
    has_generator |= is_generator(arguments[i]);
    (*stack)[first + i] = enter_value(visit, arguments[i], (*stack)[first + i]);
  }
  visit.check_same_device(op);
  {
    LentState state(!has_generator && op.hasTag(at::Tag::nondeterministic_seeded));
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  }
  visit.settle();
  for (size_t i = stack->size() - op.schema().returns().size(); i < stack->size(); ++i) {
    (*stack)[i] = leave_value(visit, (*stack)[i]);
  }
}

// ---- what no operation of the CPU can do: make memory of the device, copy between devices, exchange a storage

void check_device(std::optional<c10::Device> asked) {
  TORCH_CHECK(!asked || asked->index() <= 0, "a process has one HPU, of index 0; asked for ", *asked);
}

at::Tensor empty(
    c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  check_device(device);
  return at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(size), allocator(), kKeys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  check_device(device);
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), allocator(), kKeys,
      c10::dtype_or_default(dtype));
}

// A card stores int64 as int32 unless the environment says otherwise. Where a value does not fit, the card would go on
// with its lower half; here that is an error.
void check_fits(const at::Tensor& values, const char* where) {
  if (values.scalar_type() != at::kLong || values.numel() == 0) {
    return;
  }
  const char* asked = std::getenv("PT_ENABLE_INT64_SUPPORT");
  if (asked != nullptr && std::strcmp(asked, "1") == 0) {
    return;
  }
  const auto [least, most] = values.aminmax();
  constexpr int64_t kLeast = std::numeric_limits<int32_t>::min(), kMost = std::numeric_limits<int32_t>::max();
  const auto low = least.item<int64_t>(), high = most.item<int64_t>();
  TORCH_CHECK(
      low >= kLeast && high <= kMost, "an int64 tensor with the value ", high > kMost ? high : low, " is copied ", where,
      ": a card stores int64 as int32 and would keep the lower half (PT_ENABLE_INT64_SUPPORT is not 1)");
}

std::atomic<int64_t> copies_into_pinned{0}, copies_into_other{0};

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
  if (on_device(to) && !on_device(from)) {
    check_fits(from, "to the device");
  }
  if (on_device(from) && !on_device(to)) {
    check_fits(host(from), "to the host");
    ++(is_pinned(to.const_data_ptr()) ? copies_into_pinned : copies_into_other);
  }
  auto target = on_device(to) ? host(to) : to;
  target.copy_(on_device(from) ? host(from) : from);
  return to;
}

at::Scalar item(const at::Tensor& self) {
  check_fits(host(self), "to the host");
  return at::_local_scalar_dense(host(self));
}

// As the real one: there is no kernel for it, and the graph that has it cannot be compiled.
void gather(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  TORCH_CHECK(
      stack->at(stack->size() - op.schema().arguments().size()).toTensor().scalar_type() != at::kLong,
      "Graph compile failed. synStatus=synStatus 26 [Generic failure]. (gather of an int64 tensor)");
  run_on_host(op, stack);
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Tensor& set_storage(
    at::Tensor& tensor, at::Storage storage, c10::SymInt offset, c10::SymIntArrayRef size,
    c10::SymIntArrayRef stride) {
  TORCH_CHECK(storage.device().type() == kType, "Attempted to set the storage of a tensor on device \"hpu:0\" to a "
      "storage on different device \"", storage.device(), "\". This is no longer allowed; the devices must match.");
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_sizes_and_strides(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), offset.expect_int());
  return tensor;
}

at::Tensor& set_whole_storage(at::Tensor& tensor, at::Storage storage) {
  const auto length = static_cast<int64_t>(storage.nbytes() / tensor.itemsize());
  return set_storage(tensor, std::move(storage), 0, {c10::SymInt(length)}, {c10::SymInt(1)});
}

at::Tensor& set_tensor(at::Tensor& tensor, const at::Tensor& source) {
  return set_storage(
      tensor, source.storage(), source.storage_offset(), source.sym_sizes(), source.sym_strides());
}

}  // namespace

std::array<int64_t, 2> copies_to_host() {
  return {copies_into_pinned, copies_into_other};
}

at::Tensor host(const at::Tensor& tensor) {
  TORCH_CHECK(on_device(tensor), "a tensor of the device was expected, not of ", tensor.device());
  const auto& storage = tensor.storage();
  c10::DataPtr data(storage.mutable_data(), new c10::Storage(storage), &delete_storage, c10::Device(at::kCPU));
  return make(
      c10::Storage(
          c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(data), c10::GetCPUAllocator(), true),
      c10::DispatchKeySet(c10::DispatchKey::CPU), tensor);
}

c10::Storage adopt(const c10::Storage& storage) {
  return {c10::Storage::use_byte_size_t(), storage.nbytes(), adopted_data(storage), allocator(), true};
}

TORCH_LIBRARY_IMPL(_, HPU, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

TORCH_LIBRARY_IMPL(aten, HPU, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_local_scalar_dense", item);
  for (const char* name : {"gather", "gather.out"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&gather>());
  }
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("set_.source_Storage", set_whole_storage);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Tensor", set_tensor);
  // The CPU has kernels of its own for these, a device without any gets compositions that round differently.
  for (const char* name : {"native_layer_norm", "native_group_norm"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
  }
}

}  // namespace simulated_hpu
