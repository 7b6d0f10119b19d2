// Canonical-order depth-first search: do buffers with fixed lifetimes fit below a capacity?
//
// The layout looked for
//   Among all layouts that fit, take one whose offsets have the smallest sum. In it no buffer can be
//   moved down, not even by jumping over others. Buffers are placed in order of (offset, rank), each
//   at its rest: the highest top among the placed buffers that share time with it. Whatever
//   contradicts the smallest sum may be cut. `canonical.py` holds the slow reference of this search
//   and the list of techniques with the reason why each is sound.
//
// State of an unplaced buffer j
//   rest[j]   where it would come to lie now
//   low[j]    a proven lower bound of its offset, >= rest[j]; low[j] > rest[j] means that it can't
//             be placed now and waits until another buffer comes to lie under it
// State of a section t (a maximal clique of the interval graph)
//   load[t]   bytes still to be placed
//   base[t]   a proven lower bound of the offset of anything that is still to be placed there
//   The node can be cut when base[t] + load[t] > capacity.
//
// Pins
//   A pinned buffer has a given offset, at which its turn comes. The layout looked for is then the
//   one with the smallest sum of those that keep the pins; no buffer passes over a pin in the order,
//   and one whose rest would touch an unplaced pin waits for it.
//
// The C ABI at the end is used through ctypes; a search can be continued where its budget ended.

#include <pthread.h>
#include <time.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <new>
#include <string>
#include <utility>
#include <vector>

namespace {

using i64 = int64_t;
using u64 = uint64_t;

enum Technique : uint32_t {
  kQuickReject = 1u << 0,   // cut candidates above capacity - load before anything is updated
  kDominance = 1u << 1,     // never leave a hole that an unplaced buffer fits in
  kLift = 1u << 2,          // passed-over buffers lie on top of something that blocks them
  kFloors = 1u << 3,        // sections learn the lowest offset of what is left in them
  kUnique = 1u << 4,        // a section that only one buffer can continue: the others go above it
  kSplit = 1u << 5,         // independent parts of the time axis are solved one by one
  kNoSiblings = 1u << 6,    // a buffer without unplaced neighbours has no alternative
  kFailedStates = 1u << 7,  // states that failed are remembered
  kTwins = 1u << 8,         // interchangeable buffers are placed in index order
  kDynamicOrder = 1u << 9,  // parts are ranked again by their remaining load
};

enum Status : int { kFound = 0, kInfeasible = 1, kAborted = 2 };

double now() {
  timespec ts;
  clock_gettime(CLOCK_MONOTONIC, &ts);
  return double(ts.tv_sec) + 1e-9 * double(ts.tv_nsec);
}

u64 mix(u64 x) {
  x ^= x >> 32;
  x *= 0xd6e8feb86659fd93ull;
  x ^= x >> 29;
  x *= 0x9fb21c651e98df25ull;
  x ^= x >> 32;
  return x;
}

struct Entry {
  int id;
  int rank;
};

struct Change {
  enum Kind : int { kRest, kLow, kBase } kind;
  int index;
  i64 value;
};

// Failed states. Sets of 4 slots, 16 bytes each; the check word makes a false hit as unlikely as a
// collision of 128-bit hashes.
class FailedStates {
 public:
  bool contains(u64 where, u64 check) const {
    if (slots_.empty()) return false;
    const Slot* s = &slots_[(where & mask_) * 4];
    for (int k = 0; k < 4; ++k)
      if (s[k].where == where && s[k].check == check) return true;
    return false;
  }
  void insert(u64 where, u64 check) {
    if (slots_.empty()) resize(kFirst);
    if (count_ > slots_.size() / 2 && slots_.size() < kLast * 4) {
      std::vector<Slot> old;
      old.swap(slots_);
      resize(old.size() / 2);
      count_ = 0;
      for (const Slot& s : old)
        if (s.where | s.check) store(s.where, s.check);
    }
    store(where, check);
  }

