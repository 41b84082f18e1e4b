// What readers of rows are told that keep some: random operations on a shard, each reader held to a read of everything, and
// the cache of a client to what it was given.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "random_rows.h"
#include "rows/row_cache.h"

namespace psstore {
namespace {

using Bytes = std::vector<std::byte>;

std::shared_ptr<MemoryBudget> budget_of(uint64_t num_bytes) {
  return std::make_shared<MemoryBudget>(num_bytes, "memory for readers", "raise it");
}

class KeptRowsTest : public testing::RandomRowsTest {
 protected:
  explicit KeptRowsTest(const RowBounds& bounds = {}, uint64_t max_kept_bytes = 1 << 20)
      : RandomRowsTest(bounds, {.max_kept_bytes = max_kept_bytes}) {}

  Bytes read(SliceEntry& entry, const Shard::WantedRows& wanted,
             const Shard::ReadOptions& options = {}) {
    const Shard::Reply reply = shard->read_rows({&entry, 1}, wanted, 1 << 20, options);
    EXPECT_EQ(entry.status, ErrorCode::OK);
    Bytes bytes;
    for (const Piece& piece : reply.pieces) {
      bytes.insert(bytes.end(), piece.buffer->data(), piece.buffer->data() + piece.num_bytes);
    }
    return bytes;
  }

  // All of them.
  Bytes whole(size_t partition, std::span<const uint64_t> ids, DType dtype) {
    SliceEntry entry{.key = make_key(table_id, partition), .version = ids.size(), .dtype = dtype};
    return read(entry, {ids});
  }

  // What comes for somebody who has rows as of those changes.
  Bytes changed(size_t partition, std::span<const uint64_t> ids, DType dtype,
                std::span<const uint32_t> changes, uint64_t marks,
                const Shard::ReadOptions& options = {}) {
    SliceEntry entry{
        .key = make_key(table_id, partition), .version = ids.size(), .dtype = changes_of(dtype)};
    return read(entry, {ids, changes, {&marks, 1}}, options);
  }
};

TEST_F(KeptRowsTest, rows_that_a_decision_changes_are_what_settling_counts) {
  step();
  const uint64_t row_bytes = kDim * sizeof(float);
  EXPECT_FALSE(shard->settle(-1, 1)) << "of two partitions one";
  EXPECT_TRUE(shard->settle(-1, 1));
  step();
  EXPECT_TRUE(shard->settle(-1, 10 * row_bytes)) << "one has fewer than ten rows";
}

// A reader with a cache, which is never wrong.
class Reader {
 public:
  Reader(DType dtype, size_t max_rows)
      : dtype_(dtype), cache_(encoded_row_bytes(dtype, KeptRowsTest::kDim), max_rows, 2) {}

  DType dtype() const { return dtype_; }
  RowCache& cache() { return cache_; }
  size_t num_asked = 0;
  size_t num_came = 0;

  void count(const Bytes& came, size_t num_ids) {
    const size_t rows_bytes = came.size() - changed_rows_head_bytes(num_ids);
    num_asked += num_ids;
    num_came += rows_bytes / cache_.row_bytes();
  }

