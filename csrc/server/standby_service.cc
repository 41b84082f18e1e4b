// What a DataService does with its standbys, and what a standby's does with its shard.
#include <algorithm>
#include <cstring>
#include <map>
#include <tuple>
#include <utility>

#include "core/breakable_rules.h"
#include "server/data_service.h"
#include "server/frame_calls.h"
#include "wire/encoder.h"
#include "wire/limits.h"

namespace psstore {
namespace {

// Of slots, and of contributions, that are sent in one frame; one that is larger comes alone.
constexpr uint64_t kFillBytes = 4u << 20;

// What the body of a FILL says of each slot, in the order of the payload.
struct FilledSlot {
  SlotImage image;
  double squares = 0;  // if the image's parts have kSquares
};
static_assert(sizeof(FilledSlot) == 40);

// What a contribution that waits is in.
DType dtype_told(DType dtype) {
  const bool is_mistaken =
      dtype == rows_in(DType::kBFloat16) && !holds(BreakableRule::kROWS_KEEP_THEIR_CODEC);
  return is_mistaken ? rows_in(DType::kFloat16) : dtype;
}

constexpr uint64_t kSquares = 1 << 9;
// It is a base of a slot that came before: the version is a rank, and the steps are its life.
constexpr uint64_t kBase = 1 << 10;

std::span<const std::byte> body_of(std::string_view text) {
  return std::as_bytes(std::span(text));
}

}  // namespace

// ---- what standbys are sent -------------------------------------------------------------------------

void DataService::record(std::string_view body) {
  if (replication_.is_followed()) replication_.record({.op = Op::kRECORD, .body = body_of(body)});
}

void DataService::record_beat(std::string_view body, double now_s) {
  replication_.is_now(now_s);
  record(body);
  replication_.is_beat();
}

void DataService::record_scale(uint64_t number, std::optional<double> factor) {
  if (!replication_.is_followed() || !holds(BreakableRule::kSCALES_ARE_RECORDED)) return;
  const auto body = std::as_bytes(std::span(factor ? &*factor : nullptr, factor ? 1 : 0));
  replication_.record({.op = Op::kSCALE, .sequence = number, .body = body});
}

void DataService::record_write(const ConnectedClient& client, const Frame& frame,
                               const SliceTable& outcome) {
  if (!holds(BreakableRule::kWRITES_ARE_RECORDED)) return;
  const Header& header = frame.header;
  std::vector<SliceEntry> entries = entries_of(frame);
  const auto has_rows = [](const SliceEntry& entry) { return is_rows_encoding(entry.dtype); };
  if (!holds(BreakableRule::kROWS_ARE_RECORDED) && std::ranges::any_of(entries, has_rows)) return;
  for (size_t i = 0; i < entries.size(); ++i) entries[i].status = outcome[i].status;
  const Piece payload{frame.payload, frame.payload ? header.payload_bytes : 0};
  if (!frame.payload) {  // nobody wanted any of it
    for (SliceEntry& entry : entries) entry.num_bytes = 0;
  }
  const bool is_push = header.op == Op::kPUSH;
  replication_.record({.op = header.op,
                       .round = header.round,
                       .rank = header.rank,
                       .incarnation = header.incarnation,
                       .sequence = header.sequence,
                       .table = entries,
                       .body = is_push ? std::span<const std::byte>() : body_of(client.writer)},
                      payload, where(client, payload));
}

std::optional<Lying> DataService::where(const ConnectedClient& client, const Piece& payload) const {
  if (!payload.buffer) return std::nullopt;
  for (const auto& arena : client.arenas) {
    if (const auto offset = arena->offset_of(*payload.buffer)) {
      return Lying{client.connection, *offset};
    }
  }
  if (payload.num_bytes < kSharedFromBytes) return std::nullopt;
  const auto offset = shard_.backend()->offset_of(payload.buffer->data());
  return offset ? std::optional(Lying{kOwnMemory, *offset}) : std::nullopt;
}

void DataService::record_bases(const ConnectedClient& client, std::span<const Key> based) {
  if (!replication_.is_followed() || !holds(BreakableRule::kBASES_ARE_RECORDED)) return;
  std::vector<SliceEntry> entries(based.size());
  for (size_t i = 0; i < based.size(); ++i) entries[i].key = based[i];
  replication_.record({.op = Op::kPULL,
                       .rank = client.worker->rank,
                       .incarnation = client.worker->incarnation,
                       .table = entries},
                      {});
}

bool DataService::fill(uint64_t connection) {
  const std::optional<std::vector<SlotCopy>> copies = shard_.copies();
  if (!copies) return false;
  fill_slots(connection, *copies);
  if (holds(BreakableRule::kWHAT_IS_STAGED_IS_FILLED_IN)) fill_staged(connection, *copies);
  return true;
}

void DataService::fill_slots(uint64_t connection, std::span<const SlotCopy> copies) {
  std::vector<FilledSlot> slots;
  std::vector<Piece> pieces;
  uint64_t num_bytes = 0;
  const auto send = [&] {
    if (slots.empty()) return;
    replication_.record_to(connection, {.op = Op::kFILL, .body = std::as_bytes(std::span(slots))},
                           pieces);
    slots.clear();
    pieces.clear();
    num_bytes = 0;
  };
  for (const SlotCopy& copy : copies) {
    const uint64_t slot_bytes = copy.num_bytes();
    if (num_bytes + slot_bytes > kFillBytes || slots.size() == kMaxSlices) send();
    num_bytes += slot_bytes;
    slots.push_back({copy.image, copy.squares.value_or(0)});
    if (copy.squares) slots.back().image.parts |= kSquares;
    for (const BufferRef& part : copy.parts) {
      if (part) pieces.push_back({part, copy.part_bytes});
    }
    if (!holds(BreakableRule::kBASES_ARE_FILLED_IN)) continue;
    for (const auto& [life, base] : copy.bases) {
      if (num_bytes + copy.part_bytes > kFillBytes || slots.size() == kMaxSlices) send();
      slots.push_back({{copy.image.key, life.rank, life.incarnation, kBase | (base ? 1U : 0U)}, 0});
      if (!base) continue;
      pieces.push_back({base, copy.part_bytes});
      num_bytes += copy.part_bytes;
    }
  }
  send();
}

void DataService::fill_staged(uint64_t connection, std::span<const SlotCopy> copies) {
  struct Push {
    std::vector<SliceEntry> entries;
    std::vector<Piece> pieces;
    uint64_t num_bytes = 0;
  };
  std::map<std::tuple<uint32_t, uint32_t, uint64_t>, Push> pushes;  // by origin
  const auto send = [&](const auto& origin, Push& push) {
    const auto& [rank, incarnation, round] = origin;
    replication_.record_to(connection,
                           {.op = Op::kPUSH,
                            .round = round,
                            .rank = rank,
                            .incarnation = incarnation,
                            .table = push.entries},
                           push.pieces);
    push = {};
  };
  for (const SlotCopy& copy : copies) {
    for (const StagedContribution& staged : copy.staged) {
      const Origin& from = staged.origin;
      const PayloadSlice& slice = staged.slice;
      const std::tuple origin{from.rank, from.incarnation, from.round};
      Push& push = pushes[origin];
      if (push.num_bytes + slice.num_bytes > kFillBytes || push.entries.size() == kMaxSlices) {
        send(origin, push);
      }
      push.entries.push_back({.key = copy.image.key,
                              .num_bytes = static_cast<uint32_t>(slice.num_bytes),
                              .dtype = dtype_told(slice.dtype)});
      push.num_bytes += slice.num_bytes;
      if (slice.num_bytes > 0) {
        push.pieces.push_back(
            {part_of(slice.payload, slice.offset, slice.num_bytes), slice.num_bytes});
      }
    }
  }
  for (auto& [origin, push] : pushes) {
    if (!push.entries.empty()) send(origin, push);
  }
}

// ---- what a standby does ----------------------------------------------------------------------------

bool DataService::acknowledges(Op op) {
  switch (op) {
    case Op::kPULLED:
    case Op::kPUSHED:
    case Op::kASSIGNED:
    case Op::kADDED:
    case Op::kINITIALISED:
    case Op::kRESTORED:
    case Op::kFILLED:
    case Op::kRECORDED:
    case Op::kSCALED: return true;
    default: return false;
  }
}

bool DataService::replays(Op op) {
  return is_write(op) || op == Op::kFILL || op == Op::kPULL || op == Op::kSCALE;
}

void DataService::tell_released() {
  if (leader_ == nullptr) return;
  for (const auto& memory : leader_->seen) {
    for (const uint64_t number : memory->take_released()) {
      deliveries_[leader_->connection].add(head_of({.op = Op::kRELEASE, .request = number}));
    }
  }
  std::erase_if(leader_->seen, [](const auto& memory) { return memory->is_over(); });
}

void DataService::replay(const Frame& frame, Replies& replies) {
  const Header& header = frame.header;
  if (header.op == Op::kSCALE) {
    std::optional<double> factor;
    if (!frame.body.empty()) {
      if (frame.body.size() != sizeof(double)) {
        throw Error(ErrorCode::BAD_BODY, "body of SCALE: expected a float64");
      }
      factor.emplace();
      std::memcpy(&*factor, frame.body.data(), sizeof(double));
    }
    set_scale(header.sequence, factor);
  } else if (header.op == Op::kFILL) {
    take_fill(frame);
  } else if (header.op == Op::kPULL) {
    shard_.note_bases({header.rank, header.incarnation}, frame.table.entries());
  } else {
    repeat(shard_, frame, frame.body);
    pending_.touched(frame.table.entries());
  }
  acknowledge(frame, replies);
}

void DataService::take_fill(const Frame& frame) {
  if (frame.body.size() % sizeof(FilledSlot) != 0) {
    throw Error(ErrorCode::BAD_BODY, "body of FILL: it does not hold whole slots");
  }
  uint64_t offset = 0;
  for (size_t i = 0; i < frame.body.size() / sizeof(FilledSlot); ++i) {
    FilledSlot slot;
    std::memcpy(&slot, frame.body.data() + i * sizeof slot, sizeof slot);
    if (slot.image.parts & kBase) {
      const Life life{static_cast<uint32_t>(slot.image.version),
                      static_cast<uint32_t>(slot.image.num_steps)};
      const bool is_value = (slot.image.parts & 1) == 0;
      offset += shard_.take_base(life, slot.image.key, frame.payload,
                                 is_value ? std::nullopt : std::optional(offset));
      continue;
    }
    std::optional<double> squares;
    if (slot.image.parts & kSquares) squares = slot.squares;
    slot.image.parts &= ~kSquares;
    offset += shard_.take_copy(slot.image, squares, frame.payload, offset);
  }
  if (offset != frame.header.payload_bytes) {
    throw Error(ErrorCode::BAD_BODY, "body of FILL: its slots are " + std::to_string(offset) +
                                         " bytes, the payload " +
                                         std::to_string(frame.header.payload_bytes));
  }
}

}  // namespace psstore
