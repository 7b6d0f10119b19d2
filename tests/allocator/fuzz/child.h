// Forking, as pthread_atfork would have it.
#pragma once
#include <sys/wait.h>
#include <unistd.h>

#include "core.h"

namespace fuzz {

using memo::Core;

// What a forked child may and may not do.
inline bool right_in_child(Core& core, void* inherited) {
  alarm(10);  // a lock that stayed locked
  if (core.mode() != memo::kOff || core.set_mode(memo::kReplay)) return false;
  core.begin_iteration();
  core.enter(0);
  if (core.route(256) != memo::Route::kNative) return false;
  char other = 0;
  core.native_malloc(&other, 1, 0, memo::Route::kNative, false);
  core.native_free(&other);
  return !inherited || (core.owns(inherited) && core.give_back(inherited));
}

// Forks; whether the child was right.
inline bool fork_is_right(Core& core, void* inherited) {
  core.before_fork();
  const pid_t child = fork();
  if (child == 0) {
    core.after_fork_in_child();
    _exit(right_in_child(core, inherited) ? 0 : 1);
  }
  core.after_fork_in_parent();
  int status = 0;
  waitpid(child, &status, 0);
  return status == 0;
}

}  // namespace fuzz
