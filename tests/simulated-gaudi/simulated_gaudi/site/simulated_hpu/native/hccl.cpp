// A backend of torch.distributed for tensors of the device: gloo carries them, and what HCCL refuses is refused.
#include "hccl_groups.h"
#include "hccl_wire.h"

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/version.h>

#include <cstdlib>

namespace simulated_hpu {
namespace {

class Hccl final : public Backend {
 public:
  Hccl(
      c10::intrusive_ptr<Backend> gloo, c10::intrusive_ptr<c10d::Store> store, bool has_average, std::string name,
      std::string refusal)
      : Backend(gloo->getRank(), gloo->getSize()),
        gloo_(std::move(gloo)),
        store_(std::move(store)),
        has_average_(has_average),
        name_(std::move(name)),
        refusal_(std::move(refusal)),
        born_(groups().steps) {
    std::lock_guard<std::mutex> lock(groups().mutex);
    groups().alive.push_back(this);
  }

  ~Hccl() override {
    sends_->abort();
    std::lock_guard<std::mutex> lock(groups().mutex);
    auto& alive = groups().alive;
    alive.erase(std::remove(alive.begin(), alive.end(), this), alive.end());
  }

  const std::string getBackendName() const override { return "hccl"; }
  bool supportsCoalescing() const { return true; }

