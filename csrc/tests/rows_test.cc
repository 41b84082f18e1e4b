// Rows of a partition: the index and the store against a dictionary, first values against their sources, what a client
// groups, and the rules by every instruction set.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <numeric>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/errors.h"
#include "core/half.h"
#include "kernels/kernel_set.h"
#include "row_model.h"
#include "rows/contribution.h"
#include "rows/grouped_ids.h"
#include "rows/row_residuals.h"
#include "rows/row_store.h"

namespace psstore::testing {
namespace {

AllocateMemory from_pool() {
  return [pool = BufferPool::create(0)](size_t num_bytes) { return pool->allocate(num_bytes); };
}

std::vector<float> first_row(const FirstValues& of, uint64_t id, size_t dim) {
  std::vector<float> row(dim);
  write_first_values(of, id, dim, DType::kFloat32, reinterpret_cast<std::byte*>(row.data()));
  return row;
}

// ---- first values -----------------------------------------------------------------------------------

TEST(FirstValues, a_uniform_row_is_philox_with_the_tables_seed_and_the_id) {
  // Philox4x32-10 of key 0 and counter 0: Random123's known answers (kat_vectors).
  const FirstValues uniform{FirstValueKind::kUniform, 0, 1, 0};
  const uint32_t expected[] = {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8};
  const std::vector<float> row = first_row(uniform, 0, 4);
  for (size_t i = 0; i < row.size(); ++i) {
    EXPECT_EQ(row[i], static_cast<float>((expected[i] + 0.5) * 0x1p-32));
  }
}

TEST(FirstValues, the_normal_quantile_is_that_of_tables) {
  // Source: the test values of AS 241.
  EXPECT_NEAR(normal_quantile(0.25), -0.6744897501960817, 1e-7);
  EXPECT_NEAR(normal_quantile(0.001), -3.090232306167814, 1e-6);
  EXPECT_NEAR(normal_quantile(1e-12), -7.034483825301131, 1e-5);
  EXPECT_NEAR(normal_quantile(0.975), 1.959963984540054, 1e-6);
}

TEST(FirstValues, many_normal_values_have_their_mean_and_deviation) {
  const FirstValues normal{FirstValueKind::kNormal, 1.0, 0.5, 42};
  double sum = 0;
  double squares = 0;
  constexpr int kRows = 4096;
  constexpr int kDim = 16;
  for (uint64_t id = 0; id < kRows; ++id) {
    for (const float value : first_row(normal, id, kDim)) {
      sum += value;
      squares += (value - 1.0) * (value - 1.0);
    }
  }
  EXPECT_NEAR(sum / (kRows * kDim), 1.0, 0.01);
  EXPECT_NEAR(std::sqrt(squares / (kRows * kDim)), 0.5, 0.01);
}

TEST(FirstValues, rows_differ_by_id_and_by_seed_and_no_length_changes_their_beginning) {
  const FirstValues normal{FirstValueKind::kNormal, 0, 1, 7};
  FirstValues other = normal;
  other.seed = 8;
  EXPECT_NE(first_row(normal, 1, 8), first_row(normal, 2, 8));
  EXPECT_NE(first_row(normal, 1, 8), first_row(other, 1, 8));
  const std::vector<float> longer = first_row(normal, 1, 8);
  EXPECT_EQ(first_row(normal, 1, 5), std::vector<float>(longer.begin(), longer.begin() + 5));
  EXPECT_EQ(first_row({FirstValueKind::kConstant, 2.5, 0, 0}, 9, 2),
            (std::vector<float>{2.5, 2.5}));
}

// ---- the index --------------------------------------------------------------------------------------

TEST(RowIndex, tags_are_found_alike_in_both_forms) {
  std::mt19937_64 random(1);
  uint8_t tags[row_index::kGroupPlaces];
  for (int round = 0; round < 1000; ++round) {
    for (uint8_t& tag : tags)
      tag = static_cast<uint8_t>(random() % 4 == 0 ? 0 : 0x80 | random() % 8);
    for (const uint8_t tag : std::initializer_list<uint8_t>{0x00, 0x80, 0x83}) {
      EXPECT_EQ(row_index::matches(tags, tag), row_index::matches_anywhere(tags, tag));
    }
  }
}

// An index of ids that are in an array of their own.
class Indexed {
 public:
  explicit Indexed(uint64_t number, AllocateMemory allocate = from_pool())
      : index_(std::move(allocate), number) {}

