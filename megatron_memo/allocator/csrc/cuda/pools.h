// Which requests torch wants served from a private pool now: graph captures and torch.cuda.MemPool.
#pragma once
#include <c10/core/Device.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <mutex>
#include <shared_mutex>
#include <utility>
#include <vector>

namespace memo {

// Mirrors what the native allocator is told; it has no question for it.
class Pools {
 public:
  using Filter = std::function<bool(cudaStream_t)>;

  void begin(c10::DeviceIndex device, c10::MempoolId_t id, Filter filter) {
    std::unique_lock<std::shared_mutex> guard(lock_);
    open_.push_back({device, id, std::move(filter)});
    count_.store(open_.size(), std::memory_order_release);
  }
  void end(c10::DeviceIndex device, c10::MempoolId_t id) {
    std::unique_lock<std::shared_mutex> guard(lock_);
    auto pool = std::find_if(open_.begin(), open_.end(), [&](const Open& candidate) {
      return candidate.device == device && candidate.id == id;
    });
    if (pool != open_.end()) open_.erase(pool);
    count_.store(open_.size(), std::memory_order_release);
  }

  // Whether a request of this thread on the stream belongs to one of them.
  bool want(c10::DeviceIndex device, cudaStream_t stream) {
    if (count_.load(std::memory_order_acquire) == 0) return false;
    std::shared_lock<std::shared_mutex> guard(lock_);
    return std::any_of(open_.begin(), open_.end(), [&](const Open& pool) {
      return pool.device == device && pool.filter(stream);
    });
  }

 private:
  struct Open {
    c10::DeviceIndex device;
    c10::MempoolId_t id;
    Filter filter;
  };
  std::shared_mutex lock_;
  std::vector<Open> open_;
  std::atomic<size_t> count_{0};
};

}  // namespace memo
