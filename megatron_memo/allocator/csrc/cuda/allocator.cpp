// The CUDA front-end: stands before torch's own caching allocator.
//
// NOTE: the rules
// ---------------
// - Whatever is not served from the arena is the native allocator's own DataPtr, untouched. So
//   statistics, snapshots, record_stream, pools and graphs stay native.
// - One stream of one device is planned: arena bytes are reused in its order. Requests of other
//   streams are recorded under their numbers and stay native.
// - Graph captures and MemPools ask for memory that must be theirs: native, and not counted.
// - The arena is one block of the native allocator, and so part of its statistics; an IPC handle
//   or a base address of a planned block is the arena's.
// - Never deleted, never uninstalled: storages keep pointers to their allocator. Off is a mode.
// - raw_deleter() is the native one, as torch compares it with a storage's; a planned block has a
//   deleter of its own in its DataPtr.
// - Recording hears of frees from a tracker in the native allocator, which runs under its lock; the
//   core never calls the native allocator, so the two locks are always taken in that order.
#include <c10/core/Allocator.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>
#include <pthread.h>

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <functional>
#include <limits>
#include <mutex>
#include <string>
#include <utility>

#include "../core/core.h"
#include "forwarding.h"
#include "pools.h"
#include "streams.h"

namespace {

// Leaked on purpose: blocks are freed until the very end of the process.
memo::Core& core() {
  static auto* const the_core = new memo::Core();
  return *the_core;
}

constexpr uint64_t kAlignment = 512;  // the native allocator's

memo::PlannedStream planned;  // changes only while the arena is empty
void* arena = nullptr;
char error_text[1024] = "";

int fail(const std::string& text, int status = -1) {
  std::snprintf(error_text, sizeof error_text, "%s", text.c_str());
  return status;
}

void free_planned(void* pointer) {
  if (pointer) core().give_back(pointer);
}

ptrdiff_t offset_in_arena(const void* pointer) {
  return static_cast<const char*>(pointer) - static_cast<const char*>(arena);
}

class PlannedAllocator final : public memo::ForwardingAllocator {
 public:
  using ForwardingAllocator::ForwardingAllocator;
  using ForwardingAllocator::recordStream;

  c10::DataPtr allocate(size_t size) override {
    if (core().mode() == memo::kOff || size < core().filter()) {
      core().route(size);  // counts it
      return native()->allocate(size);
    }
    if (c10::cuda::current_device() != planned.device()) return native()->allocate(size);
    const auto stream = c10::cuda::getCurrentCUDAStream(planned.device());
    if (pools_.want(planned.device(), stream.stream()) || memo::is_capturing(stream.stream()))
      return native()->allocate(size);
    const memo::Route route = core().route(size);
    const uint64_t number = planned.number_of(stream);
    if (route == memo::Route::kReplay) {
      if (void* pointer = core().allocate(size, number))
        return {pointer, pointer, &free_planned, {c10::DeviceType::CUDA, planned.device()}};
    }
    c10::DataPtr block = native()->allocate(size);
    if (route == memo::Route::kRecord)
      core().native_malloc(block.get(), size, number, route, /*claimed=*/false);
    return block;
  }
  void raw_delete(void* pointer) override {
    core().owns(pointer) ? free_planned(pointer) : native()->raw_delete(pointer);
  }
  void recordStream(const c10::DataPtr& block, c10::cuda::CUDAStream stream) override {
    if (block.get_deleter() == &free_planned)
      core().used_by(block.get_context(), planned.number_of(stream));
    else
      native()->recordStream(block, stream);
  }
  void* getBaseAllocation(void* pointer, size_t* size) override {
    return native()->getBaseAllocation(core().owns(pointer) ? arena : pointer, size);
  }
  memo::cca::ShareableHandle shareIpcHandle(void* pointer) override {
    if (!core().owns(pointer)) return native()->shareIpcHandle(pointer);
    auto handle = native()->shareIpcHandle(arena);
    handle.offset += offset_in_arena(pointer);
    return handle;
  }
  void beginAllocateToPool(Device device, Pool pool,
                           std::function<bool(cudaStream_t)> filter) override {
    native()->beginAllocateToPool(device, pool, filter);
    pools_.begin(device, pool, std::move(filter));
  }
  void endAllocateToPool(Device device, Pool pool) override {
    native()->endAllocateToPool(device, pool);
    pools_.end(device, pool);
  }