 private:
  struct Slot {
    u64 where = 0;
    u64 check = 0;
  };
  static constexpr size_t kFirst = 1u << 12;
  static constexpr size_t kLast = 1u << 20;  // sets: 64 MiB at most
  void resize(size_t sets) {
    slots_.assign(sets * 4, Slot());
    mask_ = sets - 1;
  }
  void store(u64 where, u64 check) {
    Slot* s = &slots_[(where & mask_) * 4];
    int k = 0;
    while (k < 4 && (s[k].where | s[k].check)) ++k;
    if (k == 4)
      k = int(check >> 62);
    else
      ++count_;
    s[k].where = where;
    s[k].check = check;
  }
  std::vector<Slot> slots_;
  u64 mask_ = 0;
  size_t count_ = 0;
};

class Search {
 public:
  Search(int n, const int* lower, const int* upper, const i64* size, const double* life,
         i64 capacity, uint32_t techniques, const char* orders, u64 seed)
      : n_(n), capacity_(capacity), use_(techniques), lower_(lower, lower + n),
        upper_(upper, upper + n), size_(size, size + n), life_(life, life + n) {
    for (const char* p = orders; *p;) {
      const char* q = strchr(p, ',');
      if (!q) q = p + strlen(p);
      orders_.emplace_back(p, size_t(q - p));
      p = *q ? q + 1 : q;
    }
    for (int i = 0; i < n; ++i) sections_ = std::max(sections_, upper[i]);
    load_.assign(sections_, 0);
    base_.assign(sections_, 0);
    cross_.assign(sections_, 0);
    dirty_mark_.assign(sections_, 0);
    member_at_.assign(sections_ + 1, 0);
    for (int i = 0; i < n; ++i)
      for (int t = lower_[i]; t < upper_[i]; ++t) {
        ++member_at_[t + 1];
        load_[t] += size_[i];
        if (t + 1 < upper_[i]) ++cross_[t];
      }
    for (int t = 0; t < sections_; ++t) member_at_[t + 1] += member_at_[t];
    member_.resize(member_at_[sections_]);
    {
      // Short-lived first: most orders place the long-lived early, so a look for what is left in a
      // section ends soon.
      std::vector<int> ids(n);
      for (int i = 0; i < n; ++i) ids[i] = i;
      std::sort(ids.begin(), ids.end(), [&](int x, int y) {
        return life_[x] != life_[y] ? life_[x] < life_[y] : x < y;
      });
      std::vector<i64> fill(member_at_.begin(), member_at_.end() - 1);
      for (int i : ids)
        for (int t = lower_[i]; t < upper_[i]; ++t) member_[fill[t]++] = i;
    }
    support_.resize(sections_);
    for (int t = 0; t < sections_; ++t) support_[t] = member_[member_at_[t]];
    rest_.assign(n, 0);
    low_.assign(n, 0);
    offset_.assign(n, 0);
    solution_.assign(n, -1);
    placed_.assign(n, 0);
    witness_.assign(n, -1);
    twin_.assign(n, -1);
    keys_.resize(n);
    jitter_.assign(n, 1.0);
    u64 state = mix(seed + 0x9e3779b97f4a7c15ull);
    salt_.resize(n);
    for (auto& s : salt_) {
      state += 0x9e3779b97f4a7c15ull;
      s = mix(state);
    }
    build_neighbours();
    if (use_ & kTwins) find_twins();
    seed_ = seed;
  }

  // Gives buffers with pins[i] >= 0 that offset. Before the first run only.
  void pin(const i64* pins) {
    pin_.assign(pins, pins + n_);
    pins_of_.resize(n_);
    std::vector<int> pinned;
    for (int i = 0; i < n_; ++i)
      if (pin_[i] >= 0) pinned.push_back(i);
    std::sort(pinned.begin(), pinned.end(), [&](int x, int y) {
      return pin_[x] != pin_[y] ? pin_[x] < pin_[y] : x < y;
    });
    for (int q : pinned)
      for (int j = 0; j < n_; ++j)
        if (j != q && pin_[j] < 0 && overlap(q, j)) pins_of_[j].push_back(q);
    low_.assign(n_, 0);
    twin_.assign(n_, -1);
    if (use_ & kTwins) find_twins();
    for (int j = 0; j < n_; ++j) low_[j] = pin_[j] >= 0 ? pin_[j] : above_pins(j, low_[j]);
  }

