#include "table/bases.h"

#include <algorithm>
#include <set>
#include <utility>

namespace psstore {
namespace {

uint32_t rank_of(const Bases::Base& base) {
  return base.life.rank;
}

}  // namespace

void Bases::note(const Life& life, BufferRef value) {
  auto there = std::ranges::lower_bound(by_rank_, life.rank, {}, rank_of);
  if (there == by_rank_.end() || there->life.rank != life.rank) {
    by_rank_.insert(there, {life, std::move(value)});
    return;
  }
  if (life.incarnation < there->life.incarnation) return;
  there->life = life;
  give_up(std::exchange(there->value, std::move(value)));
}

bool Bases::has_rank(uint32_t rank) const {
  return std::ranges::binary_search(by_rank_, rank, {}, rank_of);
}

BufferRef Bases::of(const Life& life) const {
  const auto there = std::ranges::lower_bound(by_rank_, life.rank, {}, rank_of);
  return there != by_rank_.end() && there->life == life ? there->value : BufferRef();
}

void Bases::forget() {
  for (Base& base : by_rank_) give_up(std::exchange(base.value, {}));
}

void Bases::give_up(BufferRef value) {
  if (value && value.unique() && spare_.size() < by_rank_.size()) {
    spare_.push_back(std::move(value));
  }
}

BufferRef Bases::next(size_t num_bytes, uint64_t& reserved_bytes, Backend& backend) {
  if (!spare_.empty()) {
    BufferRef spare = std::move(spare_.back());
    spare_.pop_back();
    return spare;
  }
  if (num_drawn_ >= by_rank_.size()) return backend.allocate(num_bytes);
  BufferRef drawn = backend.allocate_reserved(num_bytes, reserved_bytes);
  ++num_drawn_;
  return drawn;
}

size_t Bases::num_buffers(const BufferRef& value) const {
  std::set<const void*> found;
  for (const Base& base : by_rank_) found.insert(base.value.get());
  found.erase(value.get());
  found.erase(nullptr);
  return found.size() + spare_.size();
}

}  // namespace psstore
