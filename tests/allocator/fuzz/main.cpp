// Random deviations from a recorded iteration, judged by a shadow of the arena that shares no code
// with the core.
//
//     fuzz alone DEVIATIONS SEED      one thread drives; after every deviated iteration a clean one
//     fuzz threads REQUESTS SEED      several threads at once, with forks in between
//
// Prints counts as "name value" lines. Status 1 when bytes were handed out twice, handed out before
// a side stream was done with them, or when a clean iteration did not hit everything.
#include <cstdlib>
#include <cstring>

#include "alone.h"
#include "threads.h"

int main(int count, char** arguments) {
  if (count != 4) return 2;
  const uint64_t amount = std::strtoull(arguments[2], nullptr, 10);
  const uint64_t seed = std::strtoull(arguments[3], nullptr, 10);
  return std::strcmp(arguments[1], "threads") == 0 ? fuzz::threads(amount, seed)
                                                 : fuzz::alone(amount, seed);
}