  // Continues with at most `nodes` more units of work (nodes and placements tried) and `seconds` more time.
  int run(i64 nodes, double seconds, const volatile int* stop) {
    stop_ = stop;
    deadline_ = now() + seconds;
    nodes_left_ = nodes;
    out_of_time_ = false;
    for (int i = 0; i < n_; ++i)
      if (size_[i] > capacity_) return kInfeasible;
    for (int t = 0; t < sections_; ++t)
      if (load_[t] > capacity_) return kInfeasible;
    while (true) {
      // Two lines of starts share the work equally. The steady one goes round the orders with
      // budgets that double; the shaken one ranks a little differently each time, with budgets that
      // grow slowly: the work a search takes has a heavy tail, so another start is often worth more
      // than a longer one, and often not. Failed states stay valid throughout.
      const bool shaken = steady_.spent > shaken_.spent;
      Line& line = shaken ? shaken_ : steady_;
      const i64 rounds = line.starts / i64(orders_.size());
      i64 share = i64(n_) * 2 + 64;
      if (shaken) share *= 4;
      for (i64 k = 0; k < rounds && share < kLargestShare; ++k)
        share = shaken ? share * 6 / 5 : share * 2;
      const i64 given = std::min(share, nodes_left_);
      budget_ = given;
      turn_ = int(line.starts % i64(orders_.size()));
      shaken_now_ = shaken;
      shake(shaken ? line.starts + 1 : 0);
      const int status = from_root();
      nodes_left_ -= given - budget_;
      line.spent += given - budget_;
      if (status != kAborted) return status;
      // A start cut short by the limits of this call is begun again by the next one; what failed in
      // it is remembered.
      if (given == share && !out_of_time_) ++line.starts;
      if (out_of_time_ || nodes_left_ <= 0) return kAborted;
    }
  }

  const std::vector<i64>& solution() const { return solution_; }
  i64 nodes() const { return nodes_; }
  i64 hits() const { return hits_; }
  // The order of the last start, counted on behind the last one when it was shaken.
  int order() const { return turn_ + (shaken_now_ ? int(orders_.size()) : 0); }
  size_t stack_bytes() const { return (size_t(16) << 20) + size_t(n_) * 2048; }

 private:
  static constexpr i64 kNever = INT64_MAX;
  static constexpr i64 kLargestShare = i64(1) << 50;
  static constexpr double kShake = 0.3;

  struct Line {
    i64 starts = 0;
    i64 spent = 0;
  };

  // The lowest offset from `at` on at which j touches no unplaced pin.
  i64 above_pins(int j, i64 at) const {
    if (!pins_of_.empty())
      for (int q : pins_of_[j])
        if (!placed_[q] && pin_[q] < at + size_[j] && at < pin_[q] + size_[q])
          at = pin_[q] + size_[q];
    return at;
  }

  bool pinned(int j) const { return !pin_.empty() && pin_[j] >= 0; }

  bool overlap(int i, int j) const { return lower_[i] < upper_[j] && lower_[j] < upper_[i]; }

  void build_neighbours() {
    // Pairs are counted first: beyond the limit the neighbours are found by a scan each time.
    const i64 limit = 24000000;
    std::vector<int> by_start(n_);
    for (int i = 0; i < n_; ++i) by_start[i] = i;
    std::sort(by_start.begin(), by_start.end(), [&](int a, int b) {
      return lower_[a] != lower_[b] ? lower_[a] < lower_[b] : a < b;
    });
    std::vector<int> starts(n_);
    for (int k = 0; k < n_; ++k) starts[k] = lower_[by_start[k]];
    i64 pairs = 0;
    for (int k = 0; k < n_ && pairs <= limit; ++k) {
      auto end = std::lower_bound(starts.begin() + k, starts.end(), upper_[by_start[k]]);
      pairs += 2 * (end - starts.begin() - k - 1);
    }
    if (pairs > limit) return;
    neighbour_at_.assign(n_ + 1, 0);
    for (int k = 0; k < n_; ++k)
      for (int m = k + 1; m < n_ && starts[m] < upper_[by_start[k]]; ++m) {
        ++neighbour_at_[by_start[k] + 1];
        ++neighbour_at_[by_start[m] + 1];
      }
    for (int i = 0; i < n_; ++i) neighbour_at_[i + 1] += neighbour_at_[i];
    neighbour_.resize(neighbour_at_[n_]);
    std::vector<i64> fill(neighbour_at_.begin(), neighbour_at_.end() - 1);
    for (int k = 0; k < n_; ++k)
      for (int m = k + 1; m < n_ && starts[m] < upper_[by_start[k]]; ++m) {
        neighbour_[fill[by_start[k]]++] = by_start[m];
        neighbour_[fill[by_start[m]]++] = by_start[k];
      }
  }

