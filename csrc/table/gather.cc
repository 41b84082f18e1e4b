#include "table/gather.h"

#include <algorithm>
#include <cstring>
#include <span>

#include "kernels/update.h"

namespace psstore {
namespace {

void write_value(const Finding& finding, std::byte* to) {
  if (finding.num_bytes == 0) return;
  if (finding.dtype == finding.wanted) {
    std::memcpy(to, finding.value->data(), finding.num_bytes);
  } else {
    convert(finding.dtype, finding.wanted, finding.value->data(), to,
            static_cast<int64_t>(finding.num_elems));
  }
}

Piece copied_piece(std::span<const Finding> run, BufferPool& pool, size_t smallest_block) {
  size_t total = 0;
  for (const Finding& finding : run) total += finding.num_bytes;
  Piece piece{pool.allocate(std::max(total, smallest_block)), total};
  std::byte* to = piece.buffer->data();
  for (const Finding& finding : run) {
    write_value(finding, to);
    to += finding.num_bytes;
  }
  return piece;
}

}  // namespace

std::vector<Piece> gather(const std::vector<Finding>& findings, BufferPool& pool,
                          size_t smallest_block) {
  std::vector<Piece> pieces;
  const std::span<const Finding> all(findings);
  for (size_t begin = 0, end = 0; begin < all.size(); begin = end) {
    end = begin + 1;
    if (all[begin].shared()) {
      pieces.push_back({all[begin].value, all[begin].num_bytes});
      continue;
    }
    while (end < all.size() && !all[end].shared()) ++end;
    Piece piece = copied_piece(all.subspan(begin, end - begin), pool, smallest_block);
    if (piece.num_bytes > 0) pieces.push_back(std::move(piece));
  }
  return pieces;
}

}  // namespace psstore
