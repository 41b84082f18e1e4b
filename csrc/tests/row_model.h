// The rows of a partition beside a dictionary of what they should be, and random operations on both: rows are stepped,
// added, read, evicted, held as they are and read as they were.
#pragma once

#include <algorithm>
#include <array>
#include <cstring>
#include <random>
#include <unordered_map>
#include <utility>
#include <vector>

#include "rows/row_store.h"

namespace psstore::testing {

class RowModel {
 public:
  static constexpr RowShape kShape{.dim = 5, .state_elems = 2, .sum_elems = 1};
  static constexpr FirstValues kFirst{FirstValueKind::kNormal, 0, 1, 3};
  static constexpr float kFirstSum = 0.5F;

  // What a row is: its value, then its state.
  using Row = std::array<float, kShape.dim + kShape.state_elems>;
  using Dictionary = std::unordered_map<uint64_t, Row>;

  // Rows have `num_ids` different ids, and one time in `evicted_every` some go.
  RowModel(uint64_t seed, uint64_t num_ids, uint64_t evicted_every)
      : random_(seed), num_ids_(num_ids), evicted_every_(evicted_every) {
    for (uint64_t i = 0; i < num_ids; ++i) {
      Row& row = first_rows_[id_of(i)];
      write_first_values(kFirst, id_of(i), kShape.dim, DType::kFloat32,
                         reinterpret_cast<std::byte*>(row.data()));
      row[kShape.dim] = kFirstSum;
    }
  }

  // Some operations, each of which is on a row.
  void go_on() {
    change(some_ids(60));
    if (one_in(evicted_every_)) evict(1 + random_() % 20);
    if (one_in(100)) held_.emplace_back(store_.snapshot(), rows_);
    if (one_in(100) && !held_.empty()) held_.erase(held_.begin());
    const std::vector<uint64_t> ids = some_ids(60);
    compare(ids, rows_, nullptr);
    if (!held_.empty()) {
      const auto& [then, rows] = held_[random_() % held_.size()];
      compare(ids, rows, &then);
    }
    num_differences_ += store_.num_rows() != rows_.size();
  }

  // At most so many ids, ascending, each once.
  std::vector<uint64_t> some_ids(size_t most) {
    std::vector<uint64_t> ids(1 + random_() % most);
    for (uint64_t& id : ids) id = id_of(random_() % num_ids_);
    std::ranges::sort(ids);
    ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
    return ids;
  }

  // Adds to the values and counts in the states, as a step would.
  void change(const std::vector<uint64_t>& ids) {
    const auto by = static_cast<float>(random_() % 9) - 4;
    std::vector<RowNumber> found(ids.size());
    store_.find(ids, found);
    std::vector<uint64_t> added;
    for (size_t i = 0; i < ids.size(); ++i) {
      if (found[i] == kNoRow) added.push_back(ids[i]);
    }
    store_.reserve(added);
    for (const RowNumber row : found) {
      if (row != kNoRow) store_.make_writable(row);
    }
    for (size_t i = 0; i < ids.size(); ++i) {
      if (found[i] == kNoRow) found[i] = store_.add(ids[i], kFirstSum);
      Row row;
      std::memcpy(row.data(), store_.value(found[i]), sizeof row);
      step(row, by);
      std::memcpy(store_.value(found[i]), row.data(), sizeof row);
      step(rows_.try_emplace(ids[i], first_rows_.at(ids[i])).first->second, by);
    }
    num_operations_ += ids.size();
  }

  // Reads rows as they are, or were.
  void compare(const std::vector<uint64_t>& ids, const Dictionary& rows, const RowSnapshot* then) {
    std::vector<float> values(ids.size() * kShape.dim);
    store_.read(ids, reinterpret_cast<std::byte*>(values.data()), then);
    for (size_t i = 0; i < ids.size(); ++i) {
      const auto there = rows.find(ids[i]);
      const Row& row = there != rows.end() ? there->second : first_rows_.at(ids[i]);
      num_differences_ += !std::equal(row.begin(), row.begin() + kShape.dim,
                                      values.begin() + static_cast<ptrdiff_t>(i * kShape.dim));
    }
    num_operations_ += ids.size();
  }

  RowStore& store() { return store_; }
  const Dictionary& rows() const { return rows_; }
  uint64_t num_operations() const { return num_operations_; }
  // Rows that were read, and were not what the dictionary says.
  uint64_t num_differences() const { return num_differences_; }

 private:
  static uint64_t id_of(uint64_t i) { return i * 0x100000001; }
  bool one_in(uint64_t times) { return random_() % times == 0; }

  static void step(Row& row, float by) {
    for (size_t k = 0; k < kShape.dim; ++k) row[k] += by;
    row[kShape.dim] += 1;
    row[kShape.dim + 1] -= by;
  }

  void evict(uint64_t one_of) {
    std::vector<size_t> places;
    for (size_t place = 0; place < store_.num_rows(); ++place) {
      if (!one_in(one_of)) continue;
      places.push_back(place);
      rows_.erase(store_.id_of(store_.number(place)));
    }
    store_.evict(places);
    num_operations_ += places.size();
  }

  std::mt19937_64 random_;
  const uint64_t num_ids_;
  const uint64_t evicted_every_;
  Dictionary first_rows_;
  RowStore store_{kShape, kFirst, [pool = BufferPool::create(0)](size_t num_bytes) {
                    return pool->allocate(num_bytes);
                  }};
  Dictionary rows_;
  std::vector<std::pair<RowSnapshot, Dictionary>> held_;
  uint64_t num_operations_ = 0;
  uint64_t num_differences_ = 0;
};

}  // namespace psstore::testing
