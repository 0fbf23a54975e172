// Allocator with statistics, device guard, generator and hooks.
#include "device.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/HPUHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <map>
#include <mutex>

namespace simulated_hpu {
namespace {

// ---- memory

struct Counts {
  std::atomic<int64_t> in_use{0}, peak{0}, allocations{0}, frees{0}, largest{0};
};

Counts& counts() {
  static Counts instance;
  return instance;
}

void raise_to(std::atomic<int64_t>& maximum, int64_t value) {
  auto seen = maximum.load();
  while (seen < value && !maximum.compare_exchange_weak(seen, value)) {
  }
}

struct Block {
  c10::DataPtr data;
  size_t bytes;
};

void free_block(void* context) {
  auto* block = static_cast<Block*>(context);
  count_free(block->bytes);
  delete block;
}

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    auto* block = new Block{c10::GetCPUAllocator()->allocate(bytes), bytes};
    count_allocation(bytes);
    return {block->data.get(), block, &free_block, device()};
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
};

Allocator the_allocator;
REGISTER_ALLOCATOR(kType, &the_allocator);

// Memory of the host that the device copies from and to without a staging buffer: here it is memory on a list.
struct PinnedList {
  std::mutex mutex;
  std::map<const char*, size_t> blocks;
};

PinnedList& pinned() {
  static auto* instance = new PinnedList;  // blocks may be freed at the very end of a process
  return *instance;
}

void free_pinned(void* context) {
  auto* block = static_cast<Block*>(context);
  {
    std::lock_guard<std::mutex> lock(pinned().mutex);
    pinned().blocks.erase(static_cast<const char*>(block->data.get()));
  }
  delete block;
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    auto* block = new Block{c10::GetCPUAllocator()->allocate(bytes), bytes};
    std::lock_guard<std::mutex> lock(pinned().mutex);
    pinned().blocks.emplace(static_cast<const char*>(block->data.get()), bytes);
    return {block->data.get(), block, &free_pinned, c10::Device(at::kCPU)};
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
};

PinnedAllocator the_pinned_allocator;

// ---- random numbers

struct Generator final : c10::GeneratorImpl {
  explicit Generator(at::Generator inner)
      : c10::GeneratorImpl(simulated_hpu::device(), c10::DispatchKeySet(c10::DispatchKey::HPU)), inner(std::move(inner)) {}
  void set_current_seed(uint64_t seed) override { inner.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { inner.set_offset(offset); }
  uint64_t get_offset() const override { return inner.get_offset(); }
  uint64_t current_seed() const override { return inner.current_seed(); }
  uint64_t seed() override { return inner.seed(); }
  void set_state(const c10::TensorImpl& state) override {
    inner.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return inner.unsafeGetGeneratorImpl()->get_state();
  }
  Generator* clone_impl() const override { return new Generator(inner.clone()); }

  at::Generator inner;
};

at::Generator new_generator() {
  return at::make_generator<Generator>(at::detail::createCPUGenerator());
}

// ---- guard: there is one device and one stream, and work is done when a call returns

void check_index(c10::Device asked) {
  TORCH_CHECK(asked.index() <= 0, "a process has one HPU, of index 0; asked for ", asked);
}

int64_t now_ns() {
  return std::chrono::steady_clock::now().time_since_epoch().count();
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device getDevice() const override { return device(); }
  c10::Device exchangeDevice(c10::Device to) const override {
    check_index(to);
    return device();
  }
  void setDevice(c10::Device to) const override { check_index(to); }
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Stream getStream(c10::Device) const noexcept override { return stream(); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override { return stream(); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream(); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return stream(); }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  // An event is the time of its record.
  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {
    delete static_cast<int64_t*>(*event);
    *event = new int64_t(now_ns());
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<int64_t*>(event);
  }
  double elapsedTime(void* from, void* to, const c10::DeviceIndex) const override {
    return static_cast<double>(*static_cast<int64_t*>(to) - *static_cast<int64_t*>(from)) / 1e6;
  }
  void synchronizeDevice(const c10::DeviceIndex) const override {}

 private:
  static c10::Stream stream() { return c10::Stream(c10::Stream::DEFAULT, device()); }
};

C10_REGISTER_GUARD_IMPL(HPU, Guard);

}  // namespace

c10::Allocator* allocator() {
  return &the_allocator;
}

bool is_pinned(const void* address) {
  const auto* byte = static_cast<const char*>(address);
  std::lock_guard<std::mutex> lock(pinned().mutex);
  auto after = pinned().blocks.upper_bound(byte);
  if (byte == nullptr || after == pinned().blocks.begin()) {
    return false;
  }
  --after;
  return byte < after->first + after->second;
}

void count_allocation(size_t bytes) {
  auto& c = counts();
  raise_to(c.peak, c.in_use += static_cast<int64_t>(bytes));
  raise_to(c.largest, static_cast<int64_t>(bytes));
  ++c.allocations;
}

void count_free(size_t bytes) {
  counts().in_use -= static_cast<int64_t>(bytes);
  ++counts().frees;
}

std::array<int64_t, 5> memory_counts() {
  auto& c = counts();
  return {c.in_use, c.peak, c.allocations, c.frees, c.largest};
}

void reset_peak() {
  counts().peak = counts().in_use.load();
}

void reset_counts() {
  counts().allocations = counts().allocations - counts().frees;
  counts().frees = 0;
  counts().largest = 0;
}

const at::Generator& default_generator() {
  static const auto instance = new_generator();
  return instance;
}

at::Generator host_generator(const at::Generator& generator) {
  return generator.device().type() == kType ? generator.get<Generator>()->inner : generator;
}

// Until then torch has no module for the device, and fails where it asks its accelerator for one.
static std::atomic<bool> bridge_is_imported{false};

void announce() {
  bridge_is_imported = true;
}

// The registry below knows hooks by the name of their class, and torch asks for "HPUHooks".
struct HPUHooks final : at::HPUHooksInterface {
  explicit HPUHooks(at::HPUHooksArgs) {}
  // Without `override` where the oldest torch supported does not ask.
  bool hasHPU() const { return bridge_is_imported; }
  bool isBuilt() const { return bridge_is_imported; }
  bool isAvailable() const { return bridge_is_imported; }
  void init() const {}
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  at::Device getDeviceFromPtr(void*) const override { return device(); }
  bool isPinnedPtr(const void* address) const override { return is_pinned(address); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &the_pinned_allocator; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex = -1) const override { return default_generator(); }
  at::Generator getNewGenerator(c10::DeviceIndex = -1) const override { return new_generator(); }
};

bool installed() {
  return dynamic_cast<const HPUHooks*>(&at::detail::getHPUHooks()) != nullptr;
}

}  // namespace simulated_hpu

namespace at {
using simulated_hpu::HPUHooks;
REGISTER_HPU_HOOKS(HPUHooks);
}  // namespace at
