// The values of a row while a rule steps it: float32, in place, or widened from bfloat16 and rounded to it by lot.
//
// Rounding up or down by lot, in proportion to how near each is, has the value that was computed as its mean: steps that
// are smaller than what bfloat16 tells apart add up, where the nearest value would stay as it was. Source: Gupta et al.,
// "Deep learning with limited numerical precision", 2015. The lot is a pure function of the table, the row's id, the
// decision and the column, so that any number of shards and a replay give the same bits:
//
//   half i % 8 of the 128 bits of philox(key, id, decision × 512 + i / 8) is the lot of column i
//
// Included only by row_steps.h: see loops.h for the unnamed namespace.
#pragma once

#include <cstdint>
#include <cstring>

#include "core/half.h"
#include "core/philox.h"
#include "kernels/elements.h"
#include "kernels/rows.h"

namespace psstore {
namespace {

constexpr int64_t kLotsTogether = 8;
constexpr int64_t kMaxLots = int64_t{kMaxRowDim} / kLotsTogether;

// Both have open() for the values of a row, (dim,) float32 until close(), and states() for what is behind them.
class Float32Rows {
 public:
  explicit Float32Rows(const RowsUpdate& update) : dim_(update.dim) {}

  std::byte* open(const RowToStep& row) { return row.value; }
  std::byte* states(const RowToStep& row) const {
    return row.value + dim_ * static_cast<int64_t>(sizeof(float));
  }
  void close(const RowToStep&) {}

 private:
  const int64_t dim_;
};

class BFloat16Rows {
 public:
  explicit BFloat16Rows(const RowsUpdate& update) : dim_(update.dim), lots_of_(update.lots) {}

  std::byte* open(const RowToStep& row) {
    std::byte* const values = reinterpret_cast<std::byte*>(values_);
    for_each_index(
        dim_, [=](int64_t i) { store<float>(values, i, to_float(load<BFloat16>(row.value, i))); });
    return values;
  }

  std::byte* states(const RowToStep& row) const {
    return row.value + dim_ * static_cast<int64_t>(sizeof(BFloat16));
  }

  void close(const RowToStep& row) {
    draw(row.id);
    const float* const values = values_;
    const uint32_t* const lots = lots_;
    for_each_index(dim_ / 2, [=](int64_t i) {
      store(row.value, 2 * i, to_bfloat16(values[2 * i], lots[i] & 0xFFFFU));
      store(row.value, 2 * i + 1, to_bfloat16(values[2 * i + 1], lots[i] >> 16));
    });
    if (dim_ % 2 == 0) return;
    store(row.value, dim_ - 1, to_bfloat16(values[dim_ - 1], lots[dim_ / 2] & 0xFFFFU));
  }

 private:
  void draw(uint64_t id) {
    const uint64_t key = lots_of_.key;
    const uint64_t begin = lots_of_.decision * static_cast<uint64_t>(kMaxLots);
    uint32_t* const lots = lots_;
    for_each_index((dim_ + kLotsTogether - 1) / kLotsTogether, [=](int64_t i) {
      const RandomWords words = philox(key, id, begin + static_cast<uint64_t>(i));
      lots[4 * i] = words.word[0];
      lots[4 * i + 1] = words.word[1];
      lots[4 * i + 2] = words.word[2];
      lots[4 * i + 3] = words.word[3];
    });
  }

  const int64_t dim_;
  const RoundingLots lots_of_;
  alignas(64) float values_[kMaxRowDim];
  alignas(64) uint32_t lots_[kMaxRowDim / 2];
};

}  // namespace
}  // namespace psstore
