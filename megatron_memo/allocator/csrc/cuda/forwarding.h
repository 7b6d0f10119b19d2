// A CUDA allocator that hands every call on to another one; a base for those that change a few.
//
// NOTE: every virtual, of every version
// -------------------------------------
// A virtual that is left out would be answered by torch's default, which refuses the call or does
// nothing, silently. tests/allocator/test_cuda_virtuals.py reads the compiler's class dump: no
// entry of the table may be the base's. What torch 2.12 to 2.14 added is at the end, by version.
#pragma once
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/headeronly/version.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#define MEMO_TORCH_AT_LEAST(major, minor) \
  (TORCH_VERSION_MAJOR > (major) ||       \
   (TORCH_VERSION_MAJOR == (major) && TORCH_VERSION_MINOR >= (minor)))

namespace memo {

namespace cca = c10::cuda::CUDACachingAllocator;

class ForwardingAllocator : public cca::CUDAAllocator {
 public:
  using Device = c10::DeviceIndex;
  using Pool = c10::MempoolId_t;

  explicit ForwardingAllocator(cca::CUDAAllocator* native) : native_(native) {}
  cca::CUDAAllocator* native() const { return native_; }

  // ---- c10::Allocator

  c10::DataPtr allocate(size_t size) override { return native_->allocate(size); }
  bool is_simple_data_ptr(const c10::DataPtr& block) const override {
    return native_->is_simple_data_ptr(block);
  }
  c10::DeleterFnPtr raw_deleter() const override { return native_->raw_deleter(); }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    native_->copy_data(to, from, bytes);
  }

  // ---- c10::DeviceAllocator

