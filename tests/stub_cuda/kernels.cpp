// Kernels: they do nothing, but those that fill bytes.
#include <cuda_runtime_api.h>

#include <cstring>
#include <functional>
#include <set>
#include <utility>
#include <vector>

#include "handles.h"

using namespace stub;

namespace {

// Of torch that fill bytes: (int count, struct { uint8_t value; }, struct { char* to; }, ...)
std::set<const void*>& byte_fills() {
  static auto* const kernels = new std::set<const void*>();
  return *kernels;
}
bool fills_bytes(const char* name) {
  if (!std::strstr(name, "FillFunctorIhE")) return false;
  return std::strstr(name, "vectorized_elementwise_kernel") ||
         std::strstr(name, "unrolled_elementwise_kernel");
}
cudaError_t launch(const void* kernel, void** arguments, cudaStream_t handle) {
  Guard guard(device().lock);
  device().counters[kLaunches]++;
  std::function<void()> run = [] {};
  if (byte_fills().count(kernel)) {
    const int bytes = *static_cast<int*>(arguments[0]);
    const auto value = *static_cast<unsigned char*>(arguments[1]);
    char* const to = *static_cast<char**>(arguments[2]);
    run = [=] { std::memset(to, value, static_cast<size_t>(bytes)); };
  }
  device().submit(stream_of(handle), {std::move(run), {}, {}});
  return cudaSuccess;
}

struct CallConfiguration {
  dim3 grid, block;
  size_t shared;
  cudaStream_t stream;
};
thread_local std::vector<CallConfiguration> call_configurations;

}  // namespace

extern "C" {

cudaError_t cudaLaunchKernel(const void* kernel, dim3, dim3, void** arguments, size_t,
                             cudaStream_t stream) {
  return launch(kernel, arguments, stream);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* configuration, const void* kernel,
                                void** arguments) {
  return launch(kernel, arguments, configuration->stream);
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void** arguments, size_t,
                               cudaStream_t stream) {
  return launch(kernel, arguments, stream);
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(function));
  return cudaSuccess;
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  std::memset(attributes, 0, sizeof *attributes);
  attributes->maxThreadsPerBlock = 1024;
  attributes->numRegs = 32;
  attributes->binaryVersion = attributes->ptxVersion = 90;
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int,
                                                                   size_t, unsigned) {
  return *blocks = 2, cudaSuccess;
}
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, cudaStream_t stream) {
  call_configurations.push_back({grid, block, shared, stream});
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  const CallConfiguration& last = call_configurations.back();
  *grid = last.grid;
  *block = last.block;
  *shared = last.shared;
  *static_cast<cudaStream_t*>(stream) = last.stream;
  call_configurations.pop_back();
  return cudaSuccess;
}
void** __cudaRegisterFatBinary(void*) {
  static void* handle;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
char __cudaInitModule(void**) { return 0; }
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
void __cudaRegisterFunction(void**, const char* function, char*, const char* name, int, uint3*,
                            uint3*, dim3*, dim3*, int*) {
  if (fills_bytes(name)) byte_fills().insert(function);
}

}  // extern "C"
