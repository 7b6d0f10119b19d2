// Several threads at once, with forks and changes of mode in between.
#pragma once
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <thread>
#include <vector>

#include "child.h"
#include "core.h"
#include "report.h"
#include "training.h"

namespace fuzz {

// At least so many turns, however fast the threads ask: every second one forks.
constexpr uint64_t kTurns = 120;

// Exit status: 0 if nothing was wrong.
inline int threads(uint64_t requests, uint64_t seed) {
  Random random(seed);
  const uint64_t grains = 4096;
  std::vector<memo::PlanEntry> plan;
  const uint64_t sizes[] = {64, 256, 1000, 4096};
  for (int i = 0; i < 4000; i++) {
    const uint64_t size = sizes[below(random, 4)], length = memo::round_up(size, kGrain);
    // Offsets at random: most entries meet bytes that somebody has.
    plan.push_back({static_cast<int32_t>(below(random, 4)), 0, size, 0,
                    below(random, grains - length / kGrain + 1) * kGrain});
  }
  const auto arena = std::make_unique<char[]>((grains + 1) * kGrain);
  char* base = arena.get() + (kGrain - reinterpret_cast<uintptr_t>(arena.get()) % kGrain);
  std::vector<std::atomic<uint8_t>> taken(grains);  // the shadow: one owner a grain
  Core core;
  core.set_arena(base, grains * kGrain);
  if (core.load_plan(plan.data(), plan.size()) != memo::Plan::kNone) return 2;
  core.set_mode(memo::kReplay);
  std::atomic<uint64_t> overlaps{0}, damaged{0}, asked{0}, hits{0};
  std::atomic<bool> stop{false};
  auto work = [&](uint64_t my_seed) {
    Random mine(my_seed);
    struct Block { char* data; uint64_t size; char mark; };
    std::vector<Block> blocks;
    auto free = [&](size_t i) {
      const Block block = blocks[i];
      blocks[i] = blocks.back();
      blocks.pop_back();
      if (block.data[0] != block.mark || block.data[block.size - 1] != block.mark) damaged++;
      if (!core.owns(block.data)) {
        core.native_free(block.data);
        std::free(block.data);
        return;
      }
      const uint64_t first = static_cast<uint64_t>(block.data - base) / kGrain;
      for (uint64_t g = first; g < first + memo::round_up(block.size, kGrain) / kGrain; g++)
        taken[g] = 0;
      core.give_back(block.data);
    };
    core.enter(0);
    while (!stop) {
      const uint64_t size = sizes[below(mine, 4)];
      const memo::Route route = core.route(size);
      char* data = nullptr;
      if (route == memo::Route::kReplay) data = static_cast<char*>(core.allocate(size, 0));
      if (data) {
        hits++;
        const uint64_t first = static_cast<uint64_t>(data - base) / kGrain;
        for (uint64_t g = first; g < first + memo::round_up(size, kGrain) / kGrain; g++)
          overlaps += taken[g].exchange(1);
      } else {
        data = static_cast<char*>(std::malloc(size));
        core.ledger().claim(size);
        core.native_malloc(data, size, 0, route, true);
      }
      const char mark = static_cast<char>(mine());
      data[0] = data[size - 1] = mark;
      blocks.push_back({data, size, mark});
      if (blocks.size() > 20 || below(mine, 2)) free(below(mine, blocks.size()));
      if (below(mine, 50) == 0) core.enter(static_cast<int32_t>(below(mine, 4)));
      asked++;
    }
    while (!blocks.empty()) free(0);
  };
  std::vector<std::thread> workers;
  for (int i = 0; i < 3; i++) workers.emplace_back(work, random());
  uint64_t children = 0, bad_children = 0, recorded = 0;
  for (uint64_t turn = 0; asked < requests || turn < kTurns; turn++) {
    core.begin_iteration();
    std::this_thread::sleep_for(std::chrono::microseconds(300));
    if (turn % 5 == 1) core.end_iteration();
    if (turn % 7 == 1) core.set_mode(memo::kRecord);
    if (turn % 7 == 2) {
      recorded += core.event_count();
      core.set_mode(memo::kOff);
    }
    if (turn % 7 == 3) core.set_mode(memo::kReplay);
    core.stats();
    core.out_of_memory(1, 1);
#ifndef __SANITIZE_THREAD__  // it has no fork of a process with threads
    if (turn % 2 == 1) {
      bad_children += !fork_is_right(core, nullptr);
      children++;
    }
#endif
  }
  stop = true;
  for (auto& worker : workers) worker.join();
  const memo::Stats stats = core.stats();
  print("requests", asked);
  print("hits", hits);
  print("recorded events", recorded);
  print("children", children);
  print("bad children", bad_children);
  print("overlaps", overlaps);
  print("damaged blocks", damaged);
  const uint64_t left = stats.arena_blocks + core.ledger().used() + stats.unknown_frees;
  print("left over", left);
  return overlaps || damaged || bad_children || left || !hits || !recorded;
}

}  // namespace fuzz
