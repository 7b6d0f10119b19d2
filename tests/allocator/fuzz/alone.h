// One thread drives; after every deviated iteration a clean one.
#pragma once
#include <memory>

#include "core.h"
#include "deviations.h"
#include "driver.h"
#include "report.h"

namespace fuzz {

// Exit status: 0 if nothing was wrong.
inline int alone(uint64_t deviations, uint64_t seed) {
  Random random(seed);
  uint64_t done = 0, rounds = 0, unrecovered = 0, overlaps = 0, unwaited = 0, damaged = 0;
  uint64_t bad_children = 0, hits = 0, requests = 0, counts[kKindCount] = {};
  while (done < deviations) {
    const Training training = made_up_training(random);
    const auto arena = std::make_unique<char[]>(training.arena + kGrain);
    char* base = arena.get() + (kGrain - reinterpret_cast<uintptr_t>(arena.get()) % kGrain);
    Core core;
    Judge judge;
    core.set_streams(&judge);
    core.set_arena(base, training.arena);
    if (core.load_plan(training.plan.data(), training.plan.size()) != memo::Plan::kNone) return 2;
    core.set_mode(memo::kReplay);
    Driver driver(core, judge);
    Deviator deviator(random);
    for (int round = 0; round < 2000 && done < deviations; round++, rounds++) {
      const uint64_t how_many = 1 + below(random, 12);
      const Ops ops = deviator.deviate(training.ops, how_many);
      done += how_many;
      core.reset_stats();
      core.begin_iteration();
      driver.run(ops, deviator.until);
      hits += core.stats().hits;
      requests += core.stats().requests;
      if (deviator.until < ops.size()) {  // an exception; what lived is dropped, and it is retried
        driver.free_all();
        core.begin_iteration();
        driver.run(training.ops, ~size_t{0});
      }
      if (below(random, 4)) core.end_iteration();
      if (deviator.evaluates) {
        core.end_iteration();
        driver.run(training.ops, ~size_t{0});
      }
      // Blocks that are held may be held into another deviated iteration.
      if (below(random, 3) == 0) {
        core.begin_iteration();
        driver.run(training.ops, ~size_t{0});
      }
      driver.free_all();
      core.reset_stats();
      core.begin_iteration();
      driver.run(training.ops, ~size_t{0});
      core.end_iteration();
      const memo::Stats stats = core.stats();
      unrecovered += stats.hits != training.wanted || stats.miss_unknown || stats.miss_occupied ||
                     stats.unknown_frees;
      driver.free_all();
      unrecovered += core.stats().arena_blocks != 0 || core.ledger().used() != 0;
    }
    overlaps += judge.overlaps;
    unwaited += judge.unwaited;
    damaged += judge.damaged;
    bad_children += driver.bad_children;
    for (size_t kind = 0; kind < kKindCount; kind++) counts[kind] += deviator.counts[kind];
  }
  for (size_t kind = 0; kind < kKindCount; kind++)
    print(kKinds[kind], counts[kind]);
  print("deviations", done);
  print("deviated iterations", rounds);
  print("requests in them", requests);
  print("hits in them", hits);
  print("overlaps", overlaps);
  print("handed out under a side stream", unwaited);
  print("damaged blocks", damaged);
  print("iterations not recovered", unrecovered);
  print("bad children", bad_children);
  return overlaps || unwaited || damaged || unrecovered || bad_children;
}

}  // namespace fuzz
