#include "server/pending_reads.h"

#include <string>

#include "core/errors.h"

namespace psstore {

namespace {

size_t bytes_of(const Frame& frame) {
  return frame.table.size() * sizeof(SliceEntry) + frame.body.size();
}

}  // namespace

void PendingReads::add(PendingRead read, const Wanted& wanted) {
  Waiting& waiting = waiting_[read.client->connection];
  if (waiting.num_reads >= kMaxPendingReads) {
    throw Error(ErrorCode::OVERLOADED,
                std::to_string(kMaxPendingReads) +
                    " reads of this connection wait already; await some before asking for more");
  }
  const size_t num_bytes = bytes_of(*read.frame);
  if (waiting.num_bytes + num_bytes > kMaxPendingBytes) {  // the first is never that large
    throw Error(ErrorCode::OVERLOADED, "reads of this connection that wait already have " +
                                           std::to_string(waiting.num_bytes) +
                                           " bytes; await some before asking for more");
  }
  ++waiting.num_reads;
  waiting.num_bytes += num_bytes;
  const Ticket ticket = next_ticket_++;
  by_end_.emplace(read.until_s, ticket);
  if (const auto* version = std::get_if<AtVersion>(&wanted)) {
    by_version_.emplace(version->number, ticket);
  } else {
    by_key_[std::get<AtKey>(wanted).key].insert(ticket);
  }
  places_.emplace(ticket, Place{std::move(read), wanted, num_bytes});
}

void PendingReads::forget(uint64_t connection) {
  if (!waiting_.contains(connection)) return;
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
    const auto tickets = by_key_.find(std::get<AtKey>(place->second.wanted).key);
    tickets->second.erase(ticket);
    if (tickets->second.empty()) by_key_.erase(tickets);
  }
  const auto waiting = waiting_.find(read.client->connection);
  waiting->second.num_bytes -= place->second.num_bytes;
  if (--waiting->second.num_reads == 0) waiting_.erase(waiting);
  due_.erase(ticket);
  places_.erase(place);
  return read;
}

}  // namespace psstore
