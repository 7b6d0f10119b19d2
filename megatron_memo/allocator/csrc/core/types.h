// The plain structures that cross the C ABI. allocator/library.py declares the same for ctypes.
#pragma once
#include <cstdint>

namespace memo {

enum Mode : int { kOff = 0, kRecord = 1, kReplay = 2 };

// What stands in a plan entry's offset for: recorded, but left to the native allocator.
constexpr uint64_t kNative = ~0ull;
// The phase between iterations and before an iteration's first marker; it has no entries.
constexpr int32_t kNoPhase = -1;
// The stream that owns the arena, in the numbers of a trace and a plan.
constexpr uint64_t kArenaStream = 0;

enum EventKind : int32_t {
  kMalloc = 0,
  kFree = 1,
  kPhase = 2,           // a marker
  kIterationBegin = 3,
  kIterationEnd = 4,
};

struct Event {
  int32_t kind, phase;
  int64_t id;            // of the block, unique in a recording; 0 for markers
  uint64_t size;         // bytes asked for; 0 but for kMalloc
  uint64_t stream;
  int64_t thread;        // numbered from 0 in the order in which threads were first seen
};

// Every time that a phase is entered in an iteration.
constexpr int32_t kAnyVisit = -1;

// Requests in the order in which they are expected; those of one phase need not be contiguous.
struct PlanEntry {
  int32_t phase, visit;  // the how manieth time the phase is entered, from 0, or kAnyVisit
  uint64_t size, stream;
  uint64_t offset;       // in the arena, or kNative
};

// Counters since the last reset, but for those marked "now". Sizes in bytes.
struct Stats {
  // Requests that were matched against the plan; the first four below add up to them.
  uint64_t requests;
  uint64_t hits;               // served at the planned address
  uint64_t native_entries;     // matched an entry that says: native
  uint64_t miss_unknown;       // no entry of that size and stream within reach of the cursor
  uint64_t miss_occupied;      // the entry's bytes are still in use
  // Requests that were never matched, while replaying.
  uint64_t miss_thread;        // from a thread that pushed no marker
  uint64_t miss_small;         // below the size filter
  uint64_t outside;            // between iterations, or before an iteration's first marker
  uint64_t hit_bytes, miss_bytes;
  uint64_t native_mallocs;     // requests at or above the filter that the native allocator served,
  uint64_t native_bytes;       //   in any mode, by any thread
  uint64_t arena_size;         // now
  uint64_t arena_live;         // now
  uint64_t arena_peak;
  uint64_t arena_blocks;       // now
  uint64_t device_used;        // now: native blocks given out by us, and the arena where it counts
  uint64_t device_peak;
  uint64_t stream_waits;       // an allocation waited for a side stream's last use of its bytes
  uint64_t late_frees;         // an allocation waited for another thread's free of its bytes
  uint64_t unknown_frees;      // of arena addresses where no block was: a fault of the caller
};

inline uint64_t round_up(uint64_t n, uint64_t to) { return (n + to - 1) / to * to; }

}  // namespace memo
