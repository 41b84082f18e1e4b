// Frames about rows with any content, put to a shard: each is refused or taken, and nothing worse, which sanitizers see.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "admit.h"
#include "server/frame_calls.h"
#include "wire/rows_asked.h"

namespace psstore {
namespace {

constexpr uint64_t kTable = 1;
constexpr uint64_t kDense = 2;
constexpr uint32_t kTableDim = 3;
constexpr uint32_t kRowBytes = 8 + 4 * kTableDim;
constexpr RowBounds kBounds[] = {
    {.max_rows = 20, .eviction = EvictionKind::kLeastRecent},
    {.max_rows = 7, .eviction = EvictionKind::kLeastFrequent},
    {.eviction = EvictionKind::kTimeToLive, .time_to_live = 20},
    {.max_rows = 20},
    {.max_rows = 20,
     .eviction = EvictionKind::kLeastRecent,
     .admission = AdmissionKind::kAfter,
     .admit_after = 2},
    {.max_rows = 5, .admission = AdmissionKind::kProbability, .admit_probability = 0.5}};
constexpr uint64_t kLastTable = kDense + std::size(kBounds);

class RowFrames : public ::testing::Test {
 protected:
  RowFrames() {
    TensorDefinition table{kTable, DType::kFloat32, RuleKind::kSparseAdagrad, 0, true, {}};
    for (uint64_t p = 0; p < 4; ++p) table.slices.push_back({make_key(kTable, p), 0});
    table.rows = {kTableDim, {FirstValueKind::kNormal, 0, 1, 7}};
    shard_.define(table);
    // Bounded ones, which all that is true of the first is true of as well.
    for (const RowBounds& bounds : kBounds) {
      TensorDefinition bounded = table;
      bounded.tensor_id = kDense + 1 + static_cast<uint64_t>(&bounds - kBounds);
      for (uint64_t p = 0; p < 4; ++p) bounded.slices[p].key = make_key(bounded.tensor_id, p);
      bounded.rows.bounds = bounds;
      bounded.dtype = bounded.tensor_id % 2 == 0 ? DType::kBFloat16 : DType::kFloat32;
      shard_.define(bounded);
    }
    shard_.define({kDense, DType::kFloat32, RuleKind::kSgd, 1, true, {{make_key(kDense, 0), 5}}});
  }

  uint64_t draw(uint64_t most) { return random_() % (most + 1); }

  // What rows travel in, pushed or read.
  DType any_encoding(Op op) {
    static constexpr DType kDTypes[] = {DType::kFloat32, DType::kFloat32, DType::kFloat16,
                                        DType::kBFloat16, DType::kInt8};
    const DType dtype = kDTypes[op == Op::kASSIGN ? 0 : draw(std::size(kDTypes) - 1)];
    return op == Op::kPULL_ROWS ? dtype : rows_in(dtype);
  }

  static size_t bytes_of_a_row(DType encoding) {
    return is_rows_encoding(encoding) ? contributed_row_bytes(kTableDim, dtype_of_rows(encoding))
                                      : kRowBytes;
  }

  SliceEntry any_entry(Op op) {
    const uint64_t tensor = draw(1) != 0 ? kTable : kTable + draw(std::size(kBounds) + 1);
    SliceEntry entry{.key = make_key(tensor, draw(tensor == kDense ? 1 : 4))};
    entry.dtype = draw(9) != 0 ? any_encoding(op) : DType{static_cast<uint8_t>(draw(50))};
    if (op == Op::kPULL_ROWS || op == Op::kLIST_ROWS) {
      entry.version = draw(20) == 0 ? random_() : draw(12);
      entry.part = static_cast<uint16_t>(op == Op::kLIST_ROWS ? draw(2) : 0);
    } else {
      const size_t row_bytes = bytes_of_a_row(entry.dtype);
      entry.num_bytes = static_cast<uint32_t>(draw(9) != 0 ? row_bytes * draw(6) : draw(150));
    }
    return entry;
  }

  std::vector<std::byte> any_bytes(size_t num_bytes) {
    std::vector<std::byte> bytes(num_bytes);
    for (std::byte& byte : bytes) byte = static_cast<std::byte>(random_());
    return bytes;
  }

  // Contributions whose ids ascend, mostly.
  void fill(const std::vector<SliceEntry>& entries, std::byte* to) {
    for (const SliceEntry& entry : entries) {
      const std::vector<std::byte> bytes = any_bytes(entry.num_bytes);
      if (!bytes.empty()) std::memcpy(to, bytes.data(), bytes.size());
      uint64_t id = draw(100);
      const size_t num_rows = entry.num_bytes / bytes_of_a_row(entry.dtype);
      for (size_t i = 0; draw(9) != 0 && i < num_rows; ++i) {
        std::memcpy(to + i * sizeof id, &id, sizeof id);
        id += 1 + draw(50);
      }
      to += entry.num_bytes;
    }
  }

