// The plan and how requests find their entries.
//
// NOTE: the matching rule
// -----------------------
// Entries belong to phases; each phase has a cursor, which an iteration's begin sets to the phase's
// first entry. A request of (size, stream) in a phase gets
// 1. the entry at the cursor, if it agrees; the cursor moves on;
// 2. else one of the previous two, if it agrees: an extra request took that one's place. It gets
//    those bytes if they are free, else it goes native. The cursor stays;
// 3. else the next one ahead that agrees, within the phase: the ones between are missing today. The
//    cursor moves behind it;
// 4. else nothing.
// Nothing here is needed for safety, which is Arena's; it only decides how much is hit on a day that
// differs from the recorded one.
//
// A phase may be entered several times in an iteration. Entries that name the visit are a phase of
// their own in all this; those of any visit go on where the phase was left.
#pragma once
#include <cstddef>
#include <cstdint>
#include <map>
#include <unordered_map>
#include <utility>
#include <vector>

#include "types.h"

namespace memo {

class Plan {
 public:
  static constexpr int64_t kNone = -1;
  static constexpr uint32_t kBack = 2;

  // Entries below the filter are left out, as requests below it never come here. Returns the index
  // of the first entry that is not right, or kNone: offsets must be aligned, end within the arena,
  // and belong to the arena's own stream (bytes are reused in that stream's order).
  int64_t load(const PlanEntry* entries, size_t count, uint64_t filter, uint64_t alignment,
               uint64_t arena_size) {
    clear();
    for (size_t i = 0; i < count; i++) {
      const PlanEntry& entry = entries[i];
      if (entry.offset == kNative) continue;
      if (entry.stream != kArenaStream || entry.offset % alignment || entry.size > arena_size ||
          round_up(entry.size, alignment) > arena_size ||
          entry.offset > arena_size - round_up(entry.size, alignment))
        return static_cast<int64_t>(i);
    }
    std::map<std::pair<int32_t, int32_t>, std::vector<PlanEntry>> parts;
    for (size_t i = 0; i < count; i++)
      if (entries[i].size >= filter && entries[i].size > 0)
        parts[{entries[i].phase, entries[i].visit}].push_back(entries[i]);
    for (const auto& part : parts) {
      const auto begin = static_cast<uint32_t>(entries_.size());
      entries_.insert(entries_.end(), part.second.begin(), part.second.end());
      const auto end = static_cast<uint32_t>(entries_.size());
      phases_[part.first.first].parts[part.first.second] = Part{begin, end, begin};
    }
    return kNone;
  }

  void clear() {
    entries_.clear();
    phases_.clear();
    now_ = nullptr;
  }

  size_t size() const { return entries_.size(); }
  const PlanEntry& operator[](int64_t i) const { return entries_[static_cast<size_t>(i)]; }

  void begin_iteration() {
    iteration_++;
    now_ = nullptr;
  }

  void enter(int32_t number) {
    now_ = nullptr;
    auto found = phases_.find(number);
    if (found == phases_.end()) return;
    Phase& phase = found->second;
    if (phase.iteration != iteration_) {
      phase.iteration = iteration_;
      phase.visits = 0;
      for (auto& part : phase.parts) part.second.cursor = part.second.begin;
    }
    auto part = phase.parts.find(phase.visits++);
    if (part == phase.parts.end()) part = phase.parts.find(kAnyVisit);
    if (part != phase.parts.end()) now_ = &part->second;
  }

  void leave() { now_ = nullptr; }

  // Index of the entry the request belongs to, or kNone; moves the cursor.
  int64_t match(uint64_t size, uint64_t stream) {
    if (!now_) return kNone;
    uint32_t& cursor = now_->cursor;
    auto agrees = [&](uint32_t i) { return entries_[i].size == size && entries_[i].stream == stream; };
    if (cursor < now_->end && agrees(cursor)) return cursor++;
    for (uint32_t k = 1; k <= kBack && cursor - now_->begin >= k; k++)
      if (agrees(cursor - k)) return cursor - k;
    for (uint32_t i = cursor + 1; i < now_->end; i++) {
      if (!agrees(i)) continue;
      cursor = i + 1;
      return i;
    }
    return kNone;
  }

 private:
  struct Part {
    uint32_t begin, end, cursor;  // into entries_
  };
  struct Phase {
    std::unordered_map<int32_t, Part> parts;  // by visit
    uint64_t iteration = 0;                   // of which the visits are, and the cursors
    int32_t visits = 0;
  };
  std::vector<PlanEntry> entries_;  // grouped by part
  std::unordered_map<int32_t, Phase> phases_;
  Part* now_ = nullptr;
  uint64_t iteration_ = 1;
};

}  // namespace memo
