// One plan-following allocator: ties arena, plan, recorder, ledger and statistics together.
//
// NOTE: how a front-end uses it
// -----------------------------
// For every request:   route(n) says kNative, kRecord or kReplay.
//   kReplay            allocate(n, stream): an arena address, or nullptr: go to the native allocator.
//   kRecord            go to the native allocator, then native_malloc(p, n, stream, kRecord, claimed).
//   kNative            go to the native allocator; native_malloc too if the front-end has a budget.
// For every free:      owns(p) ? give_back(p) : (native_free(p), then the native free).
// With a budget:       ledger().claim(n) before the native allocation; false: raise out_of_memory(n).
//
// NOTE: what is planned
// ---------------------
// Only requests inside an iteration, after its first marker, by a thread that ever pushed a marker,
// at or above the size filter. The same rule decides what is recorded, so planner and runtime see
// the same requests. A marker outside an iteration (evaluation runs the same layers) plans nothing.
// A forked child plans nothing and can't be made to; it may free what it inherited.
//
// Locks: route, owns and mode take none; a shard of the ledger or the core's lock is taken, never
// one inside the other, but around fork, where the core's comes first.
#pragma once
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>

#include "arena.h"
#include "holders.h"
#include "ledger.h"
#include "plan.h"
#include "recorder.h"
#include "statistics.h"
#include "types.h"

namespace memo {

enum class Route { kNative, kRecord, kReplay };

class Core {
  using Guard = std::lock_guard<std::mutex>;

 public:
  // ---- questions without a lock

  Mode mode() const { return mode_.load(std::memory_order_relaxed); }

  bool owns(const void* pointer) const {
    const auto address = reinterpret_cast<uintptr_t>(pointer);
    return address >= low_.load(std::memory_order_relaxed) &&
           address < high_.load(std::memory_order_relaxed);
  }

  Route route(uint64_t size) {
    const Mode mode = this->mode();
    const bool small = size < filter_.load(std::memory_order_relaxed) || size == 0;
    if (mode == kOff) return native(size, small);
    if (phase_.load(std::memory_order_relaxed) == kNoPhase)
      return skip(mode, statistics_.outside, size, small);
    if (small) return skip(mode, statistics_.miss_small, size, small);
    if (!this_thread_is_planned()) return skip(mode, statistics_.miss_thread, size, small);
    if (mode == kReplay) return Route::kReplay;
    native(size, small);
    return Route::kRecord;
  }

  // ---- configuration

  // Alignment of offsets and lengths, and the size below which nothing is planned or recorded.
  // Drops the plan. False unless the mode is off.
  bool configure(uint64_t alignment, uint64_t filter) {
    Guard guard(lock_);
    if (mode() != kOff || alignment == 0 || arena_.blocks()) return false;
    alignment_ = alignment;
    filter_.store(filter, std::memory_order_relaxed);
    plan_.clear();
    return true;
  }
  uint64_t filter() const { return filter_.load(std::memory_order_relaxed); }
  uint64_t alignment() const { return alignment_; }

  void set_streams(Streams* streams) {
    Guard guard(lock_);
    arena_.set_streams(streams);
  }

  // False in a forked child, unless the mode is off. Recording starts a new recording.
  bool set_mode(Mode mode) {
    Guard guard(lock_);
    if (mode != kOff && is_child_) return false;
    if (mode == kRecord) recorder_.start();
    mode_.store(mode, std::memory_order_relaxed);
    return true;
  }

  // The range planned blocks come from, or none (nullptr, 0); drops the plan. False while blocks
  // live in the present one.
  bool set_arena(void* base, uint64_t size) {
    Guard guard(lock_);
    if (!arena_.reset(base, size)) return false;
    plan_.clear();
    low_.store(arena_.base(), std::memory_order_relaxed);
    high_.store(arena_.base() + size, std::memory_order_relaxed);
    return true;
  }

  // Plan::kNone, or the index of the first entry that is not right (then there is no plan).
  int64_t load_plan(const PlanEntry* entries, size_t count) {
    Guard guard(lock_);
    return plan_.load(entries, count, filter(), alignment_, arena_.size());
  }

  void name_phase(int32_t phase, const char* name) {
    Guard guard(lock_);
    names_[phase] = name;
  }

  // ---- boundaries

  // Also ends an iteration that was broken off.
  void begin_iteration() {
    Guard guard(lock_);
    in_iteration_ = true;
    patience_left_ = iteration_patience_;
    phase_.store(kNoPhase, std::memory_order_relaxed);
    plan_.begin_iteration();
    if (mode() == kRecord) recorder_.mark(kIterationBegin, kNoPhase, thread_number());
  }

