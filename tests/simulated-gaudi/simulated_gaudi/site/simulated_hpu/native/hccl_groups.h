// Groups of this process, and what is known of them.
#pragma once
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <atomic>
#include <mutex>
#include <string>
#include <vector>

namespace simulated_hpu {

struct Groups {
  std::mutex mutex;
  std::vector<c10d::Backend*> alive;  // in the order of their creation
  std::vector<std::string> first_uses;  // in the order of their first collectives, since the last reset
  int64_t late = 0;  // groups whose first collective came after a step
  std::atomic<int64_t> steps{0};  // of optimizers
};

inline Groups& groups() {
  static Groups* found = new Groups();  // outlives everything that is destroyed when the process ends
  return *found;
}

c10::intrusive_ptr<c10d::Backend> make_hccl(
    const c10::intrusive_ptr<c10d::Backend>& gloo, const c10::intrusive_ptr<c10d::Store>& store, bool has_average,
    const std::string& name, const std::string& refusal);

void leave(const c10::intrusive_ptr<c10d::Backend>& group, const std::string& name, double seconds);

// At the end of a process all groups are destroyed, the last one first.
void leave_all(double seconds);

}  // namespace simulated_hpu
