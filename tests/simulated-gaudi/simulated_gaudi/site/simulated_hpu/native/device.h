// A torch device of type HPU whose memory is the host's: what the files of this directory share.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/Allocator.h>

#include <array>
#include <cstdint>

namespace simulated_hpu {

inline constexpr c10::DeviceType kType = c10::DeviceType::HPU;

inline c10::Device device() {
  return {kType, 0};  // one process has one HPU, and calls it 0
}

// ---- memory (device.cpp)

c10::Allocator* allocator();
// Bookkeeping for memory that an operation of the CPU has allocated for the device.
void count_allocation(size_t bytes);
void count_free(size_t bytes);
// True for memory of the host that tensor.pin_memory("hpu") has made.
bool is_pinned(const void* address);
// Copies between host and device so far: into pinned memory, and into other memory.
std::array<int64_t, 2> copies_to_host();
// bytes in use, peak, allocations, frees, largest allocation
std::array<int64_t, 5> memory_counts();
void reset_peak();
void reset_counts();

// ---- random numbers (device.cpp)

const at::Generator& default_generator();
// The host's generator inside one of the device.
at::Generator host_generator(const at::Generator& generator);

// ---- tensors (tensors.cpp)

// The same memory as a tensor of the host; writing to one writes to the other.
at::Tensor host(const at::Tensor& tensor);
// Memory of the host, taken over by the device without a copy.
c10::Storage adopt(const c10::Storage& storage);

// ---- collectives (hccl.cpp)

// An operation of torch.distributed on tensors of the device.
void run_on_hccl(const c10::OperatorHandle& op, torch::jit::Stack* stack);

// ---- what torch is told (device.cpp)

// Whether torch asks us about HPUs: it decides once, at its first question.
bool installed();
// From now on the answer is that there is one.
void announce();

}  // namespace simulated_hpu
