// Replies on their way to one connection: what is small together, what is large as references.
//
// Behind a gate (replication.h) each waits until the shard's standbys have what the shard had when it was added.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <deque>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <variant>

#include "server/replication.h"
#include "table/gather.h"

namespace psstore {

// A piece of fewer bytes is copied to those before it: a range of its own costs a system call as much.
inline constexpr size_t kOwnReplyPieceBytes = 16u << 10;

// Replies that may wait for one connection: beyond it they have to be sent before it goes on.
inline constexpr size_t kMaxWaitingReplyBytes = 256u << 10;

class Replies {
 public:
  // Bytes of its own, or a view of a value.
  using Part = std::variant<std::string, Piece>;
  using Parts = std::deque<Part>;

  // From now on behind that gate, as those of that connection; null: behind none. Both live as long as this.
  void set_gate(Replication* gate, uint64_t connection) {
    gate_ = gate;
    connection_ = connection;
  }

  void add(std::string_view bytes) {
    if (parts_.empty() || !std::holds_alternative<std::string>(parts_.back())) {
      parts_.emplace_back(std::string());
    }
    std::get<std::string>(parts_.back()).append(bytes);
    count(bytes.size());
  }
  void add(Piece piece) {
    if (piece.num_bytes < kOwnReplyPieceBytes) {
      add({reinterpret_cast<const char*>(piece.buffer->data()), piece.num_bytes});
    } else {
      count(piece.num_bytes);
      parts_.emplace_back(std::move(piece));
    }
  }

  void add(Parts parts) {
    for (Part& part : parts) {
      std::visit([this](auto& one) { add(std::move(one)); }, part);
    }
  }

  // So many bytes are read where they lie, by whom one of these replies tells so.
  void add_leased(size_t num_bytes) { leased_bytes_ += num_bytes; }

  bool empty() const { return parts_.empty(); }
  // They are to be sent before there are more: the peer can work on them meanwhile, and what it can make us hold is this,
  // and one reply.
  bool is_full() const { return num_bytes_ + leased_bytes_ >= kMaxWaitingReplyBytes; }
  // That are not sent yet.
  size_t num_bytes() const { return num_bytes_; }
  // Of these, the first ones, which need not wait.
  size_t num_free_bytes();
  void clear();

  // Those that need not wait, in the order in which they were added. REQUIRES: sent() was never told of a part of them.
  Parts take();

  // The first of them as ranges for one gathering write, as many as there is room for. Returns how many;
  // they are good until anything else is called. Some may have to wait.
  size_t ranges(std::span<iovec> room) const;
  // Forgets the first `num_bytes`.
  void sent(size_t num_bytes);

 private:
  // Replies that were made at the same record.
  struct Waiting {
    uint64_t record;
    size_t num_bytes;
  };

  void count(size_t num_bytes) {
    num_bytes_ += num_bytes;
    if (waiting_.empty() && (gate_ == nullptr || gate_->is_open())) {
      free_bytes_ += num_bytes;
    } else {
      wait(num_bytes);
    }
  }
  void wait(size_t num_bytes);

  Parts parts_;
  size_t sent_bytes_ = 0;  // of the first part
  size_t num_bytes_ = 0;
  size_t free_bytes_ = 0;
  std::deque<Waiting> waiting_;  // behind those that are free
  size_t leased_bytes_ = 0;
  Replication* gate_ = nullptr;
  uint64_t connection_ = 0;
};

std::span<const std::byte> bytes_of(const Replies::Part& part);

}  // namespace psstore
