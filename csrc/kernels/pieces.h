// Copies that are queued together: few calls and launches, however many pieces of memory there are.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

namespace psstore {

struct CopyPiece {
  std::byte* to;
  const std::byte* from;
  size_t num_bytes;
};

class CopyList {
 public:
  // Pieces that go on where the one before ends stay apart: the one may end an allocation, and CUDA refuses a copy
  // that goes over into the next. Empty ones are left out.
  void add(void* to, const void* from, size_t num_bytes) {
    if (num_bytes == 0) return;
    pieces_.push_back(
        {static_cast<std::byte*>(to), static_cast<const std::byte*>(from), num_bytes});
  }

  std::span<const CopyPiece> pieces() const { return pieces_; }

 private:
  std::vector<CopyPiece> pieces_;
};

// Calls `visit(run, num_bytes)` for each longest run of pieces that lie one after the other where `address`
// says: at their `from`, or at their `to`.
template <class Address, class Visit>
void for_each_run(std::span<const CopyPiece> pieces, Address address, Visit visit) {
  for (size_t begin = 0, end = 0; begin < pieces.size(); begin = end) {
    size_t num_bytes = pieces[begin].num_bytes;
    for (end = begin + 1; end < pieces.size(); ++end) {
      if (address(pieces[end]) != address(pieces[begin]) + num_bytes) break;
      num_bytes += pieces[end].num_bytes;
    }
    visit(pieces.subspan(begin, end - begin), num_bytes);
  }
}

}  // namespace psstore
