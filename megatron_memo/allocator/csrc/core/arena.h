// The arena: which of its bytes are in use, and which are given back but not yet done with.
//
// Occupancy is the whole safety of replay. A plan may be wrong, stale or matched to the wrong
// request: `take` hands bytes out only if no live block shares any of them.
#pragma once
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>
#include <utility>
#include <vector>

#include "types.h"

namespace memo {

// What a front-end with streams supplies. Called under the core's lock: must not allocate from the
// wrapped allocator and must not throw.
struct Streams {
  virtual ~Streams() = default;
  // An event at the present end of the stream's work; nullptr if that can't be had.
  virtual void* record(uint64_t stream) = 0;
  // Makes the arena's stream wait for the event, the host does not; false if that fails.
  virtual bool arena_waits(void* event) = 0;
  virtual void release(void* event) = 0;
};

class Arena {
 public:
  void set_streams(Streams* streams) { streams_ = streams; }

  // Another range, or none (nullptr, 0). False while blocks live in the present one.
  bool reset(void* base, uint64_t size) {
    if (!live_.empty()) return false;
    for (auto& zombie : zombies_) settle(zombie.second);
    zombies_.clear();
    base_ = reinterpret_cast<uintptr_t>(base);
    size_ = size;
    return true;
  }

  uintptr_t base() const { return base_; }
  uint64_t size() const { return size_; }
  uint64_t live_bytes() const { return live_bytes_; }
  size_t blocks() const { return live_.size(); }
  void* at(uint64_t offset) const { return reinterpret_cast<void*>(base_ + offset); }

  // Whether no live block shares a byte of the range.
  bool is_free(uint64_t offset, uint64_t length) const {
#ifdef MEMO_WITHOUT_OCCUPANCY_CHECK  // the mutant that the tests must catch; never in a product
    return true;
#endif
    auto next = live_.lower_bound(offset);
    if (next != live_.end() && next->first < offset + length) return false;
    if (next == live_.begin()) return true;
    auto before = std::prev(next);
    return before->first + before->second.length <= offset;
  }

  // Makes the free range a live block; waits (in stream order) for side streams that used it. The
  // number of waits is added to `waits`. False when such a wait can't be had.
  bool take(uint64_t offset, uint64_t length, int32_t phase, uint64_t& waits) {
    if (!zombies_.empty() && !settle_range(offset, length, waits)) return false;
    live_.emplace(offset, Block{length, phase, {}});
    live_bytes_ += length;
    return true;
  }

  // False when no block starts there.
  bool give_back(const void* pointer) {
    auto block = find(pointer);
    if (block == live_.end()) return false;
    live_bytes_ -= block->second.length;
    if (!block->second.side_streams.empty() && streams_) {
      Zombie zombie{block->second.length, {}};
      for (uint64_t stream : block->second.side_streams)
        zombie.events.push_back(streams_->record(stream));
      zombies_.emplace(block->first, std::move(zombie));
    }
    live_.erase(block);
    return true;
  }

  // Notes that a side stream uses the block. False when no block starts there.
  bool used_by(const void* pointer, uint64_t stream) {
    auto block = find(pointer);
    if (block == live_.end()) return false;
    if (stream == kArenaStream) return true;
    for (uint64_t known : block->second.side_streams)
      if (known == stream) return true;
    block->second.side_streams.push_back(stream);
    return true;
  }

  // Offset and length of the live block that holds the address; false if none does.
  bool block_around(const void* pointer, uint64_t& offset, uint64_t& length) const {
    uint64_t at = reinterpret_cast<uintptr_t>(pointer) - base_;
    auto after = live_.upper_bound(at);
    if (after == live_.begin()) return false;
    auto block = std::prev(after);
    offset = block->first;
    length = block->second.length;
    return at < offset + length;
  }

  // visit(length, phase)
  template <class Visit>
  void for_each_block(Visit visit) const {
    for (const auto& block : live_) visit(block.second.length, block.second.phase);
  }

 private:
  struct Block {
    uint64_t length;
    int32_t phase;  // of the request
    std::vector<uint64_t> side_streams;
  };
  // Freed, while side streams may still use it. Ranges of zombies are disjoint: whoever takes bytes
  // of one settles it, and a live block's bytes are not freed twice.
  struct Zombie {
    uint64_t length;
    std::vector<void*> events;  // nullptr: there is no event, the bytes stay out of use
  };

  std::map<uint64_t, Block>::iterator find(const void* pointer) {
    return live_.find(reinterpret_cast<uintptr_t>(pointer) - base_);
  }

  // The arena's stream waits for all events; those that it waited for are gone afterwards.
  bool settle(Zombie& zombie) {
    auto& events = zombie.events;
    while (!events.empty()) {
      if (!events.back() || !streams_->arena_waits(events.back())) return false;
      streams_->release(events.back());
      events.pop_back();
    }
    return true;
  }

  bool settle_range(uint64_t offset, uint64_t length, uint64_t& waits) {
    auto zombie = zombies_.lower_bound(offset);
    if (zombie != zombies_.begin()) {
      auto before = std::prev(zombie);
      if (before->first + before->second.length > offset) zombie = before;
    }
    while (zombie != zombies_.end() && zombie->first < offset + length) {
      uint64_t events = zombie->second.events.size();
      if (!settle(zombie->second)) return false;
      waits += events;
      zombie = zombies_.erase(zombie);
    }
    return true;
  }

  uintptr_t base_ = 0;
  uint64_t size_ = 0, live_bytes_ = 0;
  std::map<uint64_t, Block> live_;      // by offset
  std::map<uint64_t, Zombie> zombies_;  // by offset
  Streams* streams_ = nullptr;
};

}  // namespace memo
