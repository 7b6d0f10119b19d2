// Counters that are touched without the core's lock, and how they become Stats.
#pragma once
#include <atomic>
#include <cstdint>

#include "types.h"

namespace memo {

class Statistics {
 public:
  // Under the core's lock.
  Stats counted{};

  // From any thread, without it.
  std::atomic<uint64_t> miss_thread{0}, miss_small{0}, outside{0};
  std::atomic<uint64_t> native_mallocs{0}, native_bytes{0};

  static void add(std::atomic<uint64_t>& counter, uint64_t n = 1) {
    counter.fetch_add(n, std::memory_order_relaxed);
  }

  // Under the core's lock.
  Stats read(uint64_t arena_size, uint64_t arena_live, uint64_t blocks) const {
    Stats all = counted;
    all.miss_thread = miss_thread.load(std::memory_order_relaxed);
    all.miss_small = miss_small.load(std::memory_order_relaxed);
    all.outside = outside.load(std::memory_order_relaxed);
    all.native_mallocs = native_mallocs.load(std::memory_order_relaxed);
    all.native_bytes = native_bytes.load(std::memory_order_relaxed);
    all.arena_size = arena_size;
    all.arena_live = arena_live;
    all.arena_blocks = blocks;
    return all;
  }

  void reset(uint64_t arena_live) {
    counted = Stats{};
    counted.arena_peak = arena_live;
    for (auto* counter : {&miss_thread, &miss_small, &outside, &native_mallocs, &native_bytes})
      counter->store(0, std::memory_order_relaxed);
  }
};

}  // namespace memo
