#include "server/pending_reads.h"

#include <string>

#include "core/errors.h"

namespace psstore {

void PendingReads::add(PendingRead read, const Wanted& wanted) {
  size_t& num_waiting = num_waiting_[read.client->connection];
  if (num_waiting >= kMaxPendingReads) {
    throw Error(ErrorCode::OVERLOADED,
                std::to_string(kMaxPendingReads) +
                    " reads of this connection wait already; await some before asking for more");
  }
  ++num_waiting;
  const Ticket ticket = next_ticket_++;
  by_end_.emplace(read.until_s, ticket);
  if (const auto* version = std::get_if<AtVersion>(&wanted)) {
    by_version_.emplace(version->number, ticket);
  } else {
    by_key_[std::get<AtKey>(wanted).key].insert(ticket);
  }
  places_.emplace(ticket, Place{std::move(read), wanted});
}

void PendingReads::forget(uint64_t connection) {
  if (!num_waiting_.contains(connection)) return;
  for (auto next = places_.begin(); next != places_.end();) {
    const auto place = next++;
    if (place->second.read.client->connection == connection) remove(place->first);
  }
}

// ---- events -----------------------------------------------------------------------------------------

void PendingReads::reached(uint64_t version) {
  for (const auto& [number, ticket] : by_version_) {
    if (number > version) break;
    due_.insert(ticket);
  }
}

void PendingReads::touched(std::span<const SliceEntry> slices) {
  if (by_key_.empty()) return;
  for (const SliceEntry& slice : slices) {
    const auto found = by_key_.find(slice.key);
    if (found != by_key_.end()) due_.insert(found->second.begin(), found->second.end());
  }
}

void PendingReads::touched_all() {
  for (const auto& [_, tickets] : by_key_) due_.insert(tickets.begin(), tickets.end());
}

// ---- whose wait may be over -------------------------------------------------------------------------

std::vector<PendingRead> PendingReads::take_due() {
  std::vector<PendingRead> reads;
  while (!due_.empty()) {
    const Ticket ticket = *due_.begin();
    reads.push_back(remove(ticket));
  }
  return reads;
}

std::vector<PendingRead> PendingReads::take_due(double now_s) {
  for (const auto& [until_s, ticket] : by_end_) {
    if (until_s > now_s) break;
    due_.insert(ticket);
  }
  return take_due();
}

std::optional<double> PendingReads::next_wake() const {
  if (!due_.empty()) return 0.0;
  if (by_end_.empty()) return std::nullopt;
  return by_end_.begin()->first;
}

PendingRead PendingReads::remove(Ticket ticket) {
  const auto place = places_.find(ticket);
  PendingRead read = std::move(place->second.read);
  by_end_.erase({read.until_s, ticket});
  if (const auto* version = std::get_if<AtVersion>(&place->second.wanted)) {
    by_version_.erase({version->number, ticket});
  } else {
    const auto waiting = by_key_.find(std::get<AtKey>(place->second.wanted).key);
    waiting->second.erase(ticket);
    if (waiting->second.empty()) by_key_.erase(waiting);
  }
  const auto num_waiting = num_waiting_.find(read.client->connection);
  if (--num_waiting->second == 0) num_waiting_.erase(num_waiting);
  due_.erase(ticket);
  places_.erase(place);
  return read;
}

}  // namespace psstore
