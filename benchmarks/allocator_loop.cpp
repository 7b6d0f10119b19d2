// Times allocate + free of torch's CPU allocator without Python in between (benchmarks/allocator.py).
#include <c10/core/CPUAllocator.h>

#include <chrono>
#include <cstring>

#define API extern "C" __attribute__((visibility("default")))

static c10::Allocator* first = nullptr;

// The allocator in place now is what `native` means later.
API void loop_remember() { first = c10::GetCPUAllocator(); }

// Nanoseconds for `count` pairs; `write`: every byte is written in between.
API double loop_run(int native, uint64_t bytes, int count, int write) {
  c10::Allocator* const allocator = native ? first : c10::GetCPUAllocator();
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < count; i++) {
    const c10::DataPtr block = allocator->allocate(bytes);
    if (write) std::memset(block.get(), i, bytes);
  }
  return std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - start).count();
}
