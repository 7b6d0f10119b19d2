// Device memory, page-locked host memory, copies.
#include <cuda_runtime_api.h>
#include <sys/mman.h>

#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "handles.h"

using namespace stub;

namespace {

// As CUDA has it: pageable memory is read before the call returns, and is written by then.
cudaError_t copy(void* to, const void* from, size_t bytes, cudaStream_t handle) {
  Guard guard(device().lock);
  auto& stream = stream_of(handle);
  const bool reads_host = !device().memory.hold(from), writes_host = !device().memory.hold(to);
  const bool pageable = (reads_host && !device().pinned.hold(from)) ||
                        (writes_host && !device().pinned.hold(to));
  device().counters[kCopies]++;
  if (pageable) device().counters[kPageableCopies]++;
  if (pageable && stream.capture) return breaks_capture(stream);
  if (pageable && reads_host) {
    const auto* first = static_cast<const char*>(from);
    auto staged = std::make_shared<std::vector<char>>(first, first + bytes);
    device().submit(stream, {[=] { std::memcpy(to, staged->data(), bytes); }, {}, {}});
  } else {
    device().submit(stream, {[=] { std::memmove(to, from, bytes); }, {}, {}});
  }
  if (pageable && writes_host) device().finish(stream);
  return cudaSuccess;
}
cudaError_t fill(void* to, int value, size_t bytes, cudaStream_t handle) {
  Guard guard(device().lock);
  device().submit(stream_of(handle), {[=] { std::memset(to, value, bytes); }, {}, {}});
  return cudaSuccess;
}

void* mapped(size_t bytes) {
  void* range = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return range == MAP_FAILED ? nullptr : range;
}

}  // namespace

extern "C" {

cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  Guard guard(device().lock);
  *total = Device::kTotalBytes;
  *free = *total - device().used_bytes;
  return cudaSuccess;
}
cudaError_t cudaMalloc(void** pointer, size_t bytes) {
  Guard guard(device().lock);
  if (device().used_bytes + bytes > Device::kTotalBytes || !(*pointer = mapped(bytes)))
    return failed(cudaErrorMemoryAllocation);
  device().memory.add(*pointer, bytes);
  device().used_bytes += bytes;
  device().counters[kMallocs]++;
  return cudaSuccess;
}
cudaError_t cudaFree(void* pointer) {
  if (!pointer) return cudaSuccess;
  Guard guard(device().lock);
  device().finish_all();  // as CUDA does
  const size_t bytes = device().memory.remove(pointer);
  if (!bytes) return failed(cudaErrorInvalidValue);
  munmap(pointer, bytes);
  device().used_bytes -= bytes;
  device().counters[kFrees]++;
  return cudaSuccess;
}
cudaError_t cudaHostRegister(void* pointer, size_t bytes, unsigned) {
  Guard guard(device().lock);
  if (device().pinned.hold(pointer)) return failed(cudaErrorHostMemoryAlreadyRegistered);
  if (bytes > Device::kLockableBytes) return failed(cudaErrorMemoryAllocation);
  device().pinned.add(pointer, bytes);
  return cudaSuccess;
}
cudaError_t cudaHostUnregister(void* pointer) {
  Guard guard(device().lock);
  device().finish_all();
  return device().pinned.remove(pointer) ? cudaSuccess
                                         : failed(cudaErrorHostMemoryNotRegistered);
}
cudaError_t cudaHostAlloc(void** pointer, size_t bytes, unsigned) {
  *pointer = mapped(bytes);
  return *pointer ? cudaHostRegister(*pointer, bytes, 0) : failed(cudaErrorMemoryAllocation);
}
cudaError_t cudaFreeHost(void* pointer) {
  Guard guard(device().lock);
  device().finish_all();
  const size_t bytes = device().pinned.remove(pointer);
  if (!bytes) return failed(cudaErrorInvalidValue);
  munmap(pointer, bytes);
  return cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  Guard guard(device().lock);
  std::memset(attributes, 0, sizeof *attributes);
  attributes->type = device().memory.hold(pointer)   ? cudaMemoryTypeDevice
                     : device().pinned.hold(pointer) ? cudaMemoryTypeHost
                                                     : cudaMemoryTypeUnregistered;
  if (attributes->type != cudaMemoryTypeUnregistered)
    attributes->devicePointer = const_cast<void*>(pointer);
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind,
                            cudaStream_t stream) {
  return copy(to, from, bytes, stream);
}
cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes,
                                cudaStream_t stream) {
  return copy(to, from, bytes, stream);
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  const cudaError_t status = copy(to, from, bytes, nullptr);
  return status == cudaSuccess ? cudaStreamSynchronize(nullptr) : status;
}
cudaError_t cudaMemset(void* to, int value, size_t bytes) {
  return fill(to, value, bytes, nullptr);
}
cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
  return fill(to, value, bytes, stream);
}
cudaError_t cudaMemcpyToSymbol(const void*, const void*, size_t, size_t, cudaMemcpyKind) {
  return cudaSuccess;
}
cudaError_t cudaGetSymbolAddress(void** pointer, const void* symbol) {
  return *pointer = const_cast<void*>(symbol), cudaSuccess;
}
// A handle is the address of the allocation, as only this process opens it.
cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* pointer) {
  Guard guard(device().lock);
  void* const base = device().memory.base(pointer);
  std::memset(handle, 0, sizeof *handle);
  std::memcpy(handle, &base, sizeof base);
  return base ? cudaSuccess : failed(cudaErrorInvalidValue);
}
cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t* handle, cudaEvent_t) {
  std::memset(handle, 0, sizeof *handle);
  return cudaSuccess;
}

}  // extern "C"