  Frame any_frame() {
    static constexpr Op kOps[] = {Op::kPUSH, Op::kPUSH,    Op::kPULL_ROWS, Op::kPULL_ROWS,
                                  Op::kINIT, Op::kADD,     Op::kASSIGN,    Op::kASSIGN,
                                  Op::kPULL, Op::kRESTORE, Op::kNORM,      Op::kLIST_ROWS};
    Frame frame;
    frame.header.op = kOps[draw(std::size(kOps) - 1)];
    frame.header.incarnation = 1;
    frame.header.round = round_;
    frame.header.sequence = draw(9) != 0 ? shard_.last_sequence("somebody") + 1 : draw(3);
    std::vector<SliceEntry> entries(draw(5));
    for (SliceEntry& entry : entries) entry = any_entry(frame.header.op);
    frame.header.payload_bytes = total_bytes(entries) + (draw(30) == 0 ? 1 : 0);
    frame.table = SliceTable(entries);
    const std::vector<std::byte> body = any_bytes(draw(40) * (draw(9) == 0 ? 1 : sizeof(uint64_t)));
    frame.body.assign(reinterpret_cast<const char*>(body.data()), body.size());
    return frame;
  }

  void put(Frame& frame) {
    const std::vector<SliceEntry> entries(frame.table.begin(), frame.table.end());
    try {
      carry_of(frame);
      if (frame.header.op == Op::kPULL_ROWS || frame.header.op == Op::kPULL ||
          frame.header.op == Op::kNORM || frame.header.op == Op::kLIST_ROWS) {
        const ReadReply reply = read(shard_, frame);
        uint64_t num_bytes = 0;
        for (const Piece& piece : reply.values.pieces) num_bytes += piece.num_bytes;
        EXPECT_EQ(num_bytes, reply.table.payload_bytes());
        ++num_read_;
        return;
      }
      frame.payload = admit(shard_, frame);
      if (frame.payload) fill(entries, frame.payload->data());
      write(shard_, frame, "somebody");
      ++num_written_;
    } catch (const Error&) {
      ++num_refused_;
    }
  }

  void decide() {
    const Member member{{0, 1, round_}, 1.0F, {{kTable, kLastTable}}};
    const std::map<std::string, double> adagrad{{"lr", 0.1},
                                                {"lr_decay", 0},
                                                {"initial_accumulator_value", 0},
                                                {"eps", 1e-8},
                                                {"maximize", 0}};
    const std::map<std::string, double> sgd{{"lr", 0.1},         {"momentum", 0}, {"dampening", 0},
                                            {"weight_decay", 0}, {"nesterov", 0}, {"maximize", 0}};
    shard_.advance(Decision(round_, false, 1.0, {member}, {{0, adagrad}, {1, sgd}}));
    ++round_;
  }

