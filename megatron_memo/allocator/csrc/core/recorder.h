// The events of a recording, in order.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "types.h"

namespace memo {

class Recorder {
 public:
  // A number for the recording: blocks of an earlier one, whose frees may still come, are not ours.
  uint32_t start() {
    clear();
    next_ = 0;
    return ++session_;
  }
  void clear() { std::vector<Event>().swap(events_); }
  uint32_t session() const { return session_; }

  int64_t malloc(int32_t phase, uint64_t size, uint64_t stream, int64_t thread) {
    events_.push_back({kMalloc, phase, next_, size, stream, thread});
    return next_++;
  }
  void free(int32_t phase, int64_t id, int64_t thread) {
    events_.push_back({kFree, phase, id, 0, 0, thread});
  }
  void mark(EventKind kind, int32_t phase, int64_t thread) {
    events_.push_back({kind, phase, 0, 0, 0, thread});
  }

  size_t size() const { return events_.size(); }
  size_t copy(Event* out, size_t room) const {
    const size_t n = room < events_.size() ? room : events_.size();
    if (n) std::memcpy(out, events_.data(), n * sizeof(Event));
    return n;
  }

 private:
  std::vector<Event> events_;
  int64_t next_ = 0;
  uint32_t session_ = 0;
};

}  // namespace memo
