// Distribution of the items of a call over the threads of a pool: XLA's, or that of a test.
#pragma once
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <new>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

// Pause briefly, with the processor's spin-wait hint.
inline void pause_briefly() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Whether `is_true` becomes true while this thread polls, for some microseconds.
template <class Condition>
bool becomes(const Condition& is_true, int microseconds) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::microseconds(microseconds);
  do {
    for (int i = 0; i < 64; i++, pause_briefly())
      if (is_true()) return true;
  } while (std::chrono::steady_clock::now() < end);
  return false;
}

// Items of one call, owned by the call and by each helper thread. Late threads find no items, and
// touch nothing else. A short call has a stretch of items for each thread, which reads its memory in
// order and then helps with the other stretches. Other calls have one stretch, from which each thread
// takes the next item.
struct Items {
  struct alignas(64) Stretch {
    std::atomic<int64_t> next{0};
    int64_t end = 0;
  };
  const int64_t count;
  const std::function<void(int64_t)>* const work;  // valid until all items are done
  std::vector<Stretch> stretches;
  std::atomic<int64_t> joined{0}, done{0}, holders{1};
  std::atomic<bool> out_of_memory{false};
  std::mutex lock;
  std::condition_variable finished;

  Items(int64_t count, const std::function<void(int64_t)>& work, int64_t parts)
      : count(count), work(&work), stretches(parts) {
    for (int64_t i = 0; i < parts; i++)
      stretches[i].next = count * i / parts, stretches[i].end = count * (i + 1) / parts;
  }

  void take() {
    const int64_t parts = stretches.size(), own = joined++;
    for (int64_t i = 0; i < parts; i++) {
      Stretch& stretch = stretches[(own + i) % parts];
      for (int64_t item; (item = stretch.next++) < stretch.end;) finish(item);
    }
  }
  void finish(int64_t item) {
    try {
      (*work)(item);
    } catch (const std::bad_alloc&) {  // must not reach a thread of XLA
      out_of_memory = true;
    }
    if (++done == count) {
      std::lock_guard<std::mutex> hold(lock);
      finished.notify_all();
    }
  }
  void wait() {
    if (becomes([this] { return done == count; }, 20)) return;
    std::lock_guard<std::mutex> hold(lock);
    while (done != count)  // `std::atomic::wait` would require libstdc++ 12
      pthread_cond_wait(finished.native_handle(), lock.native_handle());
  }
  void let_go() {
    if (--holders == 0) delete this;
  }
};

// Helper threads of a short call, which then poll for the next call for a short time: waking a thread
// takes longer than most products of a token. Each has a slot for the items of its next call.
class Lookout {
 public:
  static constexpr int MICROSECONDS = 60;

  // Give the items to a polling thread; return whether there was one. The thread releases the items.
  static bool ask(Items* items) {
    for (auto& place : places()) {
      Items* there = waiting();
      if (place.load(std::memory_order_relaxed) == there && place.compare_exchange_strong(there, items))
        return true;
    }
    return false;
  }
  // Help in calls until none comes for a short time.
  static void stay() {
    for (auto& place : places()) {
      Items* there = nullptr;
      if (place.load(std::memory_order_relaxed) || !place.compare_exchange_strong(there, waiting()))
        continue;
      for (;;) {
        const bool asked = becomes([&] { return place.load() != waiting(); }, MICROSECONDS);
        there = waiting();
        if (!asked && place.compare_exchange_strong(there, nullptr)) return;
        Items* items = place.load();
        items->take();
        items->let_go();
        place = waiting();
      }
    }
  }

 private:
  using Places = std::atomic<Items*>[64];
  static Places& places() {
    static Places all{};
    return all;
  }
  static Items* waiting() {
    static char mark;
    return (Items*)&mark;
  }
};

// Runs items on the pool's threads and on this one, which never waits for a thread that has not
// started, because it may itself belong to the pool. After a short call, threads poll for the next.
template <class Pool>
void run(Pool& pool, int64_t count, const std::function<void(int64_t)>& work, bool is_short) {
  const int64_t threads = std::min<int64_t>(pool.num_threads(), count);
  if (threads <= 1) {
    for (int64_t item = 0; item < count; item++) work(item);
    return;
  }
  Items* items = new Items(count, work, is_short ? threads : 1);
  for (int64_t t = 1; t < threads; t++) {
    items->holders++;
    if (is_short && Lookout::ask(items)) continue;
    try {
      pool.Schedule([items, is_short] {
        items->take();
        items->let_go();
        if (is_short) Lookout::stay();
      });
    } catch (const std::bad_alloc&) {  // helpers are already computing and must not outlive the call
      items->let_go();
      break;
    }
  }
  items->take();
  items->wait();
  const bool out_of_memory = items->out_of_memory;
  items->let_go();
  if (out_of_memory) throw std::bad_alloc();
}