  // Calls f(j) for every unplaced neighbour of i until f returns false.
  template <class F>
  void for_neighbours(int i, const Entry* list, size_t length, F f) const {
    if (!neighbour_at_.empty()) {
      const int* p = neighbour_.data() + neighbour_at_[i];
      const int* e = neighbour_.data() + neighbour_at_[i + 1];
      for (; p != e; ++p)
        if (!placed_[*p] && !f(*p)) return;
    } else {
      for (size_t k = 0; k < length; ++k) {
        const int j = list[k].id;
        if (j != i && !placed_[j] && overlap(i, j) && !f(j)) return;
      }
    }
  }

  void find_twins() {
    std::vector<int> ids(n_);
    for (int i = 0; i < n_; ++i) ids[i] = i;
    auto key = [&](int i) { return std::make_pair(std::make_pair(lower_[i], upper_[i]), size_[i]); };
    std::sort(ids.begin(), ids.end(), [&](int a, int b) {
      return key(a) != key(b) ? key(a) < key(b) : a < b;
    });
    for (int k = 1; k < n_; ++k)
      if (key(ids[k]) == key(ids[k - 1]) && !pinned(ids[k]) && !pinned(ids[k - 1])) {
        twin_[ids[k]] = ids[k - 1];
        low_[ids[k]] = low_[ids[k - 1]] + size_[ids[k]];
      }
  }

  // Sorts the list by the keys of the current order, highest first, and numbers it.
  void rank(Entry* list, size_t length) {
    const std::string& order = orders_[size_t(turn_)];
    for (size_t k = 0; k < length; ++k) {
      const int i = list[k].id;
      Keys& key = keys_[k];
      key.id = i;
      for (size_t c = 0; c < 3; ++c) {
        double v = 0;
        switch (c < order.size() ? order[c] : ' ') {
          case 'W': v = life_[i]; break;
          case 'A': v = life_[i] * double(size_[i]); break;
          case 'w': v = upper_[i] - lower_[i]; break;
          case 'a': v = double(upper_[i] - lower_[i]) * double(size_[i]); break;
          case 'Z': v = double(size_[i]); break;
          case 'T': {
            i64 most = 0;
            for (int t = lower_[i]; t < upper_[i]; ++t) most = std::max(most, load_[t]);
            v = double(most);
            break;
          }
          default: break;
        }
        key.value[c] = v * jitter_[size_t(i)];
      }
    }
    std::sort(keys_.begin(), keys_.begin() + long(length), [](const Keys& x, const Keys& y) {
      for (int c = 0; c < 3; ++c)
        if (x.value[c] != y.value[c]) return x.value[c] > y.value[c];
      return x.id < y.id;
    });
    for (size_t k = 0; k < length; ++k) list[k] = Entry{keys_[k].id, int(k)};
  }

  void shake(i64 start) {
    const u64 base = mix(seed_ * 0x9e3779b97f4a7c15ull + u64(start));
    for (int i = 0; i < n_; ++i) {
      const double u = double(mix(base + u64(i)) >> 11) / 9007199254740992.0;
      jitter_[size_t(i)] = start == 0 ? 1.0 : 1.0 + kShake * (2.0 * u - 1.0);
    }
  }

  int from_root() {
    // Parts of the time axis that nothing crosses are problems of their own.
    std::vector<std::vector<Entry>> parts;
    std::vector<std::pair<int, int>> spans;
    std::vector<int> part_of(sections_, 0);
    int first = 0;
    for (int t = 0; t < sections_; ++t) {
      part_of[t] = int(spans.size());
      if (t + 1 == sections_ || cross_[t] == 0) {
        spans.emplace_back(first, t + 1);
        first = t + 1;
      }
    }
    parts.resize(spans.size());
    for (int i = 0; i < n_; ++i) parts[part_of[lower_[i]]].push_back(Entry{i, 0});
    for (size_t p = 0; p < parts.size(); ++p) {
      if (parts[p].empty()) continue;
      rank(parts[p].data(), parts[p].size());
      const int status = visit(spans[p].first, spans[p].second, parts[p].data(), parts[p].size(), 0, -1);
      if (status != kFound) return status;
    }
    return kFound;
  }