  void reserve(std::span<const uint64_t> ids) {
    index_.reserve(ids, [&](std::span<const RowNumber> rows, std::span<uint64_t> hashes) {
      num_moved_ += rows.size();
      most_moved_ = std::max(most_moved_, rows.size());
      for (size_t i = 0; i < rows.size(); ++i) hashes[i] = hash_of_id(ids_[rows[i]]);
    });
  }
  void add(uint64_t id) {
    reserve({&id, 1});
    insert(id);
  }
  void insert(uint64_t id) {
    ids_.push_back(id);
    index_.insert(hash_of_id(id), static_cast<RowNumber>(ids_.size() - 1));
  }
  RowNumber find(uint64_t id) const {
    return index_.find(hash_of_id(id), [&](RowNumber row) { return ids_[row] == id; });
  }
  bool has_all() const {
    for (RowNumber row = 0; row < ids_.size(); ++row) {
      if (find(ids_[row]) != row) return false;
    }
    return true;
  }
  const RowIndex& index() const { return index_; }
  size_t num_moved() const { return num_moved_; }
  size_t most_moved() const { return most_moved_; }

 private:
  RowIndex index_;
  std::vector<uint64_t> ids_;
  size_t num_moved_ = 0;
  size_t most_moved_ = 0;  // at once
};

TEST(RowIndex, finds_what_was_added_and_nothing_else_while_it_grows) {
  for (uint64_t number = 0; number < 4; ++number) {
    Indexed rows(number);
    std::mt19937_64 random(2);
    std::vector<uint64_t> ids;
    for (RowNumber row = 0; row < 20'000; ++row) {
      ids.push_back(random());
      rows.add(ids[row]);
      if (row % 7 != 0) continue;
      for (int i = 0; i < 8; ++i) {
        const auto wanted = static_cast<RowNumber>(random() % (row + 1));
        EXPECT_EQ(rows.find(ids[wanted]), wanted);
        EXPECT_EQ(rows.find(random()), kNoRow);
      }
    }
    EXPECT_TRUE(rows.has_all());
    EXPECT_LE(rows.index().num_bytes(), 20'000 * 12u);
  }
}

// Who looks many up has their records on its way by what is likely: a search that goes elsewhere waits for memory.
TEST(RowIndex, has_nearly_every_row_among_the_likely_ones) {
  constexpr RowNumber kRows = 40'000;
  Indexed rows(1);
  for (uint64_t id = 0; id < kRows; ++id) rows.add(id);
  RowNumber num_likely = 0;
  for (RowNumber row = 0; row < kRows; ++row) {
    const row_index::LikelyRows likely = rows.index().likely(hash_of_id(row));
    num_likely += likely.first == row || likely.second == row ? 1 : 0;
  }
  EXPECT_GT(num_likely, kRows * 0.99);
}

TEST(RowIndex, moves_few_rows_at_once_however_many_there_are) {
  Indexed rows(3);
  constexpr size_t kRows = 300'000;
  for (uint64_t id = 0; id < kRows; ++id) rows.add(id);
  EXPECT_TRUE(rows.has_all());
  EXPECT_LE(rows.most_moved(), 9'000u);
  EXPECT_LE(rows.num_moved(), 4 * kRows);
}

// One alone has from 5.7 to 9.5 bytes a row.
TEST(RowIndex, several_of_different_numbers_take_about_the_same_for_a_row_however_many_there_are) {
  std::vector<Indexed> all;
  for (uint64_t number = 0; number < 4; ++number) all.emplace_back(number);
  constexpr uint64_t kRows = 200'000;
  for (uint64_t id = 0; id < kRows; ++id) {
    for (Indexed& one : all) one.add(id);
    if (id < kRows / 2 || id % 1000 != 0) continue;
    size_t num_bytes = 0;
    for (const Indexed& one : all) num_bytes += one.index().num_bytes();
    EXPECT_GT(num_bytes, 4 * id * 6);
    EXPECT_LT(num_bytes, 4 * id * 8);
  }
}

// hash_of_id() is a bijection, so that somebody may choose the hashes of his ids.
std::vector<uint64_t> ids_of(std::span<const uint64_t> hashes) {
  const auto inverse_shift = [](uint64_t x) {
    return x ^ x >> 33;
  };  // of more than half of the bits: its own inverse
  std::vector<uint64_t> ids;
  for (const uint64_t hash : hashes) {
    uint64_t id = inverse_shift(hash);
    id *= 0x9CB4B2F8129337DB;  // the inverse of 0xC4CEB9FE1A85EC53 modulo 2^64
    id = inverse_shift(id);
    id *= 0x4F74430C22A54005;  // that of 0xFF51AFD7ED558CCD
    ids.push_back(inverse_shift(id));
  }
  return ids;
}

TEST(RowIndex, of_ids_that_are_all_of_one_segment_takes_memory_as_they_are_many) {
  std::mt19937_64 random(4);
  std::vector<uint64_t> hashes(30'000);
  for (uint64_t& hash : hashes) {
    hash = random() % (uint64_t{1} << (row_index::kTagBits + row_index::kGroupBits));
  }
  const std::vector<uint64_t> ids = ids_of(hashes);
  ASSERT_EQ(hash_of_id(ids[5]), hashes[5]);
  Indexed rows(0);
  for (const uint64_t id : ids) rows.add(id);
  EXPECT_TRUE(rows.has_all());
  EXPECT_LE(rows.index().num_bytes(), 2 * ids.size() * 12);
}

TEST(RowIndex, has_room_for_the_ids_that_it_was_asked_for_and_no_others) {
  bool is_there = true;
  Indexed rows(0, [&, pool = BufferPool::create(0)](size_t num_bytes) {
    if (!is_there) throw Error(ErrorCode::OUT_OF_MEMORY, "none left");
    return pool->allocate(num_bytes);
  });
  std::mt19937_64 random(3);
  std::vector<uint64_t> ids(50'000);
  for (uint64_t& id : ids) id = random();
  EXPECT_FALSE(rows.index().has_room(ids));
  rows.reserve(ids);
  EXPECT_TRUE(rows.index().has_room(ids));
  is_there = false;
  for (const uint64_t id : ids) rows.insert(id);
  EXPECT_TRUE(rows.has_all());
  std::vector<uint64_t> more(50'000);
  for (uint64_t& id : more) id = random();
  EXPECT_FALSE(rows.index().has_room(more));
  EXPECT_THROW(rows.reserve(more), Error);
  EXPECT_TRUE(rows.has_all());
}

// ---- the store --------------------------------------------------------------------------------------

constexpr RowShape kShape = RowModel::kShape;
constexpr FirstValues kNormal = RowModel::kFirst;

std::vector<float> read(const RowStore& store, const std::vector<uint64_t>& ids,
                        const RowSnapshot* then = nullptr) {
  std::vector<float> values(ids.size() * kShape.dim);
  store.read(ids, reinterpret_cast<std::byte*>(values.data()), then);
  return values;
}

// row_operations.cc does so for as long as one likes.
TEST(RowStore, is_a_dictionary_of_rows_also_as_it_was_when_somebody_holds_it) {
  RowModel rows(4, 4000, 15);
  for (int i = 0; i < 1500; ++i) rows.go_on();
  EXPECT_GT(rows.num_operations(), 100'000u);
  EXPECT_EQ(rows.num_differences(), 0u);
}

TEST(RowStore, reading_makes_no_row) {
  RowStore store(kShape, kNormal, from_pool());
  read(store, {1, 2, 3});
  EXPECT_EQ(store.num_rows(), 0u);
  EXPECT_EQ(store.num_bytes(), 0u);
}

TEST(RowStore, records_of_a_snapshot_make_the_same_store_elsewhere) {
  RowModel rows(5, 6000, 15);
  for (int i = 0; i < 20; ++i) rows.change(rows.some_ids(300));
  const RowSnapshot then = rows.store().snapshot();
  const RowModel::Dictionary before = rows.rows();
  rows.change(rows.some_ids(300));
  RowStore other(kShape, kNormal, from_pool());
  for (size_t first = 0; first < then.num_rows; first += 100) {  // in parts that end within slabs
    const size_t count = std::min<size_t>(100, then.num_rows - first);
    std::vector<std::byte> records(count * kShape.record_bytes());
    rows.store().copy(then, first, count, records.data());
    other.load(records);
  }
  EXPECT_EQ(other.num_rows(), before.size());
  for (const auto& [id, row] : before) {
    std::vector<RowNumber> number(1);
    other.find({&id, 1}, number);
    ASSERT_NE(number[0], kNoRow);
    ASSERT_EQ(std::memcmp(other.value(number[0]), row.data(), row.size() * sizeof(float)), 0);
  }
  std::vector<std::byte> again(kShape.record_bytes());
  rows.store().copy(then, 0, 1, again.data());
  EXPECT_THROW(other.load(again), Error);
  EXPECT_THROW(other.load(std::span(again).first(3)), Error);
}

TEST(RowStore, that_gets_no_memory_changes_no_row) {
  bool is_there = true;
  RowStore store(kShape, kNormal, [&, pool = BufferPool::create(0)](size_t num_bytes) {
    if (!is_there) throw Error(ErrorCode::OUT_OF_MEMORY, "none left");
    return pool->allocate(num_bytes);
  });
  const std::vector<uint64_t> first{1, 2};
  store.reserve(first);
  const RowNumber row = store.add(1, 0);
  store.add(2, 0);
  const RowSnapshot then = store.snapshot();
  is_there = false;
  std::vector<uint64_t> many(100'000);
  std::iota(many.begin(), many.end(), 3);
  EXPECT_FALSE(store.has_room(many));
  EXPECT_THROW(store.reserve(many), Error);
  EXPECT_THROW(store.make_writable(row), Error);
  EXPECT_THROW(store.evict(std::vector<size_t>{0}), Error);
  EXPECT_EQ(store.num_rows(), 2u);
  EXPECT_EQ(read(store, {1, 2, 3}), read(store, {1, 2, 3}, &then));
}

TEST(RowStore, takes_little_memory_beside_its_records) {
  const std::shared_ptr<BufferPool> pool = BufferPool::create(0);
  RowStore store({.dim = 16, .state_elems = 0}, kNormal,
                 [&](size_t num_bytes) { return pool->allocate(num_bytes); });
  constexpr size_t kRows = 100'000;
  for (uint64_t id = 0; id < kRows; ++id) {
    store.reserve({&id, 1});
    store.add(id, 0);
  }
  EXPECT_LE(pool->bytes_in_use(), kRows * (16 * sizeof(float) + 18));
  EXPECT_LE(store.index_bytes(), kRows * 10);
}

// ---- contributions ----------------------------------------------------------------------------------

std::vector<std::byte> contribution(const std::vector<uint64_t>& ids,
                                    const std::vector<float>& gradients) {
  std::vector<std::byte> bytes(ids.size() * sizeof(uint64_t) + gradients.size() * sizeof(float));
  if (ids.empty()) return bytes;
  std::memcpy(bytes.data(), ids.data(), ids.size() * sizeof(uint64_t));
  std::memcpy(bytes.data() + ids.size() * sizeof(uint64_t), gradients.data(),
              gradients.size() * sizeof(float));
  return bytes;
}

float first_of(const Contribution& one) {
  float value;
  std::memcpy(&value, one.data, sizeof value);
  return value;
}

TEST(MergedRows, has_each_id_once_with_its_gradients_in_the_order_of_the_contributions) {
  const auto first = contribution({2, 5, 9}, {20, 50, 90});
  const auto second = contribution({1, 5}, {11, 51});
  const auto third = contribution({}, {});
  const RowContribution all[] = {{first.data(), first.size(), 1, kRowsEncoding, 1.0F},
                                 {second.data(), second.size(), 1, kRowsEncoding, 2.0F},
                                 {third.data(), third.size(), 1, kRowsEncoding, 3.0F}};
  const MergedRows merged{all};
  EXPECT_EQ(merged.ids, (std::vector<uint64_t>{1, 2, 5, 9}));
  ASSERT_EQ(merged.gradients_of(2).size(), 2u);
  EXPECT_EQ(first_of(merged.gradients_of(2)[0]), 50);
  EXPECT_EQ(first_of(merged.gradients_of(2)[1]), 51);
  EXPECT_EQ(merged.gradients_of(2)[1].weight, 2.0F);
  EXPECT_TRUE(all[0].ascends());
  const auto twice = contribution({3, 3}, {1, 1});
  EXPECT_FALSE(RowContribution(twice.data(), twice.size(), 1, kRowsEncoding, 1.0F).ascends());
}

TEST(GroupedIds, tell_whether_ids_are_those_that_were_given_in_their_order) {
  const std::vector<uint64_t> given{7, 3, 7, 1};
  const GroupedIds grouped(given, 3);
  EXPECT_TRUE(grouped.are(given));
  EXPECT_FALSE(grouped.are(std::vector<uint64_t>{3, 7, 7, 1}));
  EXPECT_FALSE(grouped.are(std::vector<uint64_t>{7, 3, 7}));
  EXPECT_FALSE(grouped.are(std::vector<uint64_t>{7, 3, 7, 2}));
  EXPECT_TRUE(GroupedIds({}, 3).are({}));
}

TEST(GroupedIds, packs_each_id_once_by_partition_and_sums_the_others_in_order) {
  std::mt19937_64 random(6);
  for (const int bits : {0, 3, 6, 8}) {
    std::vector<uint64_t> ids;
    for (int i = 0; i < 2000; ++i) ids.push_back(i % 3 == 0 ? random() % 50 : random());
    std::vector<float> gradients;
    for (size_t i = 0; i < 2 * ids.size(); ++i) {
      gradients.push_back(static_cast<float>(random() % 1000) / 7.0F);
    }
    std::unordered_map<uint64_t, std::pair<float, float>> sums;
    for (size_t i = 0; i < ids.size(); ++i) {
      auto [there, is_new] = sums.try_emplace(ids[i], gradients[2 * i], gradients[2 * i + 1]);
      if (is_new) continue;
      there->second.first += gradients[2 * i];
      there->second.second += gradients[2 * i + 1];
    }
    const GroupedIds grouped(ids, bits);
    ASSERT_EQ(grouped.ids().size(), sums.size());
    std::vector<std::byte> packed(grouped.packed_bytes(2, DType::kFloat32));
    grouped.pack(gradients.data(), 2, DType::kFloat32, nullptr, packed.data());
    for (size_t p = 0; p < size_t{1} << bits; ++p) {
      const size_t begin = grouped.begins()[p];
      const size_t count = grouped.begins()[p + 1] - begin;
      const RowContribution of(packed.data() + begin * contributed_row_bytes(2),
                               count * contributed_row_bytes(2), 2, kRowsEncoding, 1.0F);
      EXPECT_TRUE(of.ascends());
      for (size_t i = 0; i < count; ++i) {
        const uint64_t id = of.id(i);
        EXPECT_EQ(bits == 0 ? 0 : hash_of_id(id) >> (64 - bits), p);
        float sum[2];
        std::memcpy(sum, of.gradient(i), sizeof sum);
        EXPECT_EQ(std::pair(sum[0], sum[1]), sums.at(id));
      }
    }
    std::vector<float> rows;
    for (const uint64_t id : grouped.ids()) rows.push_back(static_cast<float>(id % 1009));
    std::vector<float> out(ids.size());
    const auto* const bytes = reinterpret_cast<const std::byte*>(rows.data());
    grouped.scatter(bytes, 1, DType::kFloat32, DType::kFloat32,
                    reinterpret_cast<std::byte*>(out.data()));
    std::vector<BFloat16> halves(ids.size());
    grouped.scatter(bytes, 1, DType::kFloat32, DType::kBFloat16,
                    reinterpret_cast<std::byte*>(halves.data()));
    for (size_t i = 0; i < ids.size(); ++i) {
      EXPECT_EQ(out[i], static_cast<float>(ids[i] % 1009));
      EXPECT_EQ(halves[i].bits, to_bfloat16(out[i]).bits);
    }
  }
}

// ---- codecs -----------------------------------------------------------------------------------------

constexpr DType kCodecs[] = {DType::kBFloat16, DType::kFloat16, DType::kInt8};

TEST(PackedRows, say_with_what_is_kept_what_was_given) {
  std::mt19937_64 random(8);
  constexpr uint32_t kDim = 300;  // two scales of int8
  for (const DType dtype : kCodecs) {
    const std::vector<uint64_t> ids{9, 3, 9, 1ULL << 63};
    std::vector<float> gradients(ids.size() * kDim);
    for (float& element : gradients) element = static_cast<float>(random() % 20001) / 1e4F - 1.0F;
    const GroupedIds grouped(ids, 2);
    const size_t num_rows = grouped.ids().size();
    std::vector<float> residuals(num_rows * kDim, 0.25F);
    std::vector<std::byte> packed(grouped.packed_bytes(kDim, dtype));
    grouped.pack(gradients.data(), kDim, dtype, residuals.data(), packed.data());
    std::vector<std::byte> exact(grouped.packed_bytes(kDim, DType::kFloat32));
    grouped.pack(gradients.data(), kDim, DType::kFloat32, nullptr, exact.data());
    const std::byte* from = packed.data();
    const std::byte* exact_from = exact.data();
    for (size_t p = 0; p < 4; ++p) {
      const size_t begin = grouped.begins()[p];
      const size_t count = grouped.begins()[p + 1] - begin;
      const size_t num_bytes = count * contributed_row_bytes(kDim, dtype);
      const RowContribution of(from, num_bytes, kDim, rows_in(dtype), 1.0F);
      const RowContribution given(exact_from, count * contributed_row_bytes(kDim), kDim,
                                  kRowsEncoding, 1.0F);
      ASSERT_EQ(of.num_rows(), count);
      EXPECT_EQ(of.ids(), given.ids());
      std::vector<float> said(count * kDim);
      decode_rows(dtype, count, kDim, of.gradients(), said.data());
      for (size_t i = 0; i < said.size(); ++i) {
        float element;
        std::memcpy(&element, given.gradients() + i * sizeof element, sizeof element);
        EXPECT_NEAR(said[i] + residuals[begin * kDim + i], element + 0.25F, 1e-6F);
        EXPECT_LT(std::abs(residuals[begin * kDim + i]), 0.02F);
      }
      from += num_bytes;
      exact_from += count * contributed_row_bytes(kDim);
    }
  }
}

TEST(RowsEncodings, are_numbers_of_their_own) {
  for (int number = 0; number < 256; ++number) {
    const auto encoding = static_cast<DType>(number);
    const bool expected = number == 8 || number == 32 + 3 || number == 32 + 4 || number == 32 + 5;
    EXPECT_EQ(is_rows_encoding(encoding), expected) << number;
    if (expected) {
      EXPECT_EQ(rows_in(dtype_of_rows(encoding)), encoding);
    }
  }
}

TEST(RowResiduals, are_those_of_the_ids_that_were_written_last) {
  constexpr size_t kMost = 64;
  RowResiduals residuals(2, kMost);
  std::mt19937_64 random(9);
  std::unordered_map<uint64_t, float> written;
  std::unordered_map<uint64_t, int> last;
  for (int step = 1; step <= 500; ++step) {
    std::vector<uint64_t> ids;
    for (uint64_t id = 0; id < 100; ++id) {
      if (random() % 10 == 0) ids.push_back(id);
    }
    std::vector<float> values;
    for (const uint64_t id : ids) {
      values.insert(values.end(), {static_cast<float>(step), -static_cast<float>(step)});
      written[id] = static_cast<float>(step);
      last[id] = step;
    }
    residuals.write(ids, values.data());
    EXPECT_LE(residuals.num_rows(), kMost);
    std::vector<uint64_t> all(100);
    for (uint64_t id = 0; id < 100; ++id) all[id] = id;
    std::vector<float> found(200);
    residuals.read(all, found.data());
    size_t num_kept = 0;
    for (const uint64_t id : all) {
      if (found[2 * id] == 0) continue;
      ++num_kept;
      EXPECT_EQ(found[2 * id], written[id]);
      EXPECT_EQ(found[2 * id + 1], -written[id]);
    }
    EXPECT_EQ(num_kept, residuals.num_rows());
    for (const uint64_t id : ids) EXPECT_NE(found[2 * id], 0) << "just written";
  }
  std::vector<uint64_t> many(100);
  for (uint64_t id = 0; id < 100; ++id) many[id] = 1000 + id;
  residuals.write(many, std::vector<float>(200, 1).data());
  EXPECT_EQ(residuals.num_rows(), kMost);
}

TEST(RowResiduals, that_were_loaded_forget_what_those_that_were_copied_forget) {
  constexpr size_t kMost = 64;
  RowResiduals residuals(1, kMost);
  std::mt19937_64 random(10);
  const auto write = [&](const std::vector<RowResiduals*>& all) {
    std::vector<uint64_t> ids;
    for (uint64_t id = 0; id < 100; ++id) {
      if (random() % 10 == 0) ids.push_back(id);
    }
    std::vector<float> values;
    for (size_t i = 0; i < ids.size(); ++i) values.push_back(static_cast<float>(random() % 1000));
    for (RowResiduals* one : all) one->write(ids, values.data());
  };
  for (int step = 0; step < 20; ++step) write({&residuals});
  std::vector<uint64_t> ids(residuals.num_rows());
  std::vector<float> values(ids.size());
  std::vector<uint32_t> ages(ids.size());
  residuals.copy(ids.data(), values.data(), ages.data());
  EXPECT_EQ(*std::ranges::min_element(ages), 0u);
  EXPECT_GT(*std::ranges::max_element(ages), 0u);

  RowResiduals again(1, kMost);
  again.load(ids, values.data(), ages.data());
  std::vector<uint64_t> all(100);
  for (uint64_t id = 0; id < 100; ++id) all[id] = id;
  for (int step = 0; step < 50; ++step) {
    std::vector<float> expected(100);
    std::vector<float> found(100);
    residuals.read(all, expected.data());
    again.read(all, found.data());
    ASSERT_EQ(found, expected) << "after " << step << " writes";
    write({&residuals, &again});
  }

  RowResiduals other(1, kMost);
  const std::vector<uint64_t> twice = {7, 7};
  EXPECT_THROW(other.load(twice, values.data(), ages.data()), Error);
  RowResiduals small(1, 2);
  EXPECT_THROW(small.load(std::span(ids).first(3), values.data(), ages.data()), Error);
}

// ---- rules ------------------------------------------------------------------------------------------

TEST(StepRows, gives_the_same_bytes_by_every_instruction_set) {
  std::mt19937_64 random(7);
  const auto number = [&] { return static_cast<float>(random() % 20001) / 1e4F - 1.0F; };
  for (const uint32_t dim : {1u, 3u, 8u, 17u, 64u, 600u}) {
    for (const RuleKind rule :
         {RuleKind::kSparseSgd, RuleKind::kSparseAdagrad, RuleKind::kRowwiseAdagrad,
          RuleKind::kSparseAdam, RuleKind::kSparseMomentum, RuleKind::kFtrl}) {
      Hyper hyper;
      hyper.momentum = 0.9;
      hyper.dampening = 0.1;
      hyper.lr_power = dim == 17 ? -0.25 : -0.5;
      hyper.l1 = 0.1;
      hyper.l2 = 0.05;
      hyper.beta = 1;
      hyper.lr = 0.1;
      hyper.eps = 1e-8;
      hyper.beta1 = 0.9;
      hyper.beta2 = 0.999;
      hyper.maximize = dim == 8;
      std::vector<float> row(dim + row_state_elems(rule, dim));
      for (float& element : row) element = std::abs(number());
      std::vector<std::vector<float>> gradients(3, std::vector<float>(dim));
      std::vector<Contribution> contributions;
      for (auto& gradient : gradients) {
        for (float& element : gradient) element = number();
        contributions.push_back({gradient.data(), DType::kFloat32, 0.5F, 0});
      }
      RowsUpdate update{.rule = rule, .hyper = &hyper, .step = 3, .dim = dim, .divisor = 1.5};
      for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
        update.dtype = dtype;
        const size_t value_bytes = dim * dtype_bytes(dtype);
        std::vector<std::byte> record(value_bytes + row_state_elems(rule, dim) * sizeof(float));
        convert(DType::kFloat32, dtype, row.data(), record.data(), dim);
        std::memcpy(record.data() + value_bytes, row.data() + dim, record.size() - value_bytes);
        std::vector<std::byte> plain = record;
        const RowToStep of_plain{plain.data(), contributions, 5};
        kPlainKernels.step_rows(update, {&of_plain, 1});
        EXPECT_NE(plain, record);
        for (const KernelSet* kernels : runnable_kernels()) {
          std::vector<std::byte> stepped = record;
          const RowToStep of_one{stepped.data(), contributions, 5};
          kernels->step_rows(update, {&of_one, 1});
          EXPECT_EQ(stepped, plain) << kernels->name << ", dim " << dim;
        }
      }
    }
  }
}

}  // namespace
}  // namespace psstore::testing