  void enter(int32_t phase) {
    this_thread_is_planned() = true;
    Guard guard(lock_);
    if (!in_iteration_ || phase == phase_.load(std::memory_order_relaxed)) return;
    phase_.store(phase, std::memory_order_relaxed);
    plan_.enter(phase);
    if (mode() == kRecord) recorder_.mark(kPhase, phase, thread_number());
  }

  void end_iteration() {
    Guard guard(lock_);
    in_iteration_ = false;
    phase_.store(kNoPhase, std::memory_order_relaxed);
    plan_.leave();
    if (mode() == kRecord) recorder_.mark(kIterationEnd, kNoPhase, thread_number());
  }

  // ---- planned blocks

  void* allocate(uint64_t size, uint64_t stream) {
    std::unique_lock<std::mutex> guard(lock_);
    Stats& stats = statistics_.counted;
    stats.requests++;
    const int64_t match = plan_.match(size, stream);
    if (match == Plan::kNone) return missed(stats.miss_unknown, size);
    const uint64_t offset = plan_[match].offset;
    if (offset == kNative) {
      stats.native_entries++;
      native(size, false);
      return nullptr;
    }
    const uint64_t length = round_up(size, alignment_);
    if (!arena_.is_free(offset, length) && wait_for_late_free(guard, offset, length))
      stats.late_frees++;
    const int32_t phase = phase_.load(std::memory_order_relaxed);
    if (!arena_.is_free(offset, length) || !arena_.take(offset, length, phase, stats.stream_waits))
      return missed(stats.miss_occupied, size);
    stats.hits++;
    stats.hit_bytes += size;
    if (arena_.live_bytes() > stats.arena_peak) stats.arena_peak = arena_.live_bytes();
    return arena_.at(offset);
  }

  // How long a request may wait for bytes that another thread is about to free, and how long
  // those of an iteration together may wait in vain. 0: not at all, for devices whose frees are ordered.
  void set_patience(std::chrono::microseconds request, std::chrono::microseconds iteration) {
    Guard guard(lock_);
    patience_ = request;
    iteration_patience_ = iteration;
  }

  // False when no block starts there (counted; nothing else happens).
  bool give_back(void* pointer) {
    Guard guard(lock_);
    if (arena_.give_back(pointer)) return true;
    statistics_.counted.unknown_frees++;
    return false;
  }

  // record_stream of a planned block. False when no block starts there.
  bool used_by(const void* pointer, uint64_t stream) {
    Guard guard(lock_);
    return arena_.used_by(pointer, stream);
  }

  // The live planned block around an address, as offset and length; false if there is none.
  bool block_around(const void* pointer, uint64_t& offset, uint64_t& length) {
    Guard guard(lock_);
    return arena_.block_around(pointer, offset, length);
  }

  // ---- native blocks

  // `claimed`: its bytes were claimed in the ledger; they are given back there with the block.
  void native_malloc(const void* pointer, uint64_t size, uint64_t stream, Route route,
                     bool claimed) {
    if (!pointer) return;
    Ledger::Entry entry;
    entry.size = size;
    entry.claimed = claimed;
    entry.phase = phase_.load(std::memory_order_relaxed);
    if (route == Route::kRecord) {
      Guard guard(lock_);
      if (mode() == kRecord) {  // it may have been stopped since
        entry.session = recorder_.session();
        entry.id = recorder_.malloc(entry.phase, size, stream, thread_number());
      }
    }
    ledger_.add(pointer, entry);
  }

  // Before the native free: afterwards the address may be another block's.
  void native_free(const void* pointer) {
    const Ledger::Entry entry = ledger_.remove(pointer);
    if (!entry.session || mode() != kRecord) return;
    Guard guard(lock_);
    if (mode() == kRecord && entry.session == recorder_.session())
      recorder_.free(phase_.load(std::memory_order_relaxed), entry.id, thread_number());
  }

  Ledger& ledger() { return ledger_; }

