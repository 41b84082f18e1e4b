// Replies on their way to one connection: what is small together, what is large as references.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "table/gather.h"

namespace psstore {

// A piece of fewer bytes is copied to those before it: a range of its own costs a system call as much.
inline constexpr size_t kOwnReplyPieceBytes = 16u << 10;

class Replies {
 public:
  // Bytes of its own, or a view of a value.
  using Part = std::variant<std::string, Piece>;

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

  bool empty() const { return parts_.empty(); }
  size_t num_bytes() const { return num_bytes_; }
  // In the order in which they were added.
  std::vector<Part> take() {
    num_bytes_ = 0;
    return std::exchange(parts_, {});
  }

 private:
  std::vector<Part> parts_;
  size_t num_bytes_ = 0;
};

}  // namespace psstore
