// A thread that runs one job at a time.
#pragma once
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>

namespace fuzz {

class Worker {
 public:
  Worker() : thread_([this] { run(); }) {}
  ~Worker() {
    call(nullptr);
    thread_.join();
  }
  void call(const std::function<void()>* job) {
    std::unique_lock<std::mutex> guard(lock_);
    job_ = job;
    busy_ = true;
    changed_.notify_all();
    changed_.wait(guard, [this] { return !busy_; });
  }

 private:
  void run() {
    for (bool more = true; more;) {
      std::unique_lock<std::mutex> guard(lock_);
      changed_.wait(guard, [this] { return busy_; });
      more = job_ != nullptr;
      if (more) (*job_)();
      busy_ = false;
      changed_.notify_all();
    }
  }
  std::mutex lock_;
  std::condition_variable changed_;
  const std::function<void()>* job_ = nullptr;
  bool busy_ = false;
  std::thread thread_;
};

}  // namespace fuzz