  bool initialized() override { return native_->initialized(); }
  void emptyCache(Pool pool) override { native_->emptyCache(pool); }
  void recordStream(const c10::DataPtr& block, c10::Stream stream) override {
    recordStream(block, c10::cuda::CUDAStream(stream));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(Device device) override {
    return native_->getDeviceStats(device);
  }
  void resetAccumulatedStats(Device device) override { native_->resetAccumulatedStats(device); }
  void resetPeakStats(Device device) override { native_->resetPeakStats(device); }
  std::pair<size_t, size_t> getMemoryInfo(Device device) override {
    return native_->getMemoryInfo(device);
  }

  // ---- CUDAAllocator: memory

  void* raw_alloc(size_t size) override { return native_->raw_alloc(size); }
  void* raw_alloc_with_stream(size_t size, cudaStream_t stream) override {
    return native_->raw_alloc_with_stream(size, stream);
  }
  void raw_delete(void* pointer) override { native_->raw_delete(pointer); }
  void recordStream(const c10::DataPtr& block, c10::cuda::CUDAStream stream) override {
    native_->recordStream(block, stream);
  }
  void* getBaseAllocation(void* pointer, size_t* size) override {
    return native_->getBaseAllocation(pointer, size);
  }
  cudaError_t memcpyAsync(void* to, int to_device, const void* from, int from_device, size_t bytes,
                          cudaStream_t stream, bool peers) override {
    return native_->memcpyAsync(to, to_device, from, from_device, bytes, stream, peers);
  }
  void enablePeerAccess(Device device, Device to) override {
    native_->enablePeerAccess(device, to);
  }
  cca::ShareableHandle shareIpcHandle(void* pointer) override {
    return native_->shareIpcHandle(pointer);
  }
  std::shared_ptr<void> getIpcDevPtr(std::string handle) override {
    return native_->getIpcDevPtr(std::move(handle));
  }

  // ---- CUDAAllocator: settings and what is seen of it

  void init(int device_count) override { native_->init(device_count); }
  std::string name() override { return native_->name(); }
  void enable(bool value) override { native_->enable(value); }
  bool isEnabled() const override { return native_->isEnabled(); }
  double getMemoryFraction(Device device) override { return native_->getMemoryFraction(device); }
  void setMemoryFraction(double fraction, Device device) override {
    native_->setMemoryFraction(fraction, device);
  }
  std::vector<cca::StreamSegmentSize> getExpandableSegmentSizes(Device device) override {
    return native_->getExpandableSegmentSizes(device);
  }
  void cacheInfo(Device device, size_t* largest) override { native_->cacheInfo(device, largest); }
  cca::SnapshotInfo snapshot(Pool pool, bool traces) override {
    return native_->snapshot(pool, traces);
  }
  bool isHistoryEnabled() override { return native_->isHistoryEnabled(); }
  void recordHistory(bool enabled, cca::CreateContextFn recorder, size_t entries,
                     cca::RecordContext when, bool clear,
                     const std::vector<std::string>& skipped) override {
    native_->recordHistory(enabled, recorder, entries, when, clear, skipped);
  }
  void recordAnnotation(const std::vector<std::pair<std::string, std::string>>& data) override {
    native_->recordAnnotation(data);
  }
  void pushCompileContext(std::string& data) override { native_->pushCompileContext(data); }
  void popCompileContext() override { native_->popCompileContext(); }
  void setUserMetadata(const std::string& data) override { native_->setUserMetadata(data); }
  std::string getUserMetadata() override { return native_->getUserMetadata(); }
  void attachOutOfMemoryObserver(cca::OutOfMemoryObserver observer) override {
    native_->attachOutOfMemoryObserver(std::move(observer));
  }
  void attachAllocatorTraceTracker(cca::AllocatorTraceTracker tracker) override {
    native_->attachAllocatorTraceTracker(std::move(tracker));
  }

  // ---- CUDAAllocator: pools and graphs

  void beginAllocateToPool(Device device, Pool pool,
                           std::function<bool(cudaStream_t)> filter) override {
    native_->beginAllocateToPool(device, pool, std::move(filter));
  }
  void endAllocateToPool(Device device, Pool pool) override {
    native_->endAllocateToPool(device, pool);
  }
  void releasePool(Device device, Pool pool) override { native_->releasePool(device, pool); }
  int getPoolUseCount(Device device, Pool pool) override {
    return native_->getPoolUseCount(device, pool);
  }
  void createOrIncrefPool(Device device, Pool pool,
                          std::shared_ptr<CUDAAllocator> allocator) override {
    native_->createOrIncrefPool(device, pool, std::move(allocator));
  }
  void setUseOnOOM(Device device, Pool pool, bool value) override {
    native_->setUseOnOOM(device, pool, value);
  }
  void setNoSplit(Device device, Pool pool) override { native_->setNoSplit(device, pool); }
  bool checkPoolLiveAllocations(Device device, Pool pool,
                                const std::unordered_set<void*>& expected) override {
    return native_->checkPoolLiveAllocations(device, pool, expected);
  }
  std::shared_ptr<cca::AllocatorState> getCheckpointState(Device device, Pool pool) override {
    return native_->getCheckpointState(device, pool);
  }
  cca::CheckpointDelta setCheckpointPoolState(
      Device device, std::shared_ptr<cca::AllocatorState> state) override {
    return native_->setCheckpointPoolState(device, std::move(state));
  }

#if MEMO_TORCH_AT_LEAST(2, 12)
  std::shared_ptr<c10::GatheredContext> getContextForPointer(const void* pointer) override {
    return native_->getContextForPointer(pointer);
  }
  void attachOomRejectionObserver(cca::OomRejectionObserver observer) override {
    native_->attachOomRejectionObserver(std::move(observer));
  }
#endif
#if MEMO_TORCH_AT_LEAST(2, 13)
  void markCaptureBegin(Device device) override { native_->markCaptureBegin(device); }
  void markCaptureEnd(Device device) override { native_->markCaptureEnd(device); }
  c10::DataPtr allocateWithAddress(size_t size, void* address) override {
    return native_->allocateWithAddress(size, address);
  }
#endif
#if MEMO_TORCH_AT_LEAST(2, 14)
  bool supportsUserMetadata() override { return native_->supportsUserMetadata(); }
  void annotateMemory(const void* pointer, const std::string& data) override {
    native_->annotateMemory(pointer, data);
  }
#endif

 private:
  cca::CUDAAllocator* const native_;
};

}  // namespace memo
