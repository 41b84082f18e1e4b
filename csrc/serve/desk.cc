#include "serve/desk.h"

#include <algorithm>
#include <new>
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

// What a read may wait for, slice by slice.
bool may_come(ErrorCode status) {
  return status == ErrorCode::NOT_APPLIED || status == ErrorCode::NOT_INITIALISED;
}

Op reply_to(Op op) {
  return static_cast<Op>(static_cast<uint8_t>(op) + 1);
}

}  // namespace

// ---- what policy says -------------------------------------------------------------------------------

void Desk::remember(const std::string& body, double wait_s) {
  if (body.size() > kMaxRememberedBodyBytes) return;
  std::erase_if(bodies_, [&](const Known& one) { return one.body == body; });
  bodies_.push_front({body, wait_s});
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

const Desk::Known* Desk::known(const Frame& frame) {
  const auto found = std::ranges::find(bodies_, frame.body, &Known::body);
  if (found == bodies_.end()) return nullptr;
  std::rotate(bodies_.begin(), found, found + 1);
  return &bodies_.front();
}

double Desk::patience_s(const Frame& frame) {
  const Known* body = known(frame);
  return body == nullptr ? 0.0 : body->wait_s;
}

bool Desk::is_ordinary(const Peer& peer, const Frame& frame) {
  const Header& header = frame.header;
  if (closed_ || header.is_shared()) return false;
  switch (header.op) {
    case Op::kPUSH:
      return peer.worker == Life{header.rank, header.incarnation} &&
             header.incarnation == newest_incarnation(header.rank) && known(frame) != nullptr;
    case Op::kASSIGN:
    case Op::kADD: return true;
    case Op::kPULL:
      return header.payload_bytes == 0 && (frame.body.empty() || known(frame) != nullptr);
    default: return false;
  }
}

bool Desk::answer(const Peer& peer, const std::shared_ptr<Frame>& frame, Replies& replies,
                  double now_s) {
  try {
    if (frame->header.op == Op::kPULL) {
      const double until_s = now_s + patience_s(*frame);
      return answer_pull({peer.connection, peer.wants_checksum, frame, until_s}, now_s, replies);
    }
    answer_write(peer, *frame, replies);
  } catch (const Error&) {
    return false;  // whoever judges it will meet the same error, and say so
  } catch (const std::bad_alloc&) {
    return false;
  }
  parking_.touched(frame->table.entries());
  answer_due(parking_.take_due(), now_s);
  if (auto own = deliveries_.extract(peer.connection)) replies.add(own.mapped().take());
  return true;
}

void Desk::answer_write(const Peer& peer, Frame& frame, Replies& replies) {
  if (frame.header.payload_bytes == 0) admit(frame);
  add_head(frame, write(shard_, frame, peer.client), std::nullopt, replies);
}

bool Desk::answer_pull(Parked asked, double now_s, Replies& replies) {
  const Frame& frame = *asked.frame;
  ReadReply reply = read(shard_, frame);
  const auto fails = [](const SliceEntry& entry) { return is_failure(entry.status); };
  const auto failed = std::ranges::find_if(reply.table, fails);
  if (failed != reply.table.end()) {
    if (!may_come(failed->status) || asked.until_s <= now_s) return false;
    parking_.park(std::move(asked), AtKey{failed->key});
    return true;
  }
  std::vector<Piece>& pieces = reply.values.pieces;
  std::optional<uint32_t> crc;
  if (asked.wants_checksum) crc = checksum_of(pieces);
  add_head(frame, reply.table, crc, replies);
  for (Piece& piece : pieces) replies.add(std::move(piece));
  return true;
}

// ---- reads that wait --------------------------------------------------------------------------------

void Desk::forget(uint64_t connection) {
  parking_.forget(connection);
  deliveries_.erase(connection);
  std::erase_if(left_over_, [&](const Parked& read) { return read.connection == connection; });
}

void Desk::wake(double now_s) {
  answer_due(parking_.take_due(now_s), now_s);
}

std::optional<double> Desk::next_wake() const {
  if (!deliveries_.empty() || !left_over_.empty()) return 0.0;
  return parking_.next_wake();
}

void Desk::answer_due(std::vector<Parked> due, double now_s) {
  for (Parked& read : due) {
    const Header& header = read.frame->header;
    bool answered = false;
    if (!closed_ && header.op == Op::kPULL && !header.is_shared() && read.until_s > now_s) {
      try {
        answered = answer_pull(read, now_s, deliveries_[read.connection]);
      } catch (const Error&) {  // policy will meet the same one
      } catch (const std::bad_alloc&) {
      }
    }
    if (!answered) left_over_.push_back(std::move(read));
  }
  std::erase_if(deliveries_, [](const auto& delivery) { return delivery.second.empty(); });
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