  Shard shard_{ShardOptions{}};
  std::mt19937_64 random_{11};
  uint64_t round_ = 1;
  int num_read_ = 0;
  int num_written_ = 0;
  int num_refused_ = 0;
};

TEST_F(RowFrames, of_any_content_are_refused_or_taken_and_nothing_worse) {
  for (int i = 0; i < 20'000; ++i) {
    Frame frame = any_frame();
    put(frame);
    if (i % 40 == 0) decide();
  }
  EXPECT_GT(num_read_, 1000);
  EXPECT_GT(num_written_, 1000);
  EXPECT_GT(num_refused_, 1000);
  EXPECT_GT(shard_.stats().at("rows"), 100u);
  EXPECT_GT(shard_.stats().at("rows_evicted"), 100u);
  EXPECT_GT(shard_.stats().at("rows_refused"), 100u);
  EXPECT_LT(shard_.stats().at("rows"), 20'000u * 30);
}

TEST_F(RowFrames, that_ask_for_more_ids_than_they_have_are_bad_bodies) {
  Frame frame;
  frame.header.op = Op::kPULL_ROWS;
  frame.table = SliceTable({SliceEntry{.key = make_key(kTable, 0), .version = UINT64_MAX},
                            SliceEntry{.key = make_key(kTable, 1), .version = 2}});
  frame.body.assign(16, '\0');
  EXPECT_THROW(carry_of(frame), Error);
  EXPECT_THROW(read(shard_, frame), Error);
}

TEST_F(RowFrames, leave_what_admission_has_counted_to_those_who_hold_a_decision) {
  const Key key = make_key(kDense + 5, 0);  // the table that counts
  const auto train = [&](uint64_t id) {
    std::vector<SliceEntry> entries{{.key = key, .num_bytes = kRowBytes, .dtype = kRowsEncoding}};
    const BufferRef payload = testing::admit(shard_, WriteKind::kPush, entries, kRowBytes);
    std::memset(payload->data(), 0, payload->size());
    std::memcpy(payload->data(), &id, sizeof id);
    shard_.stage({0, 1, round_}, entries, payload);
    decide();
  };
  const auto parts_of = [&](uint64_t reader, uint64_t at) {
    const TableImage image = shard_.image(reader, at).value();
    const auto slot = std::ranges::find(image.slots, key, &SlotImage::key);
    std::vector<std::pair<Key, uint16_t>> wanted{{key, kCountedPart}};
    if (slot->num_rows() > 0) wanted.insert(wanted.begin(), {key, 0});
    std::string bytes;
    for (const Piece& piece : shard_.read(image, wanted).pieces) {
      bytes.append(reinterpret_cast<const char*>(piece.buffer->data()), piece.num_bytes);
    }
    return bytes;
  };
  train(7);
  ASSERT_EQ(shard_.hold(1, true), 1u);
  const std::string once = parts_of(1, 1);
  train(8);
  train(7);
  EXPECT_EQ(parts_of(1, 1), once);
  shard_.hold(2, true);
  const RowShape shape = row_shape_of(RuleKind::kSparseAdagrad, kTableDim, DType::kFloat32, true);
  EXPECT_EQ(parts_of(2, 3).size(), once.size() + shape.record_bytes());
  EXPECT_EQ(shard_.stats().at("rows"), 1u);
  EXPECT_EQ(shard_.stats().at("rows_refused"), 2u);
}

TEST_F(RowFrames, make_an_id_a_row_once_whatever_becomes_of_memory_that_a_client_shares) {
  const auto set_ids = [](const BufferRef& payload, std::array<uint64_t, 3> ids) {
    std::memcpy(payload->data(), ids.data(), sizeof ids);
  };
  std::vector<SliceEntry> entries{
      {.key = make_key(kTable, 0), .num_bytes = 3 * kRowBytes, .dtype = kRowsEncoding}};
  const BufferRef payload = testing::admit(shard_, WriteKind::kPush, entries, 3 * kRowBytes);
  std::memset(payload->data(), 0, payload->size());
  set_ids(payload, {3, 4, 5});
  shard_.stage({0, 1, round_}, entries, payload);
  ASSERT_EQ(entries[0].status, ErrorCode::OK);
  set_ids(payload, {5, 3, 5});
  decide();
  shard_.settle(-1);
  EXPECT_EQ(shard_.stats().at("rows"), 2u);
}

TEST_F(RowFrames, have_the_status_of_each_partition) {
  Frame frame;
  frame.header.op = Op::kPUSH;
  frame.header.incarnation = 1;
  frame.header.round = 1;
  const std::vector<SliceEntry> entries{
      {.key = make_key(kTable, 0), .num_bytes = kRowBytes, .dtype = kRowsEncoding},
      {.key = make_key(kTable, 1), .num_bytes = kRowBytes - 1, .dtype = kRowsEncoding},
      {.key = make_key(kTable, 2), .num_bytes = kRowBytes, .dtype = DType::kFloat32},
      {.key = make_key(kDense, 0), .num_bytes = 20, .dtype = kRowsEncoding},
      {.key = make_key(kTable, 9), .num_bytes = kRowBytes, .dtype = kRowsEncoding},
      {.key = make_key(kTable, 3), .num_bytes = 2 * kRowBytes, .dtype = kRowsEncoding}};
  frame.table = SliceTable(entries);
  frame.header.payload_bytes = total_bytes(entries);
  frame.payload = admit(shard_, frame);
  ASSERT_TRUE(frame.payload);
  std::memset(frame.payload->data(), 0, frame.payload->size());  // twice id 0 in the last one
  const SliceTable answer = write(shard_, frame, "");
  const ErrorCode expected[] = {ErrorCode::OK,
                                ErrorCode::SIZE_MISMATCH,
                                ErrorCode::DTYPE_MISMATCH,
                                ErrorCode::DTYPE_MISMATCH,
                                ErrorCode::UNKNOWN_KEY,
                                ErrorCode::BAD_ARGUMENT};
  for (size_t i = 0; i < answer.size(); ++i) EXPECT_EQ(answer[i].status, expected[i]) << i;
}

}  // namespace
}  // namespace psstore
