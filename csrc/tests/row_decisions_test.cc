// What is read of an image that has changes alone: with what there was before it makes all that there is.
#include <gtest/gtest.h>

#include <array>
#include <optional>
#include <vector>

#include "core/errors.h"
#include "random_rows.h"
#include "rows/overlay.h"
#include "rows/row_store.h"

namespace psstore {
namespace {

using Bytes = std::vector<std::byte>;

constexpr uint64_t kReader = 7;

class ChangedRowsTest : public testing::RandomRowsTest {
 protected:
  explicit ChangedRowsTest(const RowBounds& bounds = {}, uint64_t max_kept_bytes = 1 << 20)
      : RandomRowsTest(bounds, {.max_kept_bytes = max_kept_bytes, .notes_row_decisions = true}),
        record_bytes(kIdBytes + kDim * sizeof(float) +
                     (bounds.eviction == EvictionKind::kNone ? 0 : sizeof(uint32_t))) {}

  Key key(size_t partition) const { return make_key(table_id, partition); }

  TableImage cut() {
    shard->hold(kReader, true);
    return *shard->image(kReader, shard->version());
  }
  Bytes read(const TableImage& image, size_t partition) {
    const std::pair<Key, uint16_t> wanted{key(partition), 0};
    Bytes bytes;
    for (const Piece& piece : shard->read(image, {&wanted, 1}).pieces) {
      bytes.insert(bytes.end(), piece.buffer->data(), piece.buffer->data() + piece.num_bytes);
    }
    return bytes;
  }
  static bool has_rows(const TableImage& image, size_t partition) {
    return image.slots[partition].num_rows() > 0;
  }

  // Partitions as they were once.
  struct Base {
    uint64_t at = 0;
    std::array<Bytes, kPartitions> records;
  };

  Base base_of(const TableImage& image) {
    Base base{image.at, {}};
    for (size_t p = 0; p < kPartitions; ++p) {
      if (has_rows(image, p)) base.records[p] = read(image, p);
    }
    return base;
  }

  // Reads all of a partition, and what changed since the base, and holds the one to the other.
  void check(const TableImage& image, size_t partition, const Base& base) {
    const Bytes whole = read(image, partition);
    TableImage changes = image;
    num_rows += whole.size() / record_bytes;
    num_chosen += shard->choose_changed(changes, key(partition), base.at);
    Bytes laid_over(whole.size());
    overlay_rows(base.records[partition], read(changes, partition), record_bytes, laid_over);
    EXPECT_EQ(laid_over, whole) << "of decision " << image.at << " since " << base.at;
  }

  void change(size_t num_times) {
    for (size_t i = 0; i < num_times; ++i) {
      if (random() % 3 > 0) {
        step();
      } else {
        const size_t p = random() % kPartitions;
        assign(some_ids(p, 4), p);
      }
    }
  }

  const size_t record_bytes;
  size_t num_rows = 0;
  size_t num_chosen = 0;
};

class AnyChangedRows : public ChangedRowsTest, public ::testing::WithParamInterface<RowBounds> {
 protected:
  AnyChangedRows() : ChangedRowsTest(GetParam()) {}
};

TEST_P(AnyChangedRows, make_with_any_earlier_cut_what_a_copy_of_all_is) {
  std::vector<Base> bases(1);
  for (int i = 0; i < 150; ++i) {
    change(random() % 4);
    const TableImage image = cut();
    if (random() % 2 == 0) step();  // what is read is kept as it was
    for (size_t p = 0; p < kPartitions; ++p) {
      if (has_rows(image, p)) check(image, p, bases[random() % bases.size()]);
    }
    if (random() % 2 == 0) bases.push_back(base_of(image));
    if (bases.size() > 6) bases.erase(bases.begin());
    shard->release_hold(kReader);
  }
  EXPECT_LT(num_chosen, num_rows);
}

INSTANTIATE_TEST_SUITE_P(Bounds, AnyChangedRows, ::testing::ValuesIn(testing::kAnyBounds));

TEST_F(ChangedRowsTest, are_those_that_were_assigned_at_the_decision_of_the_base) {
  step();
  const Base base = base_of(cut());
  shard->release_hold(kReader);
  const std::vector<uint64_t> ids = some_ids(0, 6);
  assign(ids, 0);
  TableImage image = cut();
  EXPECT_EQ(shard->choose_changed(image, key(0), base.at), ids.size());
}

TEST_F(ChangedRowsTest, are_gone_where_others_were_assigned_meanwhile) {
  step();
  const TableImage all = cut();
  TableImage changes = all;
  shard->choose_changed(changes, key(0), 0);
  assign(some_ids(0, 6), 0);
  EXPECT_THROW(read(changes, 0), Error);
  EXPECT_THROW(shard->choose_changed(changes, key(0), 0), Error);
  EXPECT_THROW(read(all, 0), Error);
  EXPECT_THROW(read(all, 1), Error) << "its rows were not assigned, and are of another moment";
}

TEST_F(ChangedRowsTest, of_rows_that_were_loaded_are_all_since_before_and_none_since_then) {
  change(20);
  const Base base = base_of(cut());
  const SlotImage there = shard->image(kReader, base.at)->slots[0];

  ShardOptions options;
  options.notes_row_decisions = true;
  shard = std::make_unique<Shard>(options);
  shard->set_version(base.at);
  table_id = 0;
  define({});
  const BufferRef records = shard->allocate(base.records[0].size());
  std::memcpy(records->data(), base.records[0].data(), base.records[0].size());
  shard->load(there, {&records, 1});

  const TableImage image = cut();
  TableImage since_then = image;
  TableImage since_before = image;
  EXPECT_EQ(shard->choose_changed(since_then, key(0), there.version), 0);
  EXPECT_EQ(shard->choose_changed(since_before, key(0), base.at - 1), there.num_rows());
}

class ChangedWithoutRoom : public ChangedRowsTest {
 protected:
  ChangedWithoutRoom() : ChangedRowsTest({}, 100) {}
};

TEST_F(ChangedWithoutRoom, are_all_since_before_the_last_change) {
  Base base;
  for (int i = 0; i < 20; ++i) {
    step();
    const TableImage image = cut();
    for (size_t p = 0; p < kPartitions; ++p) {
      if (has_rows(image, p)) check(image, p, base);
    }
    base = base_of(image);
    shard->release_hold(kReader);
  }
  EXPECT_EQ(num_chosen, num_rows);
}

TEST(Overlay, of_rows_that_are_nowhere_is_refused) {
  const uint64_t ids[] = {4, 5};
  const std::span<const std::byte> bytes = std::as_bytes(std::span(ids));
  Bytes records(bytes.size());
  overlay_rows(bytes, bytes, kIdBytes, records);  // both are in the base
  EXPECT_TRUE(std::ranges::equal(records, bytes));
  EXPECT_THROW(overlay_rows(bytes.first(kIdBytes), bytes, kIdBytes, records), Error);
  EXPECT_THROW(overlay_rows(bytes, bytes.first(kIdBytes), kIdBytes, records), Error);
  EXPECT_THROW(overlay_rows(bytes, bytes, 0, records), Error);
  const uint64_t more[] = {4, 5, 6};
  EXPECT_THROW(overlay_rows(bytes, std::as_bytes(std::span(more)), kIdBytes, records), Error)
      << "a change of a row that is not there";
}

}  // namespace
}  // namespace psstore
