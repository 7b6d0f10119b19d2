// A pretended GPU: host memory, and streams whose work is done by whoever calls.
//
// NOTE: how time passes
// ---------------------
// There are no threads and no clock. Work queued on a stream is done at once, in order, unless
// - it waits for an event that is not reached yet, or
// - its stream is held (stub_hold): a GPU that is arbitrarily late. Held work is done when the host
//   waits for it (synchronize, a blocking copy, cudaFree) or when the stream is let go.
// So a wait that is missing between two streams is seen every time, not once in a thousand runs.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace stub {

struct Stream;

// A place in a stream's order, reached when everything before it is done.
struct Point {
  Stream* stream;
  bool reached = false;
};

struct Work {
  std::function<void()> run;          // nothing: only the rest
  std::shared_ptr<Point> after;       // must be reached first; may be null
  std::shared_ptr<Point> reaches;     // may be null
};

// What a capture recorded; doing it again is a launch.
struct Graph {
  unsigned long long id;
  std::vector<std::function<void()>> work;
};

struct Stream {
  std::deque<Work> queue;
  bool held = false;
  Graph* capture = nullptr;
  bool capture_broken = false;
};

struct Event {
  std::shared_ptr<Point> last;  // null: never recorded, which counts as reached
  Graph* capture = nullptr;     // recorded inside one
};

// Byte ranges by start.
class Ranges {
 public:
  void add(const void* start, size_t bytes) { ranges_[address(start)] = bytes; }
  // Bytes of the range that starts there, which is taken out; 0 if none does.
  size_t remove(const void* start) {
    auto found = ranges_.find(address(start));
    if (found == ranges_.end()) return 0;
    const size_t bytes = found->second;
    ranges_.erase(found);
    return bytes;
  }
  bool hold(const void* pointer) const { return base(pointer) != nullptr; }
  // Start of the range around the address, or null.
  void* base(const void* pointer, size_t* bytes = nullptr) const {
    auto after = ranges_.upper_bound(address(pointer));
    if (after == ranges_.begin()) return nullptr;
    auto range = std::prev(after);
    if (address(pointer) >= range->first + range->second) return nullptr;
    if (bytes) *bytes = range->second;
    return reinterpret_cast<void*>(range->first);
  }

 private:
  static uintptr_t address(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer); }
  std::map<uintptr_t, size_t> ranges_;
};

enum Counter {
  kMallocs, kFrees, kLaunches, kStreamWaits, kEventRecords, kPageableCopies, kCopies, kUsedBytes,
  kCounters
};

struct Device {
  static constexpr size_t kTotalBytes = 8ull << 30;
  static constexpr size_t kLockableBytes = 1ull << 30;  // in one piece of host memory

  std::recursive_mutex lock;
  Ranges memory;  // device memory; address space reserved for it, too
  Ranges pinned;  // host memory
  std::vector<std::unique_ptr<Stream>> streams;
  Stream default_stream;
  size_t used_bytes = 0;
  long counters[kCounters] = {};

  template <class Visit>
  void for_each_stream(Visit visit) {
    visit(default_stream);
    for (auto& stream : streams) visit(*stream);
  }

  void submit(Stream& stream, Work work) {
    if (stream.capture) {
      if (work.run) stream.capture->work.push_back(std::move(work.run));
      return;
    }
    stream.queue.push_back(std::move(work));
    do_what_can_be_done();
  }

  void do_what_can_be_done() {
    for (bool again = true; again;) {
      again = false;
      for_each_stream([&](Stream& stream) {
        while (!stream.held && !stream.queue.empty() && is_reached(stream.queue.front().after)) {
          do_first(stream);
          again = true;
        }
      });
    }
  }

  // The host waits.
  void finish(Point& point) {
    while (!point.reached) do_next(*point.stream);
    do_what_can_be_done();
  }
  void finish(Stream& stream) {
    while (!stream.queue.empty()) do_next(stream);
    do_what_can_be_done();
  }
  void finish_all() {
    for_each_stream([&](Stream& stream) { finish(stream); });
  }

  static bool is_reached(const std::shared_ptr<Point>& point) { return !point || point->reached; }

 private:
  void do_next(Stream& stream) {
    const std::shared_ptr<Point> after = stream.queue.front().after;
    if (!is_reached(after)) finish_before(*after);
    do_first(stream);
  }
  void finish_before(Point& point) {
    while (!point.reached) do_next(*point.stream);
  }
  static void do_first(Stream& stream) {
    Work work = std::move(stream.queue.front());
    stream.queue.pop_front();
    if (work.run) work.run();
    if (work.reaches) work.reaches->reached = true;
  }
};

// Never deleted: torch's destructors run after ours would.
inline Device& device() {
  static auto* const the_device = new Device();
  return *the_device;
}

}  // namespace stub
