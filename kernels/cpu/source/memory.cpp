// Reuse of memory between calls, because fresh pages cost more than a small call.
#include "call.h"

#include <mutex>
#include <new>
#include <utility>

namespace {

// Never destroyed: XLA's threads may still compute while the process exits.
struct Kept {
  std::mutex lock;
  std::vector<std::pair<size_t, float*>> blocks;
  size_t size = 0;
};
Kept& kept() {
  static Kept& one = *new Kept;
  return one;
}
constexpr size_t MOST_KEPT = 64 << 20;  // bytes

}  // namespace

Scratch::Scratch(size_t floats) : size((floats + 63) / 16 * 64) {
  {
    Kept& all = kept();
    std::lock_guard<std::mutex> hold(all.lock);
    for (auto block = all.blocks.begin(); block != all.blocks.end(); ++block)
      if (block->first >= size && block->first <= 2 * size) {
        size = block->first, data = block->second;
        all.size -= size;
        all.blocks.erase(block);
        return;
      }
  }
  data = (float*)std::aligned_alloc(64, size);
  if (!data) throw std::bad_alloc();
}

Scratch::~Scratch() {
  {
    Kept& all = kept();
    std::lock_guard<std::mutex> hold(all.lock);
    if (all.size + size <= MOST_KEPT) {
      all.blocks.emplace_back(size, data);
      all.size += size;
      return;
    }
  }
  std::free(data);
}
