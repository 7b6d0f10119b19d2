// Greedy layouts: buffers placed one after another in a given order, and the skyline heuristic.
// `greedy.py` holds the slow reference of both and the orders.

#include <algorithm>
#include <cstdint>
#include <new>
#include <queue>
#include <utility>
#include <vector>

namespace {

using i64 = int64_t;

struct Item {
  i64 low, high;
  int lower, upper;
};

// Items sorted by offset, in pieces so that an insertion moves few of them.
class SortedItems {
 public:
  void insert(const Item& item) {
    if (pieces_.empty()) pieces_.emplace_back();
    size_t p = 0;
    while (p + 1 < pieces_.size() && pieces_[p + 1].front().low <= item.low) ++p;
    std::vector<Item>& piece = pieces_[p];
    piece.insert(std::upper_bound(piece.begin(), piece.end(), item,
                                  [](const Item& x, const Item& y) { return x.low < y.low; }),
                 item);
    if (piece.size() > kPiece) {
      std::vector<Item> half(piece.begin() + long(kPiece / 2), piece.end());
      piece.resize(kPiece / 2);
      pieces_.insert(pieces_.begin() + long(p) + 1, std::move(half));
    }
  }

  // Walks over the items in order.
  class Cursor {
   public:
    explicit Cursor(const SortedItems* items) : items_(items) { settle(); }
    const Item* get() const { return at_; }
    void next() {
      if (++at_ == end_) {
        ++piece_;
        settle();
      }
    }

   private:
    void settle() {
      at_ = end_ = nullptr;
      if (items_ && piece_ < items_->pieces_.size() && !items_->pieces_[piece_].empty()) {
        at_ = items_->pieces_[piece_].data();
        end_ = at_ + items_->pieces_[piece_].size();
      }
    }
    const SortedItems* items_;
    size_t piece_ = 0;
    const Item* at_ = nullptr;
    const Item* end_ = nullptr;
  };

 private:
  static constexpr size_t kPiece = 512;
  std::vector<std::vector<Item>> pieces_;
};

// Placed buffers. The time axis has blocks; a buffer is narrow when it lies within two neighbours.
// A narrow one can only meet the narrow ones of its blocks and the wide ones; a wide one looks at
// all.
class Placed {
 public:
  Placed(int n, int sections) {
    const int blocks = std::max(1, std::min({512, n / 32, sections}));
    width_ = (sections + blocks - 1) / blocks;
    blocks_.resize(size_t((sections + width_ - 1) / width_));
  }

  void insert(const Item& item) {
    all_.insert(item);
    const int first = item.lower / width_, last = (item.upper - 1) / width_;
    if (last > first + 1) {
      wide_.insert(item);
      return;
    }
    for (int b = first; b <= last; ++b) blocks_[size_t(b)].insert(item);
  }

  // The offset for a buffer: the lowest gap that holds it, or the smallest one.
  i64 find(int lower, int upper, i64 size, bool best_fit) const {
    const int first = lower / width_, last = (upper - 1) / width_;
    if (last > first + 1) return scan(&all_, nullptr, nullptr, lower, upper, size, best_fit);
    return scan(&wide_, &blocks_[size_t(first)], last > first ? &blocks_[size_t(last)] : nullptr,
                lower, upper, size, best_fit);
  }

 private:
  // Merges up to three lists; an item that is in two of them does no harm.
  static i64 scan(const SortedItems* x, const SortedItems* y, const SortedItems* z, int lower,
                  int upper, i64 size, bool best_fit) {
    i64 free = 0, best = -1, smallest = INT64_MAX;
    auto skip = [&](SortedItems::Cursor& c) {
      while (c.get() && (c.get()->lower >= upper || lower >= c.get()->upper)) c.next();
      return c.get();
    };
    SortedItems::Cursor a(x), b(y), c(z);
    skip(a);
    skip(b);
    skip(c);
    while (true) {
      SortedItems::Cursor* least = nullptr;
      for (SortedItems::Cursor* cursor : {&a, &b, &c})
        if (cursor->get() && (!least || cursor->get()->low < least->get()->low)) least = cursor;
      if (!least) break;
      const Item& item = *least->get();
      const i64 gap = item.low - free;
      if (gap >= size && gap < smallest) {
        best = free;
        smallest = gap;
        if (!best_fit) break;
      }
      free = std::max(free, item.high);
      least->next();
      skip(*least);
    }
    return best >= 0 ? best : free;
  }

