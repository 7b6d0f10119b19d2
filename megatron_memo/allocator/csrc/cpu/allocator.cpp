// The CPU front-end: wraps the CPU allocator of torch.
//
// NOTE: the rules
// ---------------
// - The wrapper is never deleted and never uninstalled: storages keep pointers to their allocator.
//   Off is a mode, in which everything goes to the native allocator.
// - There is one deleter for all that the wrapper gives out. It asks the arena's range whose block
//   it is; so a block may outlive the mode, the plan and the iteration it was made in.
// - A DataPtr's context is its data, as the native allocator has it: torch then knows the pointer
//   as a simple one (copy-on-write, raw_allocate).
// - Every block is reported to torch's memory profiler once when it is made and once when it is
//   freed: the native allocator reports its own, the wrapper those of the arena.
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>
#include <pthread.h>
#include <sys/mman.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <exception>

#include "../core/core.h"

namespace {

// Late frees come within microseconds, or milliseconds where threads outnumber cores.
constexpr std::chrono::milliseconds kPatience{200}, kIterationPatience{200};

// Leaked on purpose: blocks are freed until the very end of the process.
memo::Core& core() {
  static auto* const the_core = new memo::Core();
  return *the_core;
}

const c10::Device kCpu(c10::DeviceType::CPU);
c10::Allocator* native_allocator = nullptr;
void* arena = nullptr;
uint64_t arena_bytes = 0;
char error_text[1024] = "";

int fail(const std::string& text) {
  std::snprintf(error_text, sizeof error_text, "%s", text.c_str());
  return -1;
}

void free_block(void* pointer) {
  if (!pointer) return;
  if (core().owns(pointer)) {
    // Before the bytes can be another block's.
    c10::profiledCPUMemoryReporter().Delete(pointer);
    core().give_back(pointer);
    return;
  }
  core().native_free(pointer);
  native_allocator->raw_deleter()(pointer);
}

struct PlannedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    const memo::Route route = core().route(size);
    if (route == memo::Route::kReplay) {
      if (void* pointer = core().allocate(size, memo::kArenaStream)) {
        c10::profiledCPUMemoryReporter().New(pointer, size);
        return {pointer, pointer, &free_block, kCpu};
      }
    }
    TORCH_CHECK_WITH(OutOfMemoryError, core().ledger().claim(size),
                     core().out_of_memory(size, arena_bytes));
    void* pointer = nullptr;
    try {
      c10::DataPtr block = native_allocator->allocate(size);
      pointer = block.release_context();
    } catch (...) {
      core().ledger().unclaim(size);
      throw;
    }
    core().native_malloc(pointer, size, memo::kArenaStream, route, true);
    return {pointer, pointer, &free_block, kCpu};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
};

PlannedAllocator* planned_allocator() {
  static auto* const allocator = new PlannedAllocator();
  return allocator;
}

}  // namespace

#include "../core/c_api.h"

// The torch this library was built for.
MEMO_API const char* memo_torch_version() { return MEMO_TORCH_VERSION; }

// Why the last call that returned a negative number did.
MEMO_API const char* memo_error() { return error_text; }

// Puts the wrapper in place, in off mode; does nothing the second time. Negative on failure.
MEMO_API int memo_install() {
  try {
    c10::Allocator* present = c10::GetCPUAllocator();
    if (present == planned_allocator()) return 0;
    if (native_allocator) return fail("another CPU allocator was installed over this one");
    const c10::DataPtr probe = present->allocate(64);
    if (!present->raw_deleter() || probe.get_deleter() != present->raw_deleter() ||
        probe.get() != probe.get_context())
      return fail("the CPU allocator in place is not torch's own and can't be wrapped");
    native_allocator = present;
    core().set_patience(kPatience, kIterationPatience);
    c10::SetCPUAllocator(planned_allocator());
    if (c10::GetCPUAllocator() != planned_allocator()) {
      native_allocator = nullptr;
      return fail("a CPU allocator of a higher priority is in place");
    }
    pthread_atfork([] { core().before_fork(); }, [] { core().after_fork_in_parent(); },
                   [] { core().after_fork_in_child(); });
    return 0;
  } catch (const std::exception& error) {
    return fail(error.what());
  }
}

// An arena of so many bytes (0: none) in place of the present one; drops the plan. Its pages are
// the system's until they are first written. -1 on failure; -2 while planned blocks live.
MEMO_API int memo_reserve_arena(uint64_t bytes) {
  if (!core().set_arena(nullptr, 0)) {
    fail("planned blocks are still in use");
    return -2;
  }
  if (arena) {
    munmap(arena, arena_bytes);
    core().ledger().unclaim(arena_bytes);
    arena = nullptr;
    arena_bytes = 0;
  }
  if (bytes == 0) return 0;
  if (!core().ledger().claim(bytes)) return fail(core().out_of_memory(bytes, 0));
  void* range =
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (range == MAP_FAILED) {
    core().ledger().unclaim(bytes);
    return fail(std::string("the system gives no ") + memo::readable(bytes) + ": " +
                std::strerror(errno));
  }
  madvise(range, bytes, MADV_HUGEPAGE);  // fewer page faults; without it all works as well
  arena = range;
  arena_bytes = bytes;
  core().set_arena(range, bytes);
  return 0;
}
