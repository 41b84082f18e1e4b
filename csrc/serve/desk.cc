#include "serve/desk.h"

#include <algorithm>
#include <span>
#include <utility>

#include "core/crc32c.h"
#include "wire/encoder.h"

namespace psstore {
namespace {

uint32_t checksum_of(std::span<const Piece> pieces) {
  uint32_t crc = 0;
  for (const Piece& piece : pieces) crc = crc32c({piece.buffer->data(), piece.num_bytes}, crc);
  return crc;
}

Op reply_to(Op op) {
  return static_cast<Op>(static_cast<uint8_t>(op) + 1);
}

}  // namespace

// ---- what policy says -------------------------------------------------------------------------------

void Desk::remember(const std::string& body) {
  if (body.size() > kMaxRememberedBodyBytes) return;
  bodies_.push_front(body);
  if (bodies_.size() > kMaxRememberedBodies) bodies_.pop_back();
}

uint32_t Desk::newest_incarnation(uint32_t rank) const {
  const auto known = incarnations_.find(rank);
  return known == incarnations_.end() ? 0 : known->second;
}

void Desk::attached(const Life& life) {
  incarnations_[life.rank] = std::max(life.incarnation, newest_incarnation(life.rank));
}

// ---- requests ---------------------------------------------------------------------------------------

bool Desk::carries_nothing(const Frame& frame) const {
  return std::find(bodies_.begin(), bodies_.end(), frame.body) != bodies_.end();
}

bool Desk::is_ordinary(const Peer& peer, const Frame& frame) const {
  const Header& header = frame.header;
  if (closed_ || header.is_shared()) return false;
  switch (header.op) {
    case Op::kPUSH:
      return !writes_watched_ && peer.worker == Life{header.rank, header.incarnation} &&
             header.incarnation == newest_incarnation(header.rank) && carries_nothing(frame);
    case Op::kASSIGN:
    case Op::kADD: return !writes_watched_;
    case Op::kPULL:
      return header.payload_bytes == 0 && (frame.body.empty() || carries_nothing(frame));
    default: return false;
  }
}

bool Desk::answer(const Peer& peer, Frame& frame, Replies& replies) {
  try {
    if (frame.header.op == Op::kPULL) return answer_pull(peer, frame, replies);
    answer_write(peer, frame, replies);
    return true;
  } catch (const Error&) {
    return false;  // whoever judges it will meet the same error, and say so
  }
}

void Desk::answer_write(const Peer& peer, Frame& frame, Replies& replies) {
  if (frame.header.payload_bytes == 0) admit(frame);
  add_head(frame, write(shard_, frame, peer.client), std::nullopt, replies);
}

bool Desk::answer_pull(const Peer& peer, const Frame& frame, Replies& replies) {
  ReadReply reply = read(shard_, frame, /*share=*/false);
  const auto fails = [](const SliceEntry& entry) { return is_failure(entry.status); };
  if (std::any_of(reply.table.begin(), reply.table.end(), fails)) return false;
  std::vector<Piece>& pieces = reply.values.pieces;
  std::optional<uint32_t> crc;
  if (peer.wants_checksum) crc = checksum_of(pieces);
  add_head(frame, reply.table, crc, replies);
  for (Piece& piece : pieces) replies.add(std::move(piece));
  return true;
}

void Desk::add_head(const Frame& frame, const SliceTable& table,
                    std::optional<uint32_t> payload_crc, Replies& replies) const {
  const FrameParts parts{.op = reply_to(frame.header.op),
                         .request = frame.header.request,
                         .sequence = shard_.version(),
                         .table = table.entries(),
                         .payload_bytes = table.payload_bytes(),
                         .payload_crc = payload_crc};
  check_parts(parts);
  std::string head(parts.encoded_bytes(), '\0');
  encode_frame(parts, reinterpret_cast<std::byte*>(head.data()));
  replies.add(head);
}

}  // namespace psstore
