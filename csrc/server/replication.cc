#include "server/replication.h"

#include <algorithm>
#include <string>
#include <utility>

#include "core/breakable_rules.h"
#include "core/crc32c.h"
#include "server/replies.h"
#include "shm/push_arena.h"

namespace psstore {

// ---- followers --------------------------------------------------------------------------------------

void Replication::follow(uint64_t connection, Replies& out, bool wants_checksum) {
  followers_[connection] = {&out, wants_checksum, false, last_};
}

void Replication::count(uint64_t connection) {
  Follower& follower = followers_.at(connection);
  follower.counts = true;
  follower.answered_s = now_s_;  // it has not heard yet that it counts
  release();
}

void Replication::disconnected(uint64_t connection) {
  const auto found = followers_.find(connection);
  if (found == followers_.end()) return;
  found->second.out = nullptr;
  if (!found->second.counts) followers_.erase(found);
  release();
}

void Replication::forget(uint64_t connection) {
  followers_.erase(connection);
  release();
}

void Replication::acknowledged(uint64_t connection, uint64_t number) {
  const auto found = followers_.find(connection);
  if (found == followers_.end()) return;
  Follower& follower = found->second;
  follower.has = std::max(follower.has, std::min(number, last_));
  for (const Beat& beat : beats_) {
    if (beat.record <= follower.has)
      follower.answered_s = std::max(follower.answered_s, beat.made_s);
  }
  if (follower.counts) release();
}

bool Replication::is_filling() const {
  return std::ranges::any_of(followers_, [](const auto& entry) { return !entry.second.counts; });
}

// ---- records ----------------------------------------------------------------------------------------

void Replication::record(FrameParts parts, const Piece& payload,
                         const std::optional<Lying>& lying) {
  parts.request = ++last_;
  const std::vector<Piece> pieces =
      payload.num_bytes > 0 ? std::vector<Piece>{payload} : std::vector<Piece>{};
  for (auto& [connection, follower] : followers_) {
    const bool is_lent = lying && lend(connection, follower, parts, payload, *lying);
    const uint64_t num_bytes =
        is_lent ? payload.num_bytes : send(connection, follower, parts, pieces);
    if (!follower.counts) follower.behind_bytes += num_bytes;
  }
  if (is_filling()) release();
}

bool Replication::lend(uint64_t connection, Follower& follower, FrameParts parts,
                       const Piece& payload, const Lying& lying) {
  const auto seen = follower.sees.find(lying.owner);
  if (seen == follower.sees.end() || follower.out == nullptr) return false;
  const std::vector<SliceEntry> table = laid_out(parts.table, seen->second + lying.offset);
  parts.table = table;
  parts.shared = true;
  parts.payload_bytes = payload.num_bytes;
  if (holds(BreakableRule::kWHAT_IS_LENT_IS_KEPT)) {
    follower.lent[parts.request] = payload.buffer;
  }
  send(connection, follower, parts, {});
  return true;
}

void Replication::record_to(uint64_t connection, FrameParts parts,
                            const std::vector<Piece>& payload) {
  parts.request = last_;
  Follower& follower = followers_.at(connection);
  follower.filling_bytes += send(connection, follower, parts, payload);
}

uint64_t Replication::send(uint64_t connection, const Follower& follower, FrameParts parts,
                           const std::vector<Piece>& payload) {
  if (follower.out == nullptr) return 0;
  uint32_t crc = 0;
  for (const Piece& piece : payload) {
    parts.payload_bytes += piece.num_bytes;
    if (follower.wants_checksum) crc = crc32c({piece.buffer->data(), piece.num_bytes}, crc);
  }
  if (follower.wants_checksum && !parts.shared && parts.payload_bytes > 0) parts.payload_crc = crc;
  const std::string head = head_of(parts);
  follower.out->add(head);
  for (const Piece& piece : payload) follower.out->add(piece);
  ready_.insert(connection);
  return head.size() + parts.payload_bytes;
}

// ---- memory that followers see ----------------------------------------------------------------------

void Replication::sees(uint64_t connection, uint64_t owner, uint64_t address) {
  followers_.at(connection).sees[owner] = address;
}

void Replication::client_gone(uint64_t client) {
  for (auto& [_, follower] : followers_) follower.sees.erase(client);
}

void Replication::let_go(uint64_t connection, uint64_t number) {
  const auto found = followers_.find(connection);
  if (found != followers_.end()) found->second.lent.erase(number);
}

// ---- the lease --------------------------------------------------------------------------------------

void Replication::is_now(double now_s) {
  if (lease_s_ == kForever) return;
  now_s_ = std::max(now_s_, now_s + suspended_s_());
  if (now_s_ > lease_ends_s_) release();
}

// ---- the gate ---------------------------------------------------------------------------------------

uint64_t Replication::released_by(const Follower& follower) const {
  if (!follower.counts) {
    const uint64_t room = std::max(kMinBehindBytes, follower.filling_bytes);
    return follower.behind_bytes <= room ? kAll : 0;
  }
  if (!holds(BreakableRule::kREPLIES_WAIT_FOR_STANDBYS)) return kAll;
  const bool is_over =
      now_s_ > follower.answered_s + lease_s_ && holds(BreakableRule::kLEASES_HAVE_AN_END);
  const bool may_lead = follower.out == nullptr || is_over;
  return may_lead ? 0 : follower.has;  // if it does, what is read here is old
}

void Replication::release() {
  uint64_t least = kAll, has = kAll;
  lease_ends_s_ = kForever;
  for (const auto& [_, follower] : followers_) {
    least = std::min(least, released_by(follower));
    has = std::min(has, follower.has);
    if (follower.counts) lease_ends_s_ = std::min(lease_ends_s_, follower.answered_s + lease_s_);
  }
  while (!beats_.empty() && beats_.front().record <= has) beats_.pop_front();
  if (least > released_) ready_.merge(std::exchange(waiting_, {}));
  released_ = least;
}

std::set<uint64_t> Replication::take_ready() {
  return std::exchange(ready_, {});
}

}  // namespace psstore
