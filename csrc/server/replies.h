// Replies on their way to one connection: what is small together, what is large as references.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <deque>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <variant>

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

  void add(std::string_view bytes) {
    if (parts_.empty() || !std::holds_alternative<std::string>(parts_.back())) {
      parts_.emplace_back(std::string());
    }
    std::get<std::string>(parts_.back()).append(bytes);
    num_bytes_ += bytes.size();
  }
  void add(Piece piece) {
    if (piece.num_bytes < kOwnReplyPieceBytes) {
      add({reinterpret_cast<const char*>(piece.buffer->data()), piece.num_bytes});
    } else {
      num_bytes_ += piece.num_bytes;
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
  void clear();

  // In the order in which they were added. REQUIRES: sent() was never told of a part of them.
  Parts take() {
    num_bytes_ = leased_bytes_ = 0;
    return std::exchange(parts_, {});
  }

  // The first of them as ranges for one gathering write, as many as there is room for. Returns how many;
  // they are good until anything else is called.
  size_t ranges(std::span<iovec> room) const;
  // Forgets the first `num_bytes`.
  void sent(size_t num_bytes);

 private:
  Parts parts_;
  size_t sent_bytes_ = 0;  // of the first part
  size_t num_bytes_ = 0;
  size_t leased_bytes_ = 0;
};

}  // namespace psstore
