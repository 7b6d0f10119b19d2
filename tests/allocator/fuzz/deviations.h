// What may be different on a day that is not the recorded one.
#pragma once
#include <algorithm>
#include <cstdint>
#include <iterator>

#include "training.h"

namespace fuzz {

const char* const kKinds[] = {
    "extra", "missing", "resized", "reordered", "other stream", "other thread", "side stream",
    "late free", "held", "repeated phase", "off and on", "evaluation", "broken off", "fork"};
constexpr size_t kKindCount = std::size(kKinds);

class Deviator {
 public:
  explicit Deviator(Random& random) : random_(random) {}

  uint64_t counts[kKindCount] = {};
  bool evaluates = false;
  size_t until = ~size_t{0};

  Ops deviate(Ops ops, uint64_t how_many) {
    evaluates = false;
    until = ~size_t{0};
    for (uint64_t i = 0; i < how_many; i++) {
      // Forks cost a thousand times what the others do.
      const size_t kind = below(random_, 4000) == 0 ? 13 : below(random_, 13);
      apply(kind, ops);
      counts[kind]++;
    }
    return ops;
  }

 private:
  size_t pick(const Ops& ops, Op::Kind kind) {
    for (;;) {
      const size_t i = below(random_, ops.size());
      if (ops[i].kind == kind) return i;
    }
  }
  static bool has(const Ops& ops, Op::Kind kind) {
    return std::any_of(ops.begin(), ops.end(), [&](const Op& op) { return op.kind == kind; });
  }
  static void insert(Ops& ops, size_t at, const Op& op) {
    ops.insert(ops.begin() + static_cast<std::ptrdiff_t>(std::min(at, ops.size())), op);
  }
  static void erase_frees(Ops& ops, int64_t id) {
    ops.erase(std::remove_if(ops.begin(), ops.end(),
                             [&](const Op& op) { return op.kind == Op::kFree && op.id == id; }),
              ops.end());
  }

  void apply(size_t kind, Ops& ops) {
    if (!has(ops, Op::kMalloc)) return;
    const size_t at = pick(ops, Op::kMalloc);
    switch (kind) {
      case 0: {
        Op extra = ops[at];
        extra.id = next_id_++;
        if (below(random_, 3) == 0) extra.size += 1 + below(random_, 5000);
        const size_t end = below(random_, 2) ? at + 2 + below(random_, 6) : ops.size();
        insert(ops, end, {Op::kFree, extra.id});
        insert(ops, at + below(random_, 2), extra);
        break;
      }
      case 1: {
        const int64_t id = ops[at].id;
        ops.erase(ops.begin() + static_cast<std::ptrdiff_t>(at));
        erase_frees(ops, id);
        break;
      }
      case 2: ops[at].size = 1 + below(random_, 6000); break;
      case 3:
        if (at + 1 < ops.size() && ops[at + 1].kind == Op::kMalloc) std::swap(ops[at], ops[at + 1]);
        else if (at > 0 && ops[at - 1].kind == Op::kFree) std::swap(ops[at], ops[at - 1]);
        break;
      case 4: ops[at].stream = 3; break;
      case 5: ops[at].thread = 1 + static_cast<int>(below(random_, 2)); break;
      case 6: insert(ops, at + 1, {Op::kUse, ops[at].id}); break;
      case 7: case 8: {
        // Late: at the iteration's end. Held: never; whoever drives frees it in the next one.
        const int64_t id = ops[at].id;
        erase_frees(ops, id);
        if (kind == 7) ops.push_back({Op::kFree, id});
        break;
      }
      case 9: {
        if (!has(ops, Op::kEnter)) return;
        const size_t from = pick(ops, Op::kEnter);
        size_t to = from + 1;
        while (to < ops.size() && ops[to].kind != Op::kEnter) to++;
        const Ops again(ops.begin() + static_cast<std::ptrdiff_t>(from),
                        ops.begin() + static_cast<std::ptrdiff_t>(to));
        if (ops.size() < 400)
          ops.insert(ops.begin() + static_cast<std::ptrdiff_t>(to), again.begin(), again.end());
        break;
      }
      case 10: insert(ops, at, {Op::kOffAndOn}); break;
      case 11: evaluates = true; break;
      case 12: until = below(random_, ops.size()); break;
      default: insert(ops, at, {Op::kFork}); break;
    }
  }

  Random& random_;
  int64_t next_id_ = 1000;
};

}  // namespace fuzz
