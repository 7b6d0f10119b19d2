// Counts, one a line.
#pragma once
#include <cstdint>
#include <cstdio>

namespace fuzz {

inline void print(const char* name, uint64_t value) {
  std::printf("%s: %llu\n", name, static_cast<unsigned long long>(value));
}

}  // namespace fuzz
