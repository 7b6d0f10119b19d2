// The shadow of the arena: what is in use, and what a side stream may still read.
#pragma once
#include <cstdint>
#include <map>
#include <set>

#include "arena.h"

namespace fuzz {

struct Judge final : memo::Streams {
  struct Interval { uint64_t end; std::set<uint64_t> events; };
  std::map<uint64_t, Interval> live, pending;  // by start; pending: given back, a side stream reads
  std::set<uint64_t> waited, of_this_free;
  uint64_t next_event = 1, overlaps = 0, unwaited = 0, damaged = 0;

  void* record(uint64_t) override {
    of_this_free.insert(next_event);
    return reinterpret_cast<void*>(next_event++);
  }
  bool arena_waits(void* event) override {
    waited.insert(reinterpret_cast<uint64_t>(event));
    return true;
  }
  void release(void*) override {}

  static bool meets(uint64_t start, uint64_t end, uint64_t other_start, uint64_t other_end) {
    return start < other_end && other_start < end;
  }

  void handed_out(uint64_t start, uint64_t size) {
    const uint64_t end = start + size;
    auto near = live.lower_bound(start);
    if (near != live.begin()) --near;
    for (; near != live.end() && near->first < end; ++near)
      if (meets(start, end, near->first, near->second.end)) overlaps++;
    for (auto it = pending.begin(); it != pending.end();) {
      if (!meets(start, end, it->first, it->second.end)) {
        ++it;
        continue;
      }
      for (uint64_t event : it->second.events) unwaited += !waited.count(event);
      it = pending.erase(it);
    }
    if (pending.empty()) waited.clear();
    live[start] = {end, {}};
  }
  void before_free() { of_this_free.clear(); }
  void given_back(uint64_t start) {
    auto found = live.find(start);
    if (found == live.end()) return;  // only after an overlap
    if (!of_this_free.empty()) pending[start] = {found->second.end, of_this_free};
    live.erase(found);
  }
};

}  // namespace fuzz
