// What C++ code asks torch's CUDA allocator, for tests that speak ctypes.
#include <c10/core/Allocator.h>
#include <c10/cuda/CUDACachingAllocator.h>

namespace cca = c10::cuda::CUDACachingAllocator;

#define EXPORTED extern "C" __attribute__((visibility("default")))

EXPORTED void* question_base(void* pointer, size_t* bytes) {
  return cca::getBaseAllocation(pointer, bytes);
}
// A block without its DataPtr; it is given back by question_delete.
EXPORTED void* question_allocate(size_t bytes) {
  return c10::GetAllocator(c10::DeviceType::CUDA)->allocate(bytes).release_context();
}
EXPORTED void question_delete(void* pointer) { cca::raw_delete(pointer); }
EXPORTED bool question_deleter_is_torchs(size_t bytes) {
  return cca::get()->allocate(bytes).get_deleter() == cca::get()->raw_deleter();
}