  // What an out-of-memory error says. `reserved`: bytes of the arena that count in the ledger.
  std::string out_of_memory(uint64_t size, uint64_t reserved) {
    Holders holders;
    ledger_.for_each([&](uint64_t bytes, int32_t phase) { holders.add(bytes, phase); });
    const uint64_t used = ledger_.used(), budget = ledger_.budget();
    Guard guard(lock_);
    arena_.for_each_block([&](uint64_t bytes, int32_t phase) { holders.add(bytes, phase); });
    std::string text = "Device out of memory. Tried to allocate " + readable(size) +
                       ". The device budget is " + readable(budget) + ", of which " +
                       readable(used) + " are in use and " +
                       readable(used < budget ? budget - used : 0) + " are free";
    if (reserved)
      text += "; the arena has " + readable(reserved) + " of that, " +
              readable(arena_.live_bytes()) + " of it live";
    const std::string top = holders.text([this](int32_t phase) { return name_of(phase); });
    return text + (top.empty() ? "." : ". Top holders: " + top + ".");
  }

  // ---- what was seen

  size_t event_count() {
    Guard guard(lock_);
    return recorder_.size();
  }
  size_t copy_events(Event* out, size_t room) {
    Guard guard(lock_);
    return recorder_.copy(out, room);
  }
  void clear_events() {
    Guard guard(lock_);
    recorder_.clear();
  }
  Stats stats() {
    Guard guard(lock_);
    Stats stats = statistics_.read(arena_.size(), arena_.live_bytes(), arena_.blocks());
    stats.device_used = ledger_.used();
    stats.device_peak = ledger_.peak();
    return stats;
  }
  void reset_stats() {
    Guard guard(lock_);
    statistics_.reset(arena_.live_bytes());
    ledger_.reset_peak();
  }

  // ---- fork

  void before_fork() {
    lock_.lock();
    ledger_.lock_all();
  }
  void after_fork_in_parent() {
    ledger_.unlock_all();
    lock_.unlock();
  }
  void after_fork_in_child() {
    is_child_ = true;
    mode_.store(kOff, std::memory_order_relaxed);
    ledger_.set_budget(Ledger::kUnlimited);
    ledger_.unlock_all();
    lock_.unlock();
  }

 private:
  static bool& this_thread_is_planned() {
    static thread_local bool planned = false;
    return planned;
  }
  static int64_t thread_number() {
    static std::atomic<int64_t> next{0};
    static thread_local const int64_t number = next++;
    return number;
  }

  Route native(uint64_t size, bool small) {
    if (!small) {
      Statistics::add(statistics_.native_mallocs);
      Statistics::add(statistics_.native_bytes, size);
    }
    return Route::kNative;
  }
  Route skip(Mode mode, std::atomic<uint64_t>& reason, uint64_t size, bool small) {
    if (mode == kReplay) Statistics::add(reason);
    return native(size, small);
  }
  // NOTE: a collective's worker thread drops its reference to a tensor a moment after the training
  // thread has waited for the collective, so a planned free can come late. The bytes are not given
  // out before it has come; waiting for it only saves a trip to the native allocator. Bounded, since
  // the free may not come at all (a tensor that is held), or may need what this thread holds.
  bool wait_for_late_free(std::unique_lock<std::mutex>& guard, uint64_t offset, uint64_t length) {
    using Clock = std::chrono::steady_clock;
    const auto start = Clock::now();
    const auto limit = std::min(patience_, patience_left_);
    bool free = false;
    while (!free && Clock::now() - start < limit) {
      guard.unlock();
      std::this_thread::sleep_for(std::chrono::microseconds(20));
      guard.lock();
      free = arena_.is_free(offset, length);
    }
    if (!free) patience_left_ -= std::min(patience_left_, limit);  // it is held, not late
    return free;
  }
  void* missed(uint64_t& reason, uint64_t size) {
    reason++;
    statistics_.counted.miss_bytes += size;
    native(size, false);
    return nullptr;
  }
  std::string name_of(int32_t phase) const {
    if (phase == kNoPhase) return "outside an iteration";
    auto found = names_.find(phase);
    return found == names_.end() ? "phase " + std::to_string(phase) : found->second;
  }

  std::mutex lock_;
  std::atomic<Mode> mode_{kOff};
  std::atomic<int32_t> phase_{kNoPhase};
  std::atomic<uint64_t> filter_{1};
  std::atomic<uintptr_t> low_{0}, high_{0};
  uint64_t alignment_ = 64;
  bool in_iteration_ = false, is_child_ = false;
  std::chrono::microseconds patience_{0}, iteration_patience_{0}, patience_left_{0};
  Arena arena_;
  Plan plan_;
  Recorder recorder_;
  Statistics statistics_;
  Ledger ledger_;
  std::unordered_map<int32_t, std::string> names_;
};

}  // namespace memo
