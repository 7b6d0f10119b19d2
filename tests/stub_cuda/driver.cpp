// Virtual memory management of the CUDA driver, which expandable segments are made of.
#include <cuda.h>
#include <sys/mman.h>

#include <map>

#include "device.h"

using stub::device;
using Guard = std::lock_guard<std::recursive_mutex>;

namespace {

struct Physical {
  std::map<CUmemGenericAllocationHandle, size_t> bytes;
  CUmemGenericAllocationHandle next = 1;
};
Physical& physical() {
  static auto* const all = new Physical();
  return *all;
}

void* pointer(CUdeviceptr address) { return reinterpret_cast<void*>(address); }

}  // namespace

extern "C" {

CUresult cuGetErrorString(CUresult, const char** text) {
  return *text = "an error of the stubbed driver", CUDA_SUCCESS;
}
CUresult cuDeviceGet(CUdevice* device, int ordinal) { return *device = ordinal, CUDA_SUCCESS; }
CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute, CUdevice) {
  return *value = 0, CUDA_SUCCESS;
}
// cuBLAS wants a context to be current. There is one.
CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice) {
  return *context = reinterpret_cast<CUcontext>(1), CUDA_SUCCESS;
}
CUresult cuCtxGetCurrent(CUcontext* context) { return cuDevicePrimaryCtxRetain(context, 0); }
CUresult cuCtxSetCurrent(CUcontext) { return CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* active) {
  *flags = 0;
  *active = 1;
  return CUDA_SUCCESS;
}
CUresult cuMemGetAllocationGranularity(size_t* bytes, const CUmemAllocationProp*,
                                       CUmemAllocationGranularity_flags) {
  return *bytes = 2 << 20, CUDA_SUCCESS;
}
CUresult cuMemAddressReserve(CUdeviceptr* address, size_t bytes, size_t, CUdeviceptr,
                             unsigned long long) {
  void* range = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (range == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  Guard guard(device().lock);
  device().memory.add(range, bytes);
  *address = reinterpret_cast<CUdeviceptr>(range);
  return CUDA_SUCCESS;
}
CUresult cuMemAddressFree(CUdeviceptr address, size_t bytes) {
  Guard guard(device().lock);
  device().finish_all();
  device().memory.remove(pointer(address));
  munmap(pointer(address), bytes);
  return CUDA_SUCCESS;
}
CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t bytes, const CUmemAllocationProp*,
                     unsigned long long) {
  Guard guard(device().lock);
  if (device().used_bytes + bytes > stub::Device::kTotalBytes) return CUDA_ERROR_OUT_OF_MEMORY;
  device().used_bytes += bytes;
  device().counters[stub::kMallocs]++;
  *handle = physical().next++;
  physical().bytes[*handle] = bytes;
  return CUDA_SUCCESS;
}
CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  Guard guard(device().lock);
  device().used_bytes -= physical().bytes[handle];
  device().counters[stub::kFrees]++;
  physical().bytes.erase(handle);
  return CUDA_SUCCESS;
}
CUresult cuMemMap(CUdeviceptr address, size_t bytes, size_t, CUmemGenericAllocationHandle,
                  unsigned long long) {
  return mprotect(pointer(address), bytes, PROT_READ | PROT_WRITE) ? CUDA_ERROR_UNKNOWN
                                                                   : CUDA_SUCCESS;
}
CUresult cuMemSetAccess(CUdeviceptr, size_t, const CUmemAccessDesc*, size_t) {
  return CUDA_SUCCESS;
}
CUresult cuMemUnmap(CUdeviceptr address, size_t bytes) {
  Guard guard(device().lock);
  device().finish_all();
  madvise(pointer(address), bytes, MADV_DONTNEED);
  mprotect(pointer(address), bytes, PROT_NONE);
  return CUDA_SUCCESS;
}

}  // extern "C"
