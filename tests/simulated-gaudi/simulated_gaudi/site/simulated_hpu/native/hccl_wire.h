// What the HCCL backend hands out while gloo works, and how tensors go over the wire.
#pragma once
#include "device.h"
#include "hccl_sends.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <functional>

namespace simulated_hpu {

using c10d::Backend;
using c10d::ReduceOp;
using c10d::Work;
using Tensors = std::vector<at::Tensor>;

// What gloo still has in flight, and what is to be done when it has arrived.
class HcclWork final : public Work {
 public:
  HcclWork(std::vector<WorkPtr> parts, Tensors outputs, std::function<void()> finish)
      : parts_(std::move(parts)), outputs_(std::move(outputs)), finish_(std::move(finish)) {}

  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override {
    for (auto& part : parts_) {
      part->wait(timeout);
    }
    parts_.clear();
    if (finish_) {
      std::exchange(finish_, nullptr)();
    }
    return true;
  }
  void synchronize() override { wait(); }
  // HCCL has no progress to report: asked for it, it waits.
  bool isCompleted() override {
    ++completion_questions();
    return wait();
  }
  bool isSuccess() const override { return true; }
  Tensors result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    wait();
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    future->markCompleted(at::IValue(outputs_));
    return future;
  }

 private:
  std::vector<WorkPtr> parts_;
  Tensors outputs_;
  std::function<void()> finish_;
};

// A collective that waits in a coalescing block for the end of it.
class QueuedWork final : public Work {
 public:
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override {
    TORCH_CHECK(launched, "a collective was waited for before its coalescing block has ended");
    return launched->wait(timeout);
  }
  void synchronize() override { wait(); }
  bool isCompleted() override {
    ++completion_questions();
    return wait();
  }

  WorkPtr launched;
};

inline at::Tensor host_contiguous(const at::Tensor& tensor) {
  auto seen = host(tensor);
  if (!seen.is_contiguous()) {
    TORCH_WARN_ONCE("a tensor that is not contiguous is copied for HCCL");
  }
  return seen.contiguous();
}

// Only words are moved, so a type that gloo does not know goes as one of the same size.
inline at::Tensor as_words(const at::Tensor& tensor) {
  switch (tensor.element_size()) {
    case 1:
      return tensor.view(at::kByte);
    case 2:
      return tensor.view(at::kHalf);
    default:
      return tensor;
  }
}

inline void check_type(const at::Tensor& tensor) {
  TORCH_CHECK(
      !tensor.is_complex(), "Input tensor data type is not supported for HCCL process group: ",
      tensor.scalar_type());
}

// What travels in a reduction: bf16 and fp32 as such, all else as a copy in fp32.
inline at::Tensor wire_of(const at::Tensor& tensor) {
  check_type(tensor);
  const auto type = tensor.scalar_type();
  return type == at::kBFloat16 || type == at::kFloat ? tensor.contiguous() : tensor.to(at::kFloat).contiguous();
}

// HCCL moves words of two or four bytes, and the bridge counts the parts of uneven splits in elements.
inline void check_bytes(
    const at::Tensor& input, const std::vector<int64_t>& a, const std::vector<int64_t>& b) {
  auto uneven = [](const std::vector<int64_t>& splits) {
    return std::any_of(splits.begin(), splits.end(), [&](int64_t size) { return size != splits[0]; });
  };
  const auto type = input.scalar_type();
  const bool travels_as_words = input.element_size() == 1 && type != at::kBool && type != at::kByte;
  TORCH_CHECK(
      !travels_as_words || (!uneven(a) && !uneven(b)),
      "all_to_all with uneven splits moves wrong lengths for ", type,
      " on HCCL: view the tensor as a type of two or four bytes first");
}

inline at::Tensor single(const Tensors& tensors) {
  TORCH_CHECK(tensors.size() == 1, "Requires a single element list");
  return tensors[0];
}

inline WorkPtr finished(std::vector<WorkPtr> parts, Tensors outputs, std::function<void()> finish) {
  return c10::make_intrusive<HcclWork>(std::move(parts), std::move(outputs), std::move(finish));
}

inline WorkPtr joined(std::vector<WorkPtr> works, Tensors outputs) {
  return finished(std::move(works), std::move(outputs), nullptr);
}

// Lets gloo fill the outputs, or contiguous copies of them.
inline WorkPtr moved(const Tensors& outputs, const std::function<WorkPtr(Tensors&)>& start) {
  Tensors wire, copies;
  for (const auto& output : outputs) {
    check_type(output);
    copies.push_back(host_contiguous(output));
    wire.push_back(as_words(copies.back()));
  }
  auto work = start(wire);
  return finished({work}, outputs, [outputs, copies] {
    for (size_t i = 0; i < outputs.size(); ++i) {
      if (!outputs[i].is_contiguous()) {
        host(outputs[i]).copy_(copies[i]);
      }
    }
  });
}

}  // namespace simulated_hpu
