// A made-up training iteration and its plan.
#pragma once
#include <algorithm>
#include <iterator>
#include <map>
#include <random>
#include <vector>

#include "types.h"

namespace fuzz {

constexpr uint64_t kGrain = 64;
using Random = std::mt19937_64;

inline uint64_t below(Random& random, uint64_t n) { return random() % n; }

struct Op {
  enum Kind { kMalloc, kFree, kEnter, kUse, kFork, kOffAndOn } kind;
  int64_t id = 0;      // of the block
  uint64_t size = 0;
  int32_t phase = 0;
  uint64_t stream = 0;
  int thread = 0;      // 1: another that pushed a marker, 2: another that did not
};
using Ops = std::vector<Op>;

struct Training {
  Ops ops;
  std::vector<memo::PlanEntry> plan;
  uint64_t arena = 0;
  uint64_t wanted = 0;  // requests a clean iteration must hit
};

// Layers with activations that live to their backward, transients, and a few blocks that stay.
inline Ops made_up_ops(Random& random) {
  const uint64_t sizes[] = {100, 256, 256, 512, 1000, 1024, 4096};
  Ops ops;
  int64_t next = 0;
  const int layers = 3;
  std::vector<std::vector<int64_t>> kept(layers);
  auto malloc = [&] {
    ops.push_back({Op::kMalloc, next, sizes[below(random, std::size(sizes))]});
    return next++;
  };
  auto enter = [&](int32_t phase) { ops.push_back({Op::kEnter, 0, 0, phase}); };
  auto free = [&](int64_t id) { ops.push_back({Op::kFree, id}); };
  for (int layer = 0; layer < layers; layer++) {
    enter(layer);
    const int64_t transient = malloc();
    kept[layer].push_back(malloc());
    if (below(random, 2)) kept[layer].push_back(malloc());
    free(transient);
  }
  for (int layer = layers - 1; layer >= 0; layer--) {
    enter(layers + layer);
    const int64_t first = malloc(), second = malloc();
    free(first);
    for (int64_t id : kept[layer]) free(id);
    free(second);
  }
  enter(2 * layers);
  malloc();  // outlives the window: a native entry
  const int64_t last = malloc();
  free(last);
  return ops;
}

inline Training made_up_training(Random& random) {
  Training training;
  const int32_t visit = below(random, 2) ? memo::kAnyVisit : 0;
  training.ops = made_up_ops(random);
  std::map<int64_t, size_t> ends;
  for (size_t time = 0; time < training.ops.size(); time++)
    if (training.ops[time].kind == Op::kFree) ends[training.ops[time].id] = time;
  struct Placed { uint64_t offset, length; size_t end; };
  std::vector<Placed> placed;
  int32_t phase = 0;
  for (size_t time = 0; time < training.ops.size(); time++) {
    const Op& op = training.ops[time];
    if (op.kind == Op::kEnter) phase = op.phase;
    if (op.kind != Op::kMalloc) continue;
    if (!ends.count(op.id)) {
      training.plan.push_back({phase, visit, op.size, 0, memo::kNative});
      continue;
    }
    const uint64_t length = memo::round_up(op.size, kGrain);
    std::vector<Placed> alive;
    for (const Placed& other : placed)
      if (other.end > time) alive.push_back(other);
    std::sort(alive.begin(), alive.end(),
              [](const Placed& a, const Placed& b) { return a.offset < b.offset; });
    uint64_t offset = 0;
    for (const Placed& other : alive)
      if (other.offset < offset + length && offset < other.offset + other.length)
        offset = other.offset + other.length;
    placed.push_back({offset, length, ends[op.id]});
    training.plan.push_back({phase, visit, op.size, 0, offset});
    training.arena = std::max(training.arena, offset + length);
    training.wanted++;
  }
  return training;
}

}  // namespace fuzz