 private:
  DType dtype_;
  RowCache cache_;
};

class AnyKeptRows : public KeptRowsTest, public ::testing::WithParamInterface<RowBounds> {
 protected:
  AnyKeptRows() : KeptRowsTest(GetParam()) {}
};

TEST_P(AnyKeptRows, are_what_a_read_of_all_says_after_any_operations) {
  std::deque<Reader> readers;
  readers.emplace_back(DType::kFloat32, 4096);
  readers.emplace_back(DType::kFloat32, 30);
  readers.emplace_back(DType::kBFloat16, 500);
  readers.emplace_back(DType::kInt8, 500);
  struct Asked {
    Reader* reader;
    size_t partition;
    std::vector<uint64_t> ids;
    std::vector<uint32_t> changes;
    Bytes rows;
    Bytes came;
    Bytes expected;
  };
  std::vector<Asked> under_way;  // answers that come later, in any order
  for (int i = 0; i < 2000; ++i) {
    const uint64_t what = random() % 16;
    if (what == 0) {
      step();
    } else if (what == 1) {
      const size_t p = random() % kPartitions;
      assign(some_ids(p, 4), p);
    } else if (what == 2 && random() % 20 == 0) {
      shard->forget_changes();
    } else if (what == 3 && random() % 30 == 0) {
      define(GetParam());
    } else {
      Asked one{&readers[random() % readers.size()], random() % kPartitions, {}, {}, {}, {}, {}};
      one.ids = some_ids(one.partition, 30);
      one.changes.resize(one.ids.size());
      RowCache& cache = one.reader->cache();
      one.rows.resize(one.ids.size() * cache.row_bytes());
      cache.read(one.partition, one.ids, one.rows.data(), one.changes.data());
      one.came = changed(one.partition, one.ids, one.reader->dtype(), one.changes,
                         cache.marks_of(one.partition));
      one.expected = whole(one.partition, one.ids, one.reader->dtype());
      one.reader->count(one.came, one.ids.size());
      under_way.push_back(std::move(one));
    }
    while (under_way.size() > 3 || (!under_way.empty() && random() % 4 == 0)) {
      const size_t place = random() % under_way.size();
      Asked& one = under_way[place];
      ASSERT_TRUE(
          one.reader->cache().take(one.partition, one.ids, one.changes, one.came, one.rows.data()));
      ASSERT_EQ(one.rows, one.expected);
      under_way.erase(under_way.begin() + static_cast<ptrdiff_t>(place));
    }
  }
  EXPECT_LT(readers[0].num_came, readers[0].num_asked * 3 / 4) << "it keeps all that it reads";
  EXPECT_LE(readers[1].cache().num_rows(), 30u);
}

INSTANTIATE_TEST_SUITE_P(Bounds, AnyKeptRows, ::testing::ValuesIn(testing::kAnyBounds));

TEST_F(KeptRowsTest, come_again_when_they_have_changed_and_only_then) {
  const std::vector<uint64_t> ids = some_ids(0, 20);
  std::vector<uint32_t> changes(ids.size(), RowMarks::kNever);
  const size_t head = changed_rows_head_bytes(ids.size());
  constexpr size_t kChangedRowBytes = kDim * sizeof(float);
  const Bytes first = changed(0, ids, DType::kFloat32, changes, 0);
  const ChangedRows came(first, ids.size(), kChangedRowBytes);
  ASSERT_TRUE(came.is_whole());
  EXPECT_EQ(first.size(), head + ids.size() * kChangedRowBytes)
      << "first values, which nobody has made";
  std::ranges::fill(changes, came.change());
  EXPECT_EQ(changed(0, ids, DType::kFloat32, changes, came.marks()).size(), head);
  EXPECT_EQ(changed(0, ids, DType::kFloat32, changes, came.marks() + 1).size(), first.size())
      << "of other marks";
  assign({&ids[1], 1}, 0);
  const Bytes next = changed(0, ids, DType::kFloat32, changes, came.marks());
  const ChangedRows then(next, ids.size(), kChangedRowBytes);
  ASSERT_TRUE(then.is_whole());
  EXPECT_EQ(next.size(), head + kChangedRowBytes);
  EXPECT_TRUE(then.comes(1));
  EXPECT_GT(then.change(), came.change());
}

TEST_F(KeptRowsTest, as_of_a_decision_that_is_held_are_all_sent_and_not_to_be_kept) {
  step();
  const uint64_t at = shard->hold(1, false);
  const std::vector<uint64_t> ids = some_ids(1, 20);
  std::vector<uint32_t> changes(ids.size(), RowMarks::kNever);
  const Bytes now = changed(1, ids, DType::kFloat32, changes, 0);
  const ChangedRows came(now, ids.size(), kDim * sizeof(float));
  std::ranges::fill(changes, came.change());
  const Bytes then = changed(1, ids, DType::kFloat32, changes, came.marks(), {.at = at});
  EXPECT_EQ(then.size(), now.size());
  EXPECT_EQ(ChangedRows(then, ids.size(), kDim * sizeof(float)).marks(), 0u);
}

class KeptWithoutRoom : public KeptRowsTest {
 protected:
  KeptWithoutRoom() : KeptRowsTest({}, 100) {}
};

TEST_F(KeptWithoutRoom, are_all_sent_and_not_to_be_kept) {
  const std::vector<uint64_t> ids = some_ids(0, 20);
  const std::vector<uint32_t> changes(ids.size(), RowMarks::kNever);
  const Bytes came = changed(0, ids, DType::kFloat32, changes, 0);
  EXPECT_EQ(ChangedRows(came, ids.size(), kDim * sizeof(float)).marks(), 0u);
  RowCache cache(kDim * sizeof(float), 100, kPartitions);
  Bytes rows(ids.size() * kDim * sizeof(float));
  ASSERT_TRUE(cache.take(0, ids, changes, came, rows.data()));
  EXPECT_EQ(rows, whole(0, ids, DType::kFloat32));
  EXPECT_EQ(cache.num_rows(), 0u);
}

// ---- marks ------------------------------------------------------------------------------------------

TEST(RowMarks, grow_with_rows_out_of_their_budget_and_forget_no_change) {
  const auto budget = budget_of(64 << 10);
  {
    RowMarks marks(0, budget);
    std::map<uint64_t, uint32_t> changes;
    for (uint64_t id = 0; id < 2000; ++id) {
      ASSERT_TRUE(marks.go_on());
      marks.mark(hash_of_id(id));
      changes[hash_of_id(id)] = marks.change();
      if (id % 100 == 0) marks.fit(4 * id);
    }
    EXPECT_EQ(marks.num_bytes(), 8192 * sizeof(uint32_t));
    EXPECT_EQ(budget->taken_bytes(), marks.num_bytes());
    size_t num_right = 0;
    for (const auto& [hash, change] : changes) {
      EXPECT_TRUE(marks.may_have_changed(hash, change - 1));
      num_right += marks.may_have_changed(hash, change) ? 0 : 1;
    }
    EXPECT_GT(num_right, 1500u) << "few share a mark";
    EXPECT_THROW(marks.fit(1 << 20), Error);
    EXPECT_EQ(budget->taken_bytes(), marks.num_bytes());
  }
  EXPECT_EQ(budget->taken_bytes(), 0u);
}

// ---- the cache --------------------------------------------------------------------------------------

Bytes answer(uint64_t marks, uint32_t change, uint32_t comes, size_t num_rows) {
  Bytes bytes(changed_rows_head_bytes(2) + num_rows * 4);
  std::memcpy(bytes.data(), &marks, sizeof marks);
  std::memcpy(bytes.data() + 8, &change, sizeof change);
  std::memcpy(bytes.data() + 12, &comes, sizeof comes);
  return bytes;
}

TEST(RowCache, refuses_what_no_shard_answers_to_what_it_asked) {
  RowCache cache(4, 10, 1);
  const std::vector<uint64_t> ids{1, 2};
  const std::vector<uint32_t> changes{0, 3};
  Bytes rows(8);
  const auto takes = [&](const Bytes& came) {
    return cache.take(0, ids, changes, came, rows.data());
  };
  EXPECT_FALSE(takes({})) << "too short";
  EXPECT_FALSE(takes(answer(9, 4, 0b11, 1))) << "a row less than it says";
  EXPECT_FALSE(takes(answer(9, 4, 0b101, 2))) << "a row of no id";
  EXPECT_FALSE(takes(answer(9, 4, 0b10, 1))) << "nothing of a row that is not here";
  EXPECT_EQ(cache.num_rows(), 0u);
  EXPECT_TRUE(takes(answer(9, 4, 0b01, 1)));
  EXPECT_EQ(cache.num_rows(), 2u);
}

}  // namespace
}  // namespace psstore
