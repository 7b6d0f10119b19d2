// The C ABI that every front-end exports. Included once, after the front-end has defined
// `static memo::Core& core()`. It adds memo_torch_version, memo_install, memo_reserve_arena and
// memo_error, as csrc/cpu/allocator.cpp does.
#pragma once
#include "core.h"

#define MEMO_API extern "C" __attribute__((visibility("default")))

// Bytes of Event, PlanEntry and Stats: whoever declares them elsewhere compares.
MEMO_API uint64_t memo_struct_bytes(int which) {
  const uint64_t bytes[] = {sizeof(memo::Event), sizeof(memo::PlanEntry), sizeof(memo::Stats)};
  return bytes[which];
}
MEMO_API int memo_configure(uint64_t alignment, uint64_t filter) {
  return core().configure(alignment, filter);
}
MEMO_API uint64_t memo_filter() { return core().filter(); }
MEMO_API uint64_t memo_alignment() { return core().alignment(); }
MEMO_API int memo_mode() { return core().mode(); }
MEMO_API int memo_set_mode(int mode) { return core().set_mode(static_cast<memo::Mode>(mode)); }
MEMO_API int64_t memo_load_plan(const memo::PlanEntry* entries, size_t count) {
  return core().load_plan(entries, count);
}
MEMO_API void memo_name_phase(int32_t phase, const char* name) { core().name_phase(phase, name); }
MEMO_API void memo_begin_iteration() { core().begin_iteration(); }
MEMO_API void memo_end_iteration() { core().end_iteration(); }
MEMO_API void memo_enter(int32_t phase) { core().enter(phase); }
MEMO_API size_t memo_event_count() { return core().event_count(); }
MEMO_API size_t memo_copy_events(memo::Event* out, size_t room) {
  return core().copy_events(out, room);
}
MEMO_API void memo_clear_events() { core().clear_events(); }
MEMO_API void memo_stats(memo::Stats* out) { *out = core().stats(); }
MEMO_API void memo_reset_stats() { core().reset_stats(); }
MEMO_API void memo_set_budget(uint64_t bytes) { core().ledger().set_budget(bytes); }
