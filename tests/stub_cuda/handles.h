// What the runtime's handles stand for here, and its errors.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>
#include <mutex>

#include "device.h"

namespace stub {

using Guard = std::lock_guard<std::recursive_mutex>;

inline thread_local cudaError_t last_error = cudaSuccess;
inline cudaError_t failed(cudaError_t error) { return last_error = error; }

// The default streams (null, legacy, per thread) are one.
inline Stream& stream_of(cudaStream_t handle) {
  if (reinterpret_cast<uintptr_t>(handle) <= 2) return device().default_stream;
  return *reinterpret_cast<Stream*>(handle);
}
inline Event& event_of(cudaEvent_t handle) { return *reinterpret_cast<Event*>(handle); }
inline Graph& graph_of(void* handle) { return *reinterpret_cast<Graph*>(handle); }

inline cudaError_t breaks_capture(Stream& stream) {
  stream.capture_broken = true;
  return failed(cudaErrorStreamCaptureUnsupported);
}

}  // namespace stub