 private:
  memo::Pools pools_;
};

PlannedAllocator* wrapper = nullptr;

// What the call threw, as memo_error's text.
template <class Call>
int guarded(Call call) {
  try {
    return call();
  } catch (const c10::Error& error) {
    return fail(error.what_without_backtrace());
  } catch (const std::exception& error) {
    return fail(error.what());
  }
}

// Once: the native allocator has no way to take a tracker back.
void hear_frees() {
  static std::once_flag once;
  std::call_once(once, [] {
    wrapper->native()->attachAllocatorTraceTracker([](const memo::cca::TraceEntry& entry) {
      if (entry.action_ == memo::cca::TraceEntry::FREE_REQUESTED &&
          core().mode() == memo::kRecord)
        core().native_free(reinterpret_cast<const void*>(entry.addr_));
    });
  });
}

int release_arena() {
  if (!core().set_arena(nullptr, 0)) return fail("planned blocks are still in use", -2);
  if (!arena) return 0;
  c10::cuda::CUDAGuard guard(planned.device());
  // Side streams may still read what was in it, and the native allocator does not know of them.
  c10::cuda::device_synchronize();
  wrapper->native()->raw_delete(arena);
  arena = nullptr;
  return 0;
}

}  // namespace

#include "../core/c_api.h"

// The torch this library was built for.
MEMO_API const char* memo_torch_version() { return MEMO_TORCH_VERSION; }

// Why the last call that returned a negative number did.
MEMO_API const char* memo_error() { return error_text; }

// Puts the wrapper in place, in off mode; does nothing the second time. Negative on failure.
MEMO_API int memo_install() {
  return guarded([] {
    memo::cca::CUDAAllocator* present = memo::cca::get();
    if (wrapper)
      return present == wrapper ? 0 : fail("another CUDA allocator was installed over this one");
    if (c10::GetAllocator(c10::DeviceType::CUDA) != present)
      return fail("torch's allocator for CUDA tensors is not its CUDA caching allocator");
    if (present->name() != "native")
      return fail("torch's CUDA allocator is \"" + present->name() +
                  "\", and only the native one can be planned: leave backend out of "
                  "PYTORCH_CUDA_ALLOC_CONF and install no pluggable allocator");
    if (!present->isEnabled() || std::getenv("PYTORCH_NO_CUDA_MEMORY_CACHING"))
      return fail("torch's CUDA memory caching is off: unset PYTORCH_NO_CUDA_MEMORY_CACHING");
    wrapper = new PlannedAllocator(present);
    core().configure(kAlignment, 1);
    core().set_streams(new memo::CudaStreams(planned));
    memo::cca::allocator.store(wrapper);
    // torch registers its own above the default priority.
    c10::SetAllocator(c10::DeviceType::CUDA, wrapper, std::numeric_limits<uint8_t>::max());
    pthread_atfork([] { core().before_fork(); }, [] { core().after_fork_in_parent(); },
                   [] { core().after_fork_in_child(); });
    return 0;
  });
}

// The calling thread's current stream, and its device, become the planned ones; an arena of another
// stream is released, which drops the plan. -1 on failure; -2 while planned blocks live in it.
MEMO_API int memo_plan_current_stream() {
  return guarded([] {
    const memo::PlannedStream current(c10::cuda::getCurrentCUDAStream());
    if (!(current == planned)) {
      if (const int status = release_arena()) return status;
      planned = current;
    }
    hear_frees();
    return 0;
  });
}

// An arena of so many bytes (0: none) in place of the present one; drops the plan. It is of the
// planned stream, of the current one if none was chosen. -1 on failure; -2 while blocks live in it.
MEMO_API int memo_reserve_arena(uint64_t bytes) {
  return guarded([bytes] {
    if (const int status = release_arena()) return status;
    if (bytes == 0) return 0;
    if (!planned.is_chosen()) planned = memo::PlannedStream(c10::cuda::getCurrentCUDAStream());
    c10::cuda::CUDAGuard guard(planned.device());
    arena = wrapper->native()->raw_alloc_with_stream(bytes, planned.handle());
    core().set_arena(arena, bytes);
    return 0;
  });
}
