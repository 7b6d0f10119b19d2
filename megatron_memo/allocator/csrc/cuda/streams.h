// Events of side streams, for blocks that `record_stream` was called on.
#pragma once
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "../core/arena.h"

namespace memo {

// The stream, of one device, in whose order the arena's bytes are reused. It is number 0; those of
// others are made of torch's stream ids, not of addresses: a saved plan means the same tomorrow.
class PlannedStream {
 public:
  PlannedStream() = default;
  explicit PlannedStream(c10::cuda::CUDAStream stream)
      : device_(stream.device_index()), handle_(stream.stream()) {}

  bool operator==(const PlannedStream& other) const {
    return device_ == other.device_ && handle_ == other.handle_;
  }
  bool is_chosen() const { return device_ >= 0; }
  c10::DeviceIndex device() const { return device_; }
  cudaStream_t handle() const { return handle_; }

  uint64_t number_of(c10::cuda::CUDAStream stream) const {
    const c10::DeviceIndex device = stream.device_index();
    if (device == device_ && stream.stream() == handle_) return kArenaStream;
    return (static_cast<uint64_t>(device) + 1) << kIdBits | static_cast<uint64_t>(stream.id());
  }
  // Of another stream than the planned one.
  static c10::cuda::CUDAStream numbered(uint64_t number) {
    const auto id = static_cast<c10::StreamId>(number & ((1ull << kIdBits) - 1));
    const auto device = static_cast<c10::DeviceIndex>((number >> kIdBits) - 1);
    return c10::cuda::CUDAStream::unpack3(id, device, c10::DeviceType::CUDA);
  }

 private:
  // Ids of streams that are not torch's are addresses, of up to 57 bits.
  static constexpr int kIdBits = 57;

  c10::DeviceIndex device_ = -1;
  cudaStream_t handle_ = nullptr;
};

// True also when CUDA can't say, as while the legacy stream is held by another's capture.
inline bool is_capturing(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  if (cudaStreamIsCapturing(stream, &status) == cudaSuccess)
    return status != cudaStreamCaptureStatusNone;
  cudaGetLastError();  // ours, not the next caller's
  return true;
}

class CudaStreams final : public Streams {
 public:
  explicit CudaStreams(const PlannedStream& planned) : planned_(planned) {}

  // nullptr on a stream that is being captured: its event would belong to the graph.
  void* record(uint64_t number) override {
    const auto stream = PlannedStream::numbered(number);
    if (is_capturing(stream.stream())) return nullptr;
    int here = 0;
    if (!succeeded(cudaGetDevice(&here))) return nullptr;
    const bool elsewhere = here != stream.device_index();
    if (elsewhere && !succeeded(cudaSetDevice(stream.device_index()))) return nullptr;
    void* const event = record_here(stream.stream());
    if (elsewhere) succeeded(cudaSetDevice(here));
    return event;
  }
  bool arena_waits(void* event) override {
    return succeeded(cudaStreamWaitEvent(planned_.handle(), static_cast<cudaEvent_t>(event), 0));
  }
  void release(void* event) override {
    succeeded(cudaEventDestroy(static_cast<cudaEvent_t>(event)));
  }

 private:
  static void* record_here(cudaStream_t stream) {
    cudaEvent_t event = nullptr;
    if (!succeeded(cudaEventCreateWithFlags(&event, cudaEventDisableTiming))) return nullptr;
    if (succeeded(cudaEventRecord(event, stream))) return event;
    succeeded(cudaEventDestroy(event));
    return nullptr;
  }
  static bool succeeded(cudaError_t status) {
    if (status != cudaSuccess) cudaGetLastError();  // the caller has a way on: not an error later
    return status == cudaSuccess;
  }

  const PlannedStream& planned_;
};

}  // namespace memo