  void mark_dirty(int from, int to) {
    for (int t = from; t < to; ++t)
      if (!dirty_mark_[t]) {
        dirty_mark_[t] = 1;
        dirty_.push_back(t);
      }
  }

  void set_low(int j, i64 value) {
    trail_.push_back(Change{Change::kLow, j, low_[j]});
    low_[j] = value;
    mark_dirty(lower_[j], upper_[j]);
  }

  // Sections whose members rose: a new base; true unless one overflows.
  bool raise_floors(i64 level) {
    bool ok = true;
    for (size_t k = 0; k < dirty_.size(); ++k) {
      const int t = dirty_[k];
      dirty_mark_[t] = 0;
      if (!ok || load_[t] == 0) continue;
      const bool unique = use_ & kUnique;
      const i64 limit = capacity_ - load_[t];
      const int w = support_[t];
      if (!unique && !placed_[w] && std::max(low_[w], level) <= base_[t] && base_[t] <= limit)
        continue;
      i64 first = kNever, second = kNever;
      int who = w;
      for (i64 m = member_at_[t]; m < member_at_[t + 1]; ++m) {
        const int j = member_[m];
        if (placed_[j]) continue;
        const i64 at = std::max(low_[j], level);
        if (at < first) {
          second = first;
          first = at;
          who = j;
        } else if (at < second) {
          second = at;
        }
        // Nothing can lie below the base, and two ways to go on are as good as more.
        if (first <= base_[t] && (!unique || second <= limit)) break;
      }
      support_[t] = who;
      if (first > base_[t]) {
        trail_.push_back(Change{Change::kBase, t, base_[t]});
        base_[t] = first;
      }
      if (std::max(first, base_[t]) > limit) {
        ok = false;
        continue;
      }
      if (unique && second > limit && second != kNever) {
        // Only `who` can come next here: the rest of the section lies above it.
        const i64 top = first + size_[who];
        for (i64 m = member_at_[t]; m < member_at_[t + 1]; ++m) {
          const int j = member_[m];
          if (placed_[j] || j == who || low_[j] >= top) continue;
          if (top + size_[j] > capacity_ || pinned(j)) {
            ok = false;
            break;
          }
          set_low(j, top);
        }
      }
    }
    dirty_.clear();
    return ok;
  }

  // Buffers passed over by (level, rank) or lifted before lie above an unplaced one that blocks
  // the place they would otherwise fall into.
  bool lift(i64 level, int rank, const Entry* list, size_t length) {
    for (size_t k = 0; k < length; ++k) {
      const int j = list[k].id;
      if (placed_[j] || pinned(j)) continue;
      const i64 rest = rest_[j];
      if (low_[j] == rest && (rest > level || (rest == level && list[k].rank > rank))) continue;
      const i64 hole = rest + size_[j];
      const int w = witness_[j];
      if (w >= 0 && !placed_[w]) {
        const i64 at = std::max(low_[w], level);
        if (at < hole && at + size_[w] <= low_[j]) continue;
      }
      i64 best = kNever;
      int who = -1;
      for_neighbours(j, list, length, [&](int i) {
        const i64 at = std::max(low_[i], level);
        if (at < hole && at + size_[i] < best) {
          best = at + size_[i];
          who = i;
          if (best <= low_[j]) return false;
        }
        return true;
      });
      if (who < 0 || best + size_[j] > capacity_) return false;
      witness_[j] = who;
      if (best > low_[j]) set_low(j, best);
    }
    return true;
  }

  bool propagate(i64 level, int rank, const Entry* list, size_t length) {
    for (int pass = 0; pass < 3; ++pass) {
      if ((use_ & kLift) && !lift(level, rank, list, length)) return false;
      if (dirty_.empty()) return true;
      if (!(use_ & (kFloors | kUnique))) return true;
      const size_t before = trail_.size();
      if (!raise_floors(level)) return false;
      bool moved = false;
      for (size_t k = before; k < trail_.size() && !moved; ++k)
        moved = trail_[k].kind == Change::kLow;
      if (!moved) return true;
    }
    return true;
  }

  void forget_dirty() {
    for (int t : dirty_) dirty_mark_[t] = 0;
    dirty_.clear();
  }

