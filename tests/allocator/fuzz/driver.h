// Carries out the operations of an iteration on a core, and tells the judge.
#pragma once
#include <cstdlib>
#include <functional>
#include <map>

#include "child.h"
#include "core.h"
#include "judge.h"
#include "training.h"
#include "worker.h"

namespace fuzz {

constexpr uint64_t kSideStream = 7;

class Driver {
 public:
  Driver(Core& core, Judge& judge) : core_(core), judge_(judge) {
    const std::function<void()> marker = [&] { core_.enter(0); };
    marked_.call(&marker);
  }

  void run(const Ops& ops, size_t until) {
    for (size_t i = 0; i < until && i < ops.size(); i++) step(ops[i]);
  }

  void step(const Op& op) {
    switch (op.kind) {
      case Op::kEnter: core_.enter(op.phase); break;
      case Op::kMalloc: malloc(op); break;
      case Op::kFree: free(op.id); break;
      case Op::kUse: {
        auto found = blocks_.find(op.id);
        if (found != blocks_.end() && core_.owns(found->second.data))
          core_.used_by(found->second.data, kSideStream);
        break;
      }
      case Op::kOffAndOn:
        core_.set_mode(memo::kOff);
        malloc({Op::kMalloc, -1, 256});
        free(-1);
        core_.set_mode(memo::kReplay);
        break;
      case Op::kFork: fork_once(); break;
    }
  }

  void free_all() {
    while (!blocks_.empty()) free(blocks_.begin()->first);
  }
  uint64_t bad_children = 0;

 private:
  struct Block { char* data; uint64_t size; };

  void malloc(const Op& op) {
    char* data = nullptr;
    const std::function<void()> ask = [&] {
      const memo::Route route = core_.route(op.size);
      if (route == memo::Route::kReplay)
        data = static_cast<char*>(core_.allocate(op.size, op.stream));
      if (data) return;
      data = static_cast<char*>(std::malloc(op.size));
      core_.ledger().claim(op.size);
      core_.native_malloc(data, op.size, op.stream, route, true);
    };
    if (op.thread == 0) ask();
    else (op.thread == 1 ? marked_ : bare_).call(&ask);
    if (core_.owns(data)) judge_.handed_out(reinterpret_cast<uint64_t>(data), op.size);
    data[0] = data[op.size - 1] = static_cast<char>(op.id);
    free(op.id);  // an id that a repeated phase made before
    blocks_[op.id] = {data, op.size};
  }

  void free(int64_t id) {
    auto found = blocks_.find(id);
    if (found == blocks_.end()) return;
    const Block block = found->second;
    blocks_.erase(found);
    const char mark = static_cast<char>(id);
    if (block.data[0] != mark || block.data[block.size - 1] != mark) judge_.damaged++;
    if (core_.owns(block.data)) {
      judge_.before_free();
      core_.give_back(block.data);
      judge_.given_back(reinterpret_cast<uint64_t>(block.data));
    } else {
      core_.native_free(block.data);
      std::free(block.data);
    }
  }

  void fork_once() {
    void* inherited = nullptr;
    for (const auto& block : blocks_)
      if (core_.owns(block.second.data)) inherited = block.second.data;
    bad_children += !fork_is_right(core_, inherited);
  }

  Core& core_;
  Judge& judge_;
  Worker marked_, bare_;
  std::map<int64_t, Block> blocks_;
};

}  // namespace fuzz