  int width_ = 1;
  SortedItems all_, wide_;
  std::vector<SortedItems> blocks_;
};

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

// Places the buffers named in order[0..count) into offsets. Entries of offsets that are >= 0 at
// entry are placed already. Returns the peak, -1 when it would exceed `ceiling`, -2 when stopped,
// -3 when memory is short.
int64_t memo_greedy_place(int32_t n, const int32_t* lower, const int32_t* upper, const int64_t* size,
                          const int32_t* order, int32_t count, int32_t best_fit, int64_t ceiling,
                          const volatile int32_t* stop, int64_t* offsets) {
  try {
    int sections = 1;
    for (int i = 0; i < n; ++i) sections = std::max(sections, upper[i]);
    Placed placed(n, sections);
    i64 peak = 0;
    for (int i = 0; i < n; ++i)
      if (offsets[i] >= 0) {
        placed.insert(Item{offsets[i], offsets[i] + size[i], lower[i], upper[i]});
        peak = std::max(peak, offsets[i] + size[i]);
      }
    for (int k = 0; k < count; ++k) {
      if (*stop) return -2;
      const int i = order[k];
      const i64 at = placed.find(lower[i], upper[i], size[i], best_fit != 0);
      if (at + size[i] > ceiling) return -1;
      peak = std::max(peak, at + size[i]);
      offsets[i] = at;
      placed.insert(Item{at, at + size[i], lower[i], upper[i]});
    }
    return peak;
  } catch (const std::bad_alloc&) {
    return -3;
  }
}

// Skyline: into the lowest valley goes the buffer with the longest life (then the largest) that
// fits between its walls; a valley that nothing fits in is filled up. Same results as above.
int64_t memo_greedy_skyline(int32_t n, const int32_t* lower, const int32_t* upper,
                            const int64_t* size, int64_t ceiling, const volatile int32_t* stop,
                            int64_t* offsets) {
  try {
    int sections = 1;
    for (int i = 0; i < n; ++i) sections = std::max(sections, upper[i]);
    std::vector<i64> height(size_t(sections), 0);
    std::vector<int> open(static_cast<size_t>(n));
    for (int i = 0; i < n; ++i) open[size_t(i)] = i;
    // Best first: then the first one that fits is the choice.
    std::sort(open.begin(), open.end(), [&](int x, int y) {
      const int wx = upper[x] - lower[x], wy = upper[y] - lower[y];
      if (wx != wy) return wx > wy;
      if (size[x] != size[y]) return size[x] > size[y];
      return x < y;
    });
    // Valleys are kept in a heap by (height, start); stale ones are recognised by their height and
    // their walls.
    using Valley = std::pair<i64, int>;
    std::priority_queue<Valley, std::vector<Valley>, std::greater<Valley>> valleys;
    valleys.emplace(0, 0);
    i64 peak = 0;
    size_t left = open.size();
    while (left > 0) {
      if (*stop) return -2;
      const Valley valley = valleys.top();
      valleys.pop();
      const int a = valley.second;
      if (height[size_t(a)] != valley.first || (a > 0 && height[size_t(a) - 1] == valley.first))
        continue;
      int b = a;
      while (b < sections && height[size_t(b)] == valley.first) ++b;
      size_t pick = 0;
      while (pick < open.size() && !(a <= lower[open[pick]] && upper[open[pick]] <= b)) ++pick;
      if (pick == open.size()) {
        // Raised to its lower wall, it joins the neighbour, whose entry may begin further right.
        i64 wall = INT64_MAX;
        if (a > 0) wall = std::min(wall, height[size_t(a) - 1]);
        if (b < sections) wall = std::min(wall, height[size_t(b)]);
        for (int t = a; t < b; ++t) height[size_t(t)] = wall;
        int start = a;
        while (start > 0 && height[size_t(start) - 1] == wall) --start;
        valleys.emplace(wall, start);
        continue;
      }
      const int i = open[pick];
      open.erase(open.begin() + long(pick));
      --left;
      const i64 top = valley.first + size[i];
      if (top > ceiling) return -1;
      offsets[i] = valley.first;
      peak = std::max(peak, top);
      for (int t = lower[i]; t < upper[i]; ++t) height[size_t(t)] = top;
      if (a < lower[i]) valleys.emplace(valley.first, a);
      if (upper[i] < b) valleys.emplace(valley.first, upper[i]);
      int start = lower[i];
      while (start > 0 && height[size_t(start) - 1] == top) --start;
      valleys.emplace(top, start);
    }
    return peak;
  } catch (const std::bad_alloc&) {
    return -3;
  }
}

}  // extern "C"
#pragma GCC visibility pop