  void undo(size_t mark) {
    while (trail_.size() > mark) {
      const Change& c = trail_.back();
      if (c.kind == Change::kRest)
        rest_[c.index] = c.value;
      else if (c.kind == Change::kLow)
        low_[c.index] = c.value;
      else
        base_[c.index] = c.value;
      trail_.pop_back();
    }
  }

  bool spent() {
    if (budget_ <= 0) return true;
    --budget_;
    ++nodes_;
    if (*stop_) {
      out_of_time_ = true;
      return true;
    }
    if ((nodes_ & 63) == 0 && now() > deadline_) {
      out_of_time_ = true;
      return true;
    }
    return false;
  }

  struct Candidate {
    i64 at;
    int rank;
    int id;
    bool operator>(const Candidate& o) const { return at != o.at ? at > o.at : rank > o.rank; }
  };

  // Places the unplaced buffers of `list` in sections [a, b), all at or above (level, rank).
  int visit(int a, int b, const Entry* list, size_t length, i64 level, int rank) {
    if (spent()) return kAborted;
    i64 most = 0;
    for (int t = a; t < b; ++t) most = std::max(most, load_[t]);
    const i64 limit = (use_ & kQuickReject) ? capacity_ - most : kNever;
    i64 hole = kNever;  // the lowest top of an unplaced buffer: nothing may be left above it
    Candidate pin{kNever, 0, -1};  // the next one: nothing may pass it
    bool passed = false;
    size_t open = 0;
    u64 where = 0, check = 0;
    const bool remember = use_ & kFailedStates;
    const size_t from = candidates_.size();
    for (size_t k = 0; k < length; ++k) {
      const int j = list[k].id;
      if (placed_[j]) continue;
      ++open;
      const i64 rest = pinned(j) ? pin_[j] : rest_[j];
      if (pinned(j)) {
        const Candidate mine{rest, list[k].rank, j};
        if (pin > mine) pin = mine;
        if (rest < level || (rest == level && list[k].rank <= rank)) passed = true;
      } else {
        hole = std::min(hole, rest + size_[j]);
      }
      const bool ready = low_[j] == rest &&
                         (rest > level || (rest == level && list[k].rank > rank)) &&
                         (twin_[j] < 0 || placed_[twin_[j]]);
      if (ready && rest <= limit) candidates_.push_back(Candidate{rest, list[k].rank, j});
      if (remember) {
        const u64 h = mix(u64(rest) * 0x9e3779b97f4a7c15ull + u64(std::max(low_[j], level)) * 2 + ready);
        where += mix(h ^ salt_[j]);
        check += (h | 1) * salt_[j];
      }
    }
    if (open == 0) {
      candidates_.resize(from);
      return kFound;
    }
    if (passed) {
      candidates_.resize(from);
      return kFailed;
    }
    if (remember) {
      where = mix(where + open);
      if (failed_.contains(where, check)) {
        ++hits_;
        candidates_.resize(from);
        return kFailed;
      }
    }
    if (!(use_ & kDominance)) hole = kNever;
    // Half of the list is placed: carry on with a shorter copy.
    std::unique_ptr<Entry[]> shorter;
    if (length > 16 && open * 2 < length) {
      shorter.reset(new Entry[open]);
      size_t m = 0;
      for (size_t k = 0; k < length; ++k)
        if (!placed_[list[k].id]) shorter[m++] = list[k];
      list = shorter.get();
      length = m;
    }
    // Few candidates are tried at most nodes: a heap instead of a sort.
    size_t to = from;
    for (size_t k = from; k < candidates_.size(); ++k)
      if (candidates_[k].at < hole && !(candidates_[k] > pin)) candidates_[to++] = candidates_[k];
    candidates_.resize(to);
    std::make_heap(candidates_.begin() + long(from), candidates_.end(), std::greater<Candidate>());
    int status = kFailed;
    while (to > from) {
      std::pop_heap(candidates_.begin() + long(from), candidates_.begin() + long(to),
                    std::greater<Candidate>());
      const Candidate next = candidates_[--to];
      bool alone = true;
      status = place(a, b, list, length, next, &alone);
      if (status != kFailed) break;
      if (alone && (use_ & kNoSiblings)) break;
    }
    candidates_.resize(from);
    if (status == kFailed && remember) failed_.insert(where, check);
    return status;
  }

