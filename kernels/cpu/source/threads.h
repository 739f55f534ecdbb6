// Spread the items of a call over the threads of a pool: XLA's, or that of a test.
#pragma once
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <new>

// Items of one call. Threads of the pool that come late find none, and touch nothing else.
struct Items {
  int64_t count;
  std::function<void(int64_t)> work;
  std::atomic<int64_t> next{0}, done{0};
  std::atomic<bool> out_of_memory{false};
  std::mutex lock;
  std::condition_variable finished;

  void take() {
    for (int64_t item; (item = next++) < count;) {
      try {
        work(item);
      } catch (const std::bad_alloc&) {  // a thread of XLA's must not see it
        out_of_memory = true;
      }
      if (++done == count) {
        std::lock_guard<std::mutex> hold(lock);
        finished.notify_all();
      }
    }
  }
};

// Runs items on the pool's threads and on this one, which never waits for a thread that has not
// begun: it may itself be one of the pool.
template <class Pool>
void run(Pool& pool, int64_t count, const std::function<void(int64_t)>& work) {
  const int64_t threads = std::min<int64_t>(pool.num_threads(), count);
  if (threads <= 1) {
    for (int64_t item = 0; item < count; item++) work(item);
    return;
  }
  auto items = std::make_shared<Items>();
  items->count = count;
  items->work = work;
  for (int64_t t = 1; t < threads; t++) pool.Schedule([items] { items->take(); });
  items->take();
  {
    std::lock_guard<std::mutex> hold(items->lock);
    while (items->done != items->count)  // its own `wait` would ask for libstdc++ 12
      pthread_cond_wait(items->finished.native_handle(), items->lock.native_handle());
  }
  if (items->out_of_memory) throw std::bad_alloc();
}
