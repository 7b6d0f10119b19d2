// The core with a front-end that needs no torch: malloc is the native allocator, streams are
// numbers, events are numbers that the test can look up. What the tests of the policy drive.
#include <cstdlib>
#include <thread>
#include <vector>

#include "core.h"

static memo::Core& core() {
  static auto* const the_core = new memo::Core();
  return *the_core;
}

#include "c_api.h"

namespace {

struct LoggedStreams final : memo::Streams {
  std::vector<uint64_t> recorded, waited, released;  // streams, in order
  bool record_fails = false, wait_fails = false;

  void* record(uint64_t stream) override {
    if (record_fails) return nullptr;
    recorded.push_back(stream);
    return reinterpret_cast<void*>(stream);
  }
  bool arena_waits(void* event) override {
    if (wait_fails) return false;
    waited.push_back(reinterpret_cast<uint64_t>(event));
    return true;
  }
  void release(void* event) override { released.push_back(reinterpret_cast<uint64_t>(event)); }
};

LoggedStreams streams;
void* arena = nullptr;

}  // namespace

// Forgets everything; blocks that live are lost.
MEMO_API void alone_reset() {
  core().~Core();
  new (&core()) memo::Core();
  streams = LoggedStreams();
  core().set_streams(&streams);
}

MEMO_API int alone_arena(uint64_t bytes) {
  void* range = bytes ? std::aligned_alloc(4096, memo::round_up(bytes, 4096)) : nullptr;
  if (!core().set_arena(range, bytes)) {
    std::free(range);
    return 0;
  }
  std::free(arena);
  arena = range;
  return 1;
}

MEMO_API uint64_t alone_base() { return reinterpret_cast<uint64_t>(arena); }

MEMO_API uint64_t alone_malloc(uint64_t size, uint64_t stream) {
  const memo::Route route = core().route(size);
  if (route == memo::Route::kReplay)
    if (void* pointer = core().allocate(size, stream)) return reinterpret_cast<uint64_t>(pointer);
  if (!core().ledger().claim(size)) return 0;
  void* pointer = std::malloc(size);
  core().native_malloc(pointer, size, stream, route, true);
  return reinterpret_cast<uint64_t>(pointer);
}

MEMO_API uint64_t alone_malloc_on_thread(uint64_t size, uint64_t stream, int marker) {
  uint64_t pointer = 0;
  std::thread([&] {
    if (marker >= 0) core().enter(marker);
    pointer = alone_malloc(size, stream);
  }).join();
  return pointer;
}

MEMO_API int alone_free(uint64_t address) {
  void* pointer = reinterpret_cast<void*>(address);
  if (core().owns(pointer)) return core().give_back(pointer);
  core().native_free(pointer);
  std::free(pointer);
  return 1;
}

MEMO_API int alone_use(uint64_t address, uint64_t stream) {
  return core().used_by(reinterpret_cast<void*>(address), stream);
}

MEMO_API void alone_break_streams(int record, int wait) {
  streams.record_fails = record;
  streams.wait_fails = wait;
}

// Which: 0 recorded, 1 waited, 2 released. Returns how many there are.
MEMO_API size_t alone_stream_log(int which, uint64_t* out, size_t room) {
  const auto& log = which == 0 ? streams.recorded : which == 1 ? streams.waited : streams.released;
  for (size_t i = 0; i < log.size() && i < room; i++) out[i] = log[i];
  return log.size();
}

MEMO_API int alone_block_around(uint64_t address, uint64_t* offset, uint64_t* length) {
  return core().block_around(reinterpret_cast<void*>(address), *offset, *length);
}

MEMO_API void alone_out_of_memory(uint64_t size, uint64_t reserved, char* out, size_t room) {
  std::snprintf(out, room, "%s", core().out_of_memory(size, reserved).c_str());
}
