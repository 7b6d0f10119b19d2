// The blocks that the native allocator gave out through us, and the budget they count against.
//
// Sharded by address, so that threads rarely meet. The core's lock is never taken inside a shard's.
#pragma once
#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <unordered_map>

#include "types.h"

namespace memo {

class Ledger {
 public:
  static constexpr uint64_t kUnlimited = ~0ull;

  struct Entry {
    uint64_t size = 0;
    int64_t id = -1;       // in the recording of that session
    uint32_t session = 0;  // 0: not recorded
    int32_t phase = kNoPhase;
    bool claimed = false;  // its bytes count
  };

  // Counts bytes in before they are allocated; false when they would exceed the budget.
  bool claim(uint64_t bytes) {
    const uint64_t used = used_.fetch_add(bytes, std::memory_order_relaxed) + bytes;
    if (used > budget_.load(std::memory_order_relaxed)) {
      unclaim(bytes);
      return false;
    }
    uint64_t peak = peak_.load(std::memory_order_relaxed);
    while (used > peak && !peak_.compare_exchange_weak(peak, used, std::memory_order_relaxed)) {
    }
    return true;
  }
  void unclaim(uint64_t bytes) { used_.fetch_sub(bytes, std::memory_order_relaxed); }

  // An address that is there already was given back behind our back; its old entry is dropped.
  void add(const void* pointer, const Entry& entry) {
    Shard& shard = shard_of(pointer);
    std::lock_guard<std::mutex> guard(shard.lock);
    Entry& place = shard.entries[pointer];
    if (place.claimed) unclaim(place.size);
    place = entry;
  }

  // Takes the entry out; one of size 0 when the address is not known.
  Entry remove(const void* pointer) {
    Shard& shard = shard_of(pointer);
    Entry entry;
    {
      std::lock_guard<std::mutex> guard(shard.lock);
      auto found = shard.entries.find(pointer);
      if (found == shard.entries.end()) return entry;
      entry = found->second;
      shard.entries.erase(found);
    }
    if (entry.claimed) unclaim(entry.size);
    return entry;
  }

  void set_budget(uint64_t bytes) { budget_.store(bytes, std::memory_order_relaxed); }
  uint64_t budget() const { return budget_.load(std::memory_order_relaxed); }
  uint64_t used() const { return used_.load(std::memory_order_relaxed); }
  uint64_t peak() const { return peak_.load(std::memory_order_relaxed); }
  void reset_peak() { peak_.store(used(), std::memory_order_relaxed); }

  // visit(size, phase) for every block.
  template <class Visit>
  void for_each(Visit visit) {
    for (Shard& shard : shards_) {
      std::lock_guard<std::mutex> guard(shard.lock);
      for (const auto& block : shard.entries) visit(block.second.size, block.second.phase);
    }
  }

  // Around fork(): no shard may be half changed in the child.
  void lock_all() {
    for (Shard& shard : shards_) shard.lock.lock();
  }
  void unlock_all() {
    for (Shard& shard : shards_) shard.lock.unlock();
  }

 private:
  struct Shard {
    std::mutex lock;
    std::unordered_map<const void*, Entry> entries;
  };
  Shard& shard_of(const void* pointer) {
    const auto address = reinterpret_cast<uintptr_t>(pointer);
    return shards_[((address >> 6) ^ (address >> 12) ^ (address >> 21)) % shards_.size()];
  }

  std::array<Shard, 32> shards_;
  std::atomic<uint64_t> used_{0}, peak_{0}, budget_{kUnlimited};
};

}  // namespace memo