  int place(int a, int b, const Entry* list, size_t length, const Candidate& next, bool* alone) {
    const int i = next.id;
    const i64 top = next.at + size_[i];
    --budget_;
    if (top > capacity_) return kFailed;
    const size_t mark = trail_.size();
    placed_[i] = 1;
    offset_[i] = next.at;
    for (int t = lower_[i]; t < upper_[i]; ++t) {
      load_[t] -= size_[i];
      trail_.push_back(Change{Change::kBase, t, base_[t]});
      base_[t] = top;
    }
    // Neighbours all share time with i, so the sections that they touch are one range.
    int from = lower_[i], to = upper_[i];
    bool ok = true;
    bool lonely = true;
    for_neighbours(i, list, length, [&](int j) {
      lonely = false;
      if (rest_[j] < top) {
        trail_.push_back(Change{Change::kRest, j, rest_[j]});
        rest_[j] = top;
        if (pinned(j)) {
          if (top > pin_[j]) {
            ok = false;
            return false;
          }
          return true;
        }
        const i64 at = above_pins(j, std::max(low_[j], top));
        if (low_[j] < at) {
          if (at + size_[j] > capacity_) {
            ok = false;
            return false;
          }
          trail_.push_back(Change{Change::kLow, j, low_[j]});
          low_[j] = at;
          from = std::min(from, lower_[j]);
          to = std::max(to, upper_[j]);
        }
      }
      return true;
    });
    if (ok) mark_dirty(from, to);
    *alone = lonely;
    ok = ok && propagate(next.at, next.rank, list, length);
    forget_dirty();
    int status = kFailed;
    if (ok) status = go_on(a, b, list, length, next);
    if (status == kFound) solution_[i] = next.at;
    undo(mark);
    for (int t = lower_[i]; t < upper_[i]; ++t) load_[t] += size_[i];
    placed_[i] = 0;
    return status;
  }

  int go_on(int a, int b, const Entry* list, size_t length, const Candidate& next) {
    const int i = next.id;
    const int s = lower_[i], e = upper_[i];
    if (!(use_ & kSplit)) {
      return visit(a, b, list, length, next.at, next.rank);
    }
    std::vector<int> cuts;
    for (int t = s; t + 1 < e; ++t)
      if (--cross_[t] == 0) cuts.push_back(t + 1);
    int status;
    if (cuts.empty()) {
      status = visit(a, b, list, length, next.at, next.rank);
    } else {
      status = parts(a, b, list, length, next, cuts);
    }
    for (int t = s; t + 1 < e; ++t) ++cross_[t];
    return status;
  }

  struct Part {
    i64 slack;
    int a, b;
    size_t from, length;
  };

  int parts(int a, int b, const Entry* list, size_t length, const Candidate& next,
            std::vector<int>& cuts) {
    cuts.push_back(b);
    std::vector<Part> parts;
    int begin = a;
    for (int cut : cuts) {
      i64 slack = kNever;
      for (int t = begin; t < cut; ++t)
        if (load_[t] > 0)
          slack = std::min(slack, capacity_ - std::max(base_[t], next.at) - load_[t]);
      if (slack != kNever) parts.push_back(Part{slack, begin, cut, 0, 0});
      begin = cut;
    }
    if (parts.empty()) return kFound;
    if (parts.size() == 1)
      return visit(parts[0].a, parts[0].b, list, length, next.at, next.rank);
    std::vector<Entry> entries;
    // One pass over the list: members keep their ranks unless the part is ranked again.
    std::vector<size_t> counts(parts.size() + 1, 0);
    auto part_of = [&](int j) {
      size_t lo = 0, hi = parts.size() - 1;
      while (lo < hi) {
        const size_t mid = (lo + hi) / 2;
        if (lower_[j] < parts[mid].b)
          hi = mid;
        else
          lo = mid + 1;
      }
      return lo;
    };
    for (size_t k = 0; k < length; ++k)
      if (!placed_[list[k].id]) ++counts[part_of(list[k].id) + 1];
    for (size_t p = 0; p < parts.size(); ++p) {
      parts[p].from = counts[p];
      parts[p].length = counts[p + 1];
      counts[p + 1] += counts[p];
    }
    entries.resize(counts[parts.size()]);
    for (size_t k = 0; k < length; ++k)
      if (!placed_[list[k].id]) entries[counts[part_of(list[k].id)]++] = list[k];
    std::stable_sort(parts.begin(), parts.end(),
                     [](const Part& x, const Part& y) { return x.slack < y.slack; });
    for (const Part& p : parts) {
      Entry* mine = entries.data() + p.from;
      int rank_from = next.rank;
      if (use_ & kDynamicOrder) {
        rank(mine, p.length);
        rank_from = -1;
      }
      const int status = visit(p.a, p.b, mine, p.length, next.at, rank_from);
      if (status != kFound) return status;
    }
    return kFound;
  }

