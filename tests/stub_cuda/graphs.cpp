// Captures of streams, and what they recorded.
#include <cuda_runtime_api.h>

#include <functional>
#include <vector>

#include "handles.h"

using namespace stub;

extern "C" {

cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode) {
  Guard guard(device().lock);
  static unsigned long long next_id = 1;
  auto& stream = stream_of(handle);
  if (stream.capture || &stream == &device().default_stream)
    return failed(cudaErrorStreamCaptureUnsupported);
  stream.capture = new Graph{next_id++, {}};
  stream.capture_broken = false;
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* graph) {
  Guard guard(device().lock);
  auto& stream = stream_of(handle);
  Graph* const capture = stream.capture;
  if (!capture) return failed(cudaErrorIllegalState);
  bool broken = false;
  device().for_each_stream([&](Stream& member) {
    if (member.capture != capture) return;
    broken = broken || member.capture_broken;
    member.capture = nullptr;
  });
  *graph = broken ? nullptr : reinterpret_cast<cudaGraph_t>(capture);
  return broken ? failed(cudaErrorStreamCaptureInvalidated) : cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus* status) {
  Guard guard(device().lock);
  *status = stream_of(handle).capture ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t handle, cudaStreamCaptureStatus* status,
                                     unsigned long long* id, cudaGraph_t* graph,
                                     const cudaGraphNode_t** dependencies,
                                     const cudaGraphEdgeData** edges, size_t* count) {
  Guard guard(device().lock);
  const Stream& stream = stream_of(handle);
  *status = stream.capture ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  if (id) *id = stream.capture ? stream.capture->id : 0;
  if (graph) *graph = reinterpret_cast<cudaGraph_t>(stream.capture);
  if (dependencies) *dependencies = nullptr;
  if (edges) *edges = nullptr;
  if (count) *count = 0;
  return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*, size_t* count) {
  return *count = graph_of(graph).work.size(), cudaSuccess;
}
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* executable, cudaGraph_t graph,
                                          unsigned long long) {
  *executable = reinterpret_cast<cudaGraphExec_t>(new Graph(graph_of(graph)));
  return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
  Guard guard(device().lock);
  const std::vector<std::function<void()>> work = graph_of(executable).work;
  device().submit(stream_of(stream), {[work] { for (const auto& step : work) step(); }, {}, {}});
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete &graph_of(graph);
  return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  delete &graph_of(executable);
  return cudaSuccess;
}
cudaError_t cudaUserObjectCreate(cudaUserObject_t* object, void*, cudaHostFn_t, unsigned,
                                 unsigned) {
  return *object = nullptr, cudaSuccess;
}
cudaError_t cudaGraphRetainUserObject(cudaGraph_t, cudaUserObject_t, unsigned, unsigned) {
  return cudaSuccess;
}

}  // extern "C"
