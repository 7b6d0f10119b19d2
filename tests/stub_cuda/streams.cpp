// Streams and events.
#include <cuda_runtime_api.h>

#include <memory>

#include "handles.h"

using namespace stub;

namespace {

cudaError_t new_stream(cudaStream_t* handle) {
  Guard guard(device().lock);
  device().streams.push_back(std::make_unique<Stream>());
  *handle = reinterpret_cast<cudaStream_t>(device().streams.back().get());
  return cudaSuccess;
}

}  // namespace

extern "C" {

cudaError_t cudaStreamCreate(cudaStream_t* stream) { return new_stream(stream); }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) { return new_stream(stream); }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
  return new_stream(stream);
}
cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) {
  return *priority = 0, cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  Guard guard(device().lock);
  auto& stream = stream_of(handle);
  if (stream.capture) return breaks_capture(stream);
  device().finish(stream);
  return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t handle) {
  Guard guard(device().lock);
  auto& stream = stream_of(handle);
  if (stream.capture) return breaks_capture(stream);
  return stream.queue.empty() ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event_handle, unsigned) {
  Guard guard(device().lock);
  auto& stream = stream_of(handle);
  const auto& event = event_of(event_handle);
  device().counters[kStreamWaits]++;
  if (event.capture) {
    if (stream.capture && stream.capture != event.capture)
      return failed(cudaErrorStreamCaptureIsolation);
    stream.capture = event.capture;  // it joins the capture
    return cudaSuccess;
  }
  if (stream.capture && !Device::is_reached(event.last))
    return failed(cudaErrorStreamCaptureIsolation);
  device().submit(stream, {nullptr, event.last, {}});
  return cudaSuccess;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  Guard guard(device().lock);
  device().submit(stream_of(stream), {[=] { function(data); }, {}, {}});
  return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = reinterpret_cast<cudaEvent_t>(new Event());
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete &event_of(event);
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event_handle, cudaStream_t handle) {
  Guard guard(device().lock);
  auto& stream = stream_of(handle);
  auto& event = event_of(event_handle);
  device().counters[kEventRecords]++;
  event.capture = stream.capture;
  event.last = nullptr;
  if (stream.capture) return cudaSuccess;
  event.last = std::make_shared<Point>(Point{&stream});
  device().submit(stream, {nullptr, {}, event.last});
  return cudaSuccess;
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  return cudaEventRecord(event, stream);
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  Guard guard(device().lock);
  if (event_of(event).capture) return failed(cudaErrorCapturedEvent);
  return Device::is_reached(event_of(event).last) ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  Guard guard(device().lock);
  if (event_of(event).capture) return failed(cudaErrorCapturedEvent);
  const std::shared_ptr<Point> last = event_of(event).last;
  if (last) device().finish(*last);
  return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t, cudaEvent_t) {
  return *milliseconds = 1, cudaSuccess;
}

}  // extern "C"
