// The text of an out-of-memory error: who holds the budget.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace memo {

inline std::string readable(uint64_t bytes) {
  char text[48];
  if (bytes < 1024) {
    std::snprintf(text, sizeof text, "%llu bytes", static_cast<unsigned long long>(bytes));
    return text;
  }
  const char* const units[] = {"KiB", "MiB", "GiB", "TiB"};
  double value = static_cast<double>(bytes) / 1024;
  size_t unit = 0;
  while (value >= 1024 && unit < 3) {
    value /= 1024;
    unit++;
  }
  std::snprintf(text, sizeof text, "%.2f %s", value, units[unit]);
  return text;
}

// Blocks of one size and phase, counted together.
class Holders {
 public:
  static constexpr size_t kNamed = 5;

  void add(uint64_t size, int32_t phase) { counts_[{size, phase}]++; }

  // "3 x 64.00 MiB (name of the phase), ...", those that hold the most first.
  template <class Name>
  std::string text(Name name) const {
    using Group = std::pair<std::pair<uint64_t, int32_t>, uint64_t>;
    std::vector<Group> groups(counts_.begin(), counts_.end());
    const size_t shown = std::min(kNamed, groups.size());
    std::partial_sort(groups.begin(), groups.begin() + static_cast<std::ptrdiff_t>(shown),
                      groups.end(), [](const Group& a, const Group& b) {
                        return a.first.first * a.second > b.first.first * b.second;
                      });
    std::string text;
    for (size_t i = 0; i < shown; i++) {
      if (i) text += ", ";
      text += std::to_string(groups[i].second) + " x " + readable(groups[i].first.first) + " (" +
              name(groups[i].first.second) + ")";
    }
    return text;
  }

 private:
  std::map<std::pair<uint64_t, int32_t>, uint64_t> counts_;
};

}  // namespace memo
