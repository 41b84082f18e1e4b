#include "server/frame_calls.h"

#include <span>
#include <string>
#include <utility>

#include "wire/limits.h"
#include "wire/rows_asked.h"

namespace psstore {

WriteKind write_kind(const Frame& frame) {
  switch (frame.header.op) {
    case Op::kPUSH: return WriteKind::kPush;
    case Op::kINIT: return WriteKind::kInit;
    case Op::kASSIGN: return WriteKind::kAssign;
    case Op::kADD: return WriteKind::kAdd;
    case Op::kRESTORE: return WriteKind::kRestore;
    default:
      throw Error(ErrorCode::BAD_ARGUMENT,
                  "operation " + std::to_string(static_cast<int>(frame.header.op)) +
                      " carries nothing to write; expected PUSH, INIT, ASSIGN, ADD or RESTORE");
  }
}

std::vector<SliceEntry> entries_of(const Frame& frame) {
  std::vector<SliceEntry> entries(frame.table.begin(), frame.table.end());
  for (SliceEntry& entry : entries) entry.offset = 0;
  return entries;
}

BufferRef admit(Shard& shard, Frame& frame) {
  const uint64_t payload_bytes = frame.header.payload_bytes;
  std::vector<SliceEntry> entries = entries_of(frame);
  const bool may_write = shard.check(write_kind(frame), entries, payload_bytes);
  frame.table = SliceTable(std::move(entries));  // also of one that there is no memory for
  const bool comes = may_write && !frame.header.is_shared();
  return comes ? shard.allocate(payload_bytes) : BufferRef();
}

namespace {

void write(Shard& shard, const Frame& frame, const std::string& client,
           std::span<SliceEntry> entries, bool repeats) {
  const WriteKind kind = write_kind(frame);
  const Header& header = frame.header;
  switch (kind) {
    case WriteKind::kPush:
      shard.stage({header.rank, header.incarnation, header.round}, entries, frame.payload, repeats);
      break;
    case WriteKind::kInit: shard.initialise(entries, frame.payload); break;
    case WriteKind::kAssign:
    case WriteKind::kAdd:
    case WriteKind::kRestore:
      shard.write(kind, client, header.sequence, entries, frame.payload);
      break;
  }
}

}  // namespace

SliceTable write(Shard& shard, const Frame& frame, const std::string& client) {
  std::vector<SliceEntry> entries = entries_of(frame);
  write(shard, frame, client, entries, /*repeats=*/false);
  return SliceTable(std::move(entries));
}

void repeat(Shard& shard, const Frame& frame, const std::string& client) {
  std::vector<SliceEntry> entries = entries_of(frame);
  write(shard, frame, client, entries, /*repeats=*/true);
  for (size_t i = 0; i < entries.size(); ++i) {
    const ErrorCode there = frame.table[i].status;
    if (entries[i].status == there || is_failure(there)) continue;
    throw Error(ErrorCode::INTERNAL,
                "slice " + std::to_string(entries[i].key) +
                    " was written on the shard, and is refused" + " by its standby with code " +
                    std::to_string(static_cast<int>(entries[i].status)) + "; they differ");
  }
}

ReadReply read(Shard& shard, const Frame& frame, Shard::ReadOptions options) {
  std::vector<SliceEntry> entries = entries_of(frame);
  Shard::Reply values;
  switch (frame.header.op) {
    case Op::kNORM: values = shard.norms(entries); break;
    case Op::kPULL_ROWS: {
      const RowsAsked asked = rows_asked(frame);
      values = shard.read_rows(entries, {asked.ids, asked.changes, asked.marks}, kMaxPayloadBytes,
                               options);
      break;
    }
    case Op::kLIST_ROWS: values = shard.list_rows(entries, options); break;
    default: values = shard.read(entries, kMaxPayloadBytes, options);
  }
  return {SliceTable(std::move(entries)), std::move(values)};
}

}  // namespace psstore