  static constexpr int kFailed = kInfeasible;

  struct Keys {
    double value[3];
    int id;
  };

  int n_;
  int sections_ = 0;
  i64 capacity_;
  uint32_t use_;
  u64 seed_ = 0;
  std::vector<int> lower_, upper_;
  std::vector<i64> size_;
  std::vector<double> life_;
  std::vector<std::string> orders_;
  std::vector<i64> load_, base_, member_at_;
  std::vector<int> cross_, support_, member_;
  std::vector<char> dirty_mark_;
  std::vector<int> dirty_;
  std::vector<i64> rest_, low_, offset_, solution_;
  std::vector<i64> pin_;                  // empty, or an offset or -1 for each buffer
  std::vector<std::vector<int>> pins_of_;  // pinned neighbours by offset
  std::vector<char> placed_;
  std::vector<int> witness_, twin_;
  std::vector<double> jitter_;
  std::vector<u64> salt_;
  std::vector<Keys> keys_;
  std::vector<i64> neighbour_at_;
  std::vector<int> neighbour_;
  std::vector<Change> trail_;
  std::vector<Candidate> candidates_;
  FailedStates failed_;
  const volatile int* stop_ = nullptr;
  double deadline_ = 0;
  i64 nodes_left_ = 0, budget_ = 0, nodes_ = 0, hits_ = 0;
  bool out_of_time_ = false;
  Line steady_, shaken_;
  int turn_ = 0;
  bool shaken_now_ = false;
};

struct Task {
  Search* search;
  i64 nodes;
  double seconds;
  const volatile int* stop;
  int status;
};

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

// lower, upper: n spans in clique numbers, 0-based, end exclusive. size: n sizes. life: n real
// lifetimes, used for ranking only. orders: comma-separated strings of up to three letters out of
// "WAwaZT". Returns null when memory is short.
void* memo_canonical_new(int32_t n, const int32_t* lower, const int32_t* upper, const int64_t* size,
                         const double* life, int64_t capacity, uint32_t techniques,
                         const char* orders, uint64_t seed) {
  try {
    return new Search(n, lower, upper, size, life, capacity, techniques, orders, seed);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

// Pins buffers i with pins[i] >= 0 at that offset; before the first run.
void memo_canonical_pin(void* handle, const int64_t* pins) {
  static_cast<Search*>(handle)->pin(pins);
}

void memo_canonical_free(void* handle) { delete static_cast<Search*>(handle); }

// Returns 0 found, 1 proven infeasible, 2 out of nodes, time or stopped, 3 out of memory. Call it
// again to go on. `offsets` is written when found. stats: nodes, failed-state hits, order (all so
// far). *stop may be set from another thread.
int32_t memo_canonical_run(void* handle, int64_t nodes, double seconds, const volatile int32_t* stop,
                           int64_t* offsets, int64_t* stats) {
  Search* search = static_cast<Search*>(handle);
  Task task{search, nodes, seconds, stop, 3};
  // The search recurses once per buffer, deeper than a thread's usual stack.
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  pthread_attr_setstacksize(&attributes, search->stack_bytes());
  pthread_t thread;
  auto body = [](void* argument) -> void* {
    Task* t = static_cast<Task*>(argument);
    try {
      t->status = t->search->run(t->nodes, t->seconds, t->stop);
    } catch (const std::bad_alloc&) {
      t->status = 3;
    }
    return nullptr;
  };
  const bool started = pthread_create(&thread, &attributes, body, &task) == 0;
  pthread_attr_destroy(&attributes);
  if (!started) return 3;
  pthread_join(thread, nullptr);
  if (task.status == kFound)
    memcpy(offsets, search->solution().data(), search->solution().size() * sizeof(int64_t));
  stats[0] = search->nodes();
  stats[1] = search->hits();
  stats[2] = search->order();
  return task.status;
}

}  // extern "C"
#pragma GCC visibility pop
