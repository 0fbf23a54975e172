// Sends and counters of the HCCL backend.
#pragma once
#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <atomic>
#include <deque>
#include <future>
#include <memory>
#include <mutex>
#include <thread>

namespace simulated_hpu {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// Questions for the end of a work, which are waits on a real device.
inline std::atomic<int64_t>& completion_questions() {
  static std::atomic<int64_t> count{0};
  return count;
}

// Sends under way. HCCL keeps a tensor until it is sent, also where nothing waits for the work; gloo does not. So a
// thread, which lives while there are any, waits for them in turn.
class Sends final : public std::enable_shared_from_this<Sends> {
 public:
  std::shared_future<void> keep(WorkPtr work, at::Tensor tensor) {
    std::lock_guard<std::mutex> lock(mutex_);
    queue_.emplace_back(Entry{std::move(work), std::move(tensor), {}});
    auto future = queue_.back().done.get_future().share();
    if (!is_running_) {
      is_running_ = true;
      std::thread([self = shared_from_this()] { self->run(); }).detach();
    }
    return future;
  }

  // The group is gone: nobody will receive what is left.
  void abort() {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& entry : queue_) {
      entry.work->abort();
    }
  }

 private:
  struct Entry {
    WorkPtr work;
    at::Tensor tensor;
    std::promise<void> done;
  };

  void run() {
    for (;;) {
      Entry* entry = nullptr;
      {
        std::lock_guard<std::mutex> lock(mutex_);
        if (queue_.empty()) {
          is_running_ = false;
          return;
        }
        entry = &queue_.front();  // stays where it is: only this thread removes entries
      }
      try {
        entry->work->wait();
        entry->done.set_value();
      } catch (...) {
        entry->done.set_exception(std::current_exception());
      }
      Entry finished;  // freed outside of the lock
      std::lock_guard<std::mutex> lock(mutex_);
      finished = std::move(queue_.front());
      queue_.pop_front();
    }
  }

  std::mutex mutex_;
  std::deque<Entry> queue_;
  bool is_running_ = false;
};

class SentWork final : public c10d::Work {
 public:
  explicit SentWork(std::shared_future<void> done) : done_(std::move(done)) {}

  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override {
    TORCH_CHECK(
        timeout == kNoTimeout || done_.wait_for(timeout) == std::future_status::ready, "send: timed out after ",
        timeout.count(), " ms");
    done_.get();
    return true;
  }
  void synchronize() override { wait(); }
  bool isCompleted() override {
    ++completion_questions();
    return wait();
  }
  bool isSuccess() const override { return true; }

 private:
  std::shared_future<void> done_;
};

}  // namespace simulated_hpu