  // ---- collectives that add

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    auto tensor = single(tensors);
    return submit([=, this] {
      return reduced(tensor, options.reduceOp, [&](Tensors& wire, ReduceOp op) {
        auto gloo_options = options;
        gloo_options.reduceOp = op;
        return gloo_->allreduce(wire, gloo_options);
      });
    });
  }

  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    return each(tensors.size(), tensors, [&](size_t i) {
      Tensors one{tensors[i]};
      return allreduce(one, options);
    });
  }

  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    auto tensor = single(tensors);
    return submit([=, this] {
      return reduced(tensor, options.reduceOp, [&](Tensors& wire, ReduceOp op) {
        auto gloo_options = options;
        gloo_options.reduceOp = op;
        return gloo_->reduce(wire, gloo_options);
      });
    });
  }

  WorkPtr _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override {
    TORCH_CHECK(
        input.scalar_type() == output.scalar_type(), "input tensor must be the same type as the output tensor.");
    TORCH_CHECK(
        input.numel() == output.numel() * size_, "input tensor must be the same size as output size times world size");
    return submit([=, this] { return reduce_scattered(output, host(input).flatten(), options); });
  }

  WorkPtr reduce_scatter(
      Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& options) override {
    auto output = single(outputs);
    auto parts = inputs.at(0);
    return submit([=, this] {
      Tensors flat;
      for (const auto& part : parts) {
        TORCH_CHECK(part.numel() == output.numel(), "All tensor operands to scatter/gather must have the same number of elements");
        flat.push_back(host(part).flatten());
      }
      return reduce_scattered(output, at::cat(flat), options);
    });
  }

  WorkPtr reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override {
    return each(outputs.size(), outputs, [&](size_t i) { return _reduce_scatter_base(outputs[i], inputs[i], options); });
  }

  // ---- collectives that move

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    auto tensor = single(tensors);
    return submit([=, this] {
      return moved({tensor}, [&](Tensors& wire) { return gloo_->broadcast(wire, options); });
    });
  }

  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    TORCH_CHECK(
        input.scalar_type() == output.scalar_type(), "output tensor must have the same type as input tensor");
    TORCH_CHECK(
        output.numel() == input.numel() * size_,
        "output tensor size must be equal to world_size times input tensor size");
    check_type(input);
    return submit([=, this] {
      auto from = as_words(host_contiguous(input).flatten());
      return moved({output}, [&](Tensors& wire) {
        auto to = wire[0].view(-1);
        return gloo_->_allgather_base(to, from, options);
      });
    });
  }

  WorkPtr allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    return each(outputs.size(), outputs, [&](size_t i) { return _allgather_base(outputs[i], inputs[i], options); });
  }

  WorkPtr allgather(
      std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    auto input = single(inputs);
    auto parts = outputs.at(0);
    check_type(input);
    return submit([=, this] {
      // Parts may differ in size, so every rank sends its own.
      host(parts.at(rank_)).copy_(host(input));
      std::vector<WorkPtr> works;
      for (int root = 0; root < size_; ++root) {
        works.push_back(moved({parts.at(root)}, [&](Tensors& wire) {
          c10d::BroadcastOptions from_root;
          from_root.rootRank = root;
          from_root.timeout = options.timeout;
          return gloo_->broadcast(wire, from_root);
        }));
      }
      return joined(std::move(works), parts);
    });
  }

  WorkPtr allgather_coalesced(std::vector<Tensors>&, Tensors&, const c10d::AllgatherOptions&) override {
    TORCH_CHECK(false, "ProcessGroupHcclBase does not support allgather_coalesced");
  }

  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    const bool root = rank_ == options.rootRank;
    TORCH_CHECK(root || outputs.empty(), "Requires empty output on non-root");
    TORCH_CHECK(
        !root || (outputs.size() == 1 && outputs[0].size() == static_cast<size_t>(size_)),
        "Output list should be same size as process group");
    auto from = as_words(host_contiguous(single(inputs)));
    return submit([=, this] {
      Tensors parts = root ? outputs[0] : Tensors{};
      return moved(parts, [&](Tensors& wire) {
        std::vector<Tensors> to;
        if (root) {
          to.push_back(wire);
        }
        Tensors source{from};
        return gloo_->gather(to, source, options);
      });
    });
  }

  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
    auto output = single(outputs);
    const bool root = rank_ == options.rootRank;
    if (root) {
      TORCH_CHECK(inputs.size() == 1, "Requires a single element list");
      TORCH_CHECK(
          inputs[0].size() == static_cast<size_t>(size_), "Input list should be same size as process group");
    } else {
      TORCH_CHECK(inputs.empty(), "Requires empty input on non-root");
    }
    return submit([=, this] {
      return moved({output}, [&](Tensors& wire) {
        std::vector<Tensors> from;
        if (root) {
          from.emplace_back();
          for (const auto& part : inputs[0]) {
            from[0].push_back(as_words(host_contiguous(part)));
          }
        }
        return gloo_->scatter(wire, from, options);
      });
    });
  }

  WorkPtr alltoall_base(
      at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits, std::vector<int64_t>& input_splits,
      const c10d::AllToAllOptions& options) override {
    TORCH_CHECK(
        input.scalar_type() == output.scalar_type(), "output tensor must have the same type as input tensor");
    check_type(input);
    c10d::checkSplitSizes(input_splits, input, size_);
    c10d::checkSplitSizes(output_splits, output, size_);
    check_bytes(input, input_splits, output_splits);
    return submit([=, this] {
      auto from = as_words(host_contiguous(input));
      return moved({output}, [&](Tensors& wire) {
        auto to_splits = output_splits;
        auto from_splits = input_splits;
        return gloo_->alltoall_base(wire[0], from, to_splits, from_splits, options);
      });
    });
  }

  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override {
    TORCH_CHECK(
        outputs.size() == static_cast<size_t>(size_) && inputs.size() == outputs.size(),
        "Output list should be same size as process group");
    return submit([=, this] {
      Tensors flat;
      std::vector<int64_t> from_splits, to_splits;
      for (int peer = 0; peer < size_; ++peer) {
        flat.push_back(as_words(host_contiguous(inputs[peer]).flatten()));
        from_splits.push_back(inputs[peer].numel());
        to_splits.push_back(outputs[peer].numel());
      }
      check_bytes(inputs[0], from_splits, to_splits);
      auto from = at::cat(flat);
      auto to = at::empty({std::accumulate(to_splits.begin(), to_splits.end(), int64_t{0})}, from.options());
      auto lengths = to_splits;  // gloo empties its own where they are even
      auto work = gloo_->alltoall_base(to, from, to_splits, from_splits, options);
      return finished({work}, outputs, [=] {
        auto parts = to.split_with_sizes(lengths);
        for (size_t peer = 0; peer < outputs.size(); ++peer) {
          host(outputs[peer]).copy_(parts[peer].view(outputs[peer].scalar_type()).view(outputs[peer].sizes()));
        }
      });
    });
  }

  // ---- point to point; HCCL ignores tags

  WorkPtr send(Tensors& tensors, int peer, int) override {
    auto tensor = single(tensors);
    check_type(tensor);
    return submit([=, this] {
      Tensors wire{as_words(host_contiguous(tensor))};
      return c10::make_intrusive<SentWork>(sends_->keep(gloo_->send(wire, peer, 0), wire[0]));
    });
  }

  WorkPtr recv(Tensors& tensors, int peer, int) override {
    auto tensor = single(tensors);
    check_type(tensor);
    return submit([=, this] {
      return moved({tensor}, [&](Tensors& wire) { return gloo_->recv(wire, peer, 0); });
    });
  }

  WorkPtr recvAnysource(Tensors&, int) override {
    TORCH_CHECK(false, "ProcessGroupHcclBase does not support recv");
  }

  // ---- groups

  // On the host, over the store.
  WorkPtr barrier(const c10d::BarrierOptions&) override {
    c10d::BarrierOptions options;
    return gloo_->barrier(options);
  }

  void setSequenceNumberForGroup() override { gloo_->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return gloo_->getSequenceNumberForGroup(); }

  void startCoalescing() override {
    TORCH_CHECK(!coalescing_, "Coalescing is already in progress. Nested coalescing is not supported.");
    coalescing_ = true;
  }

  WorkPtr endCoalescing() override {
    TORCH_CHECK(coalescing_, "endCoalescing invoked without startCoalescing");
    coalescing_ = false;
    std::vector<WorkPtr> works;
    for (auto& [launch, work] : std::exchange(queue_, {})) {
      works.push_back(work->launched = launch());
    }
    return joined(std::move(works), {});
  }

  bool has_left() const { return has_left_; }
  const std::string& name() const { return name_; }

  // All members leave a group together, and in the same order: else this waits, as the device would, but not for ever.
  void leave(const std::string& name, double seconds) {
    has_left_ = true;
    const auto arrived = store_->add("hccl-left", 1);
    if (arrived == size_) {
      store_->set("hccl-all-left", std::vector<uint8_t>{1});
    }
    try {
      store_->wait({"hccl-all-left"}, std::chrono::milliseconds(static_cast<int64_t>(1000 * seconds)));
    } catch (const std::exception&) {
      TORCH_CHECK(
          false, "rank ", rank_, " destroys group '", name, "', but after ", seconds, " s only ", store_->add("hccl-left", 0),
          " of its ", size_, " members do: on HPUs groups are destroyed by all members, in the same order");
    }
    // Rank 0, whose process may host the store, goes last.
    auto gone = store_->add("hccl-gone", 1);
    for (int i = 0; rank_ == 0 && gone < size_ && i < 1000; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
      gone = store_->add("hccl-gone", 0);
    }
  }

 private:
  using Launch = std::function<WorkPtr()>;

  // The members of a group connect at its first collective.
  void connect() {
    if (std::exchange(is_connected_, true)) {
      return;
    }
    const bool is_late = groups().steps > born_;
    {
      std::lock_guard<std::mutex> lock(groups().mutex);
      groups().first_uses.push_back(name_);
      groups().late += is_late;
    }
    const char* late = std::getenv("LIGHTNING_MEGATRON_HPU_SIM_LATE_GROUPS");
    TORCH_CHECK(
        !is_late || late == nullptr || std::string(late) != "refuse", "the first collective of group '", name_,
        "' comes after a step: its members connect now, and wait for the slowest of them in the middle of a step");
    TORCH_CHECK(refusal_.empty(), refusal_);
  }

  WorkPtr submit(Launch launch) {
    connect();
    if (!coalescing_) {
      return launch();
    }
    auto work = c10::make_intrusive<QueuedWork>();
    queue_.emplace_back(std::move(launch), work);
    return work;
  }

  WorkPtr each(size_t count, const Tensors& outputs, const std::function<WorkPtr(size_t)>& start) {
    std::vector<WorkPtr> works;
    for (size_t i = 0; i < count; ++i) {
      works.push_back(start(i));
    }
    return joined(std::move(works), outputs);
  }

  // The reduction that gloo shall do for this one, and whether its result is to be divided.
  std::pair<ReduceOp, bool> reduction(const ReduceOp& op, at::ScalarType type) const {
    switch (op.op_) {
      case ReduceOp::SUM:
      case ReduceOp::PRODUCT:
      case ReduceOp::MIN:
      case ReduceOp::MAX:
        return {op, false};
      case ReduceOp::AVG:
        TORCH_CHECK(type != at::kBool, "Cannot use ReduceOp.AVG with boolean inputs");
        TORCH_CHECK(has_average_, "Unsupported ReduceOp for HCCL process group");
        return {ReduceOp(ReduceOp::SUM), true};
      default:
        TORCH_CHECK(false, "Unsupported ReduceOp for HCCL process group");
    }
  }

  WorkPtr reduced(
      const at::Tensor& tensor, const ReduceOp& asked, const std::function<WorkPtr(Tensors&, ReduceOp)>& start) {
    auto [op, divide] = reduction(asked, tensor.scalar_type());
    auto target = host(tensor);
    Tensors wire{wire_of(target)};
    auto work = start(wire, op);
    const auto size = size_;
    auto summed = wire[0];
    return finished({work}, {tensor}, [=, divide = divide] {
      if (divide) {
        summed.div_(size);
      }
      if (summed.data_ptr() != target.data_ptr()) {
        target.copy_(summed);
      }
    });
  }

  WorkPtr reduce_scattered(
      const at::Tensor& output, const at::Tensor& input, const c10d::ReduceScatterOptions& asked) {
    auto [op, divide] = reduction(asked.reduceOp, output.scalar_type());
    const auto type = input.scalar_type();
    // int32 and int64 stay what they are here.
    Tensors wire{type == at::kInt || type == at::kLong ? input.clone() : wire_of(input).clone()};
    c10d::AllreduceOptions options;
    options.reduceOp = op;
    options.timeout = asked.timeout;
    auto work = gloo_->allreduce(wire, options);
    const auto size = size_, rank = rank_;
    auto summed = wire[0];
    return finished({work}, {output}, [=, divide = divide] {
      auto part = summed.chunk(size)[rank];
      if (divide) {
        part.div_(size);
      }
      auto target = host(output);
      target.copy_(part.view(target.sizes()));
    });
  }

  c10::intrusive_ptr<Backend> gloo_;
  c10::intrusive_ptr<c10d::Store> store_;
  bool has_average_;
  std::string name_, refusal_;
  int64_t born_;
  bool is_connected_ = false;
  bool has_left_ = false;
  std::shared_ptr<Sends> sends_ = std::make_shared<Sends>();
  bool coalescing_ = false;
  std::vector<std::pair<Launch, c10::intrusive_ptr<QueuedWork>>> queue_;
};

}  // namespace

c10::intrusive_ptr<Backend> make_hccl(
    const c10::intrusive_ptr<Backend>& gloo, const c10::intrusive_ptr<c10d::Store>& store, bool has_average,
    const std::string& name, const std::string& refusal) {
  return c10::make_intrusive<Hccl>(gloo, store, has_average, name, refusal);
}

void leave(const c10::intrusive_ptr<Backend>& group, const std::string& name, double seconds) {
  if (auto* hccl = dynamic_cast<Hccl*>(group.get())) {  // a group of another backend, as "fake", is not waited for
    hccl->leave(name, seconds);
  }
}

void leave_all(double seconds) {
  for (size_t left = groups().alive.size(); left-- > 0;) {
    auto* group = static_cast<Hccl*>(groups().alive[left]);
    if (group->getSize() > 1 && !group->has_left()) {
      group->leave(group->name(), seconds);
    }
  }
}

}  // namespace simulated_hpu
