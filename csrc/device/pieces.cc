#include "device/pieces.h"

namespace psstore::device {
namespace {

// On average. From here on a copy of its own takes longer than it takes to begin: about 1.5 us, in which PCIe
// moves 75 KB.
constexpr size_t kLargePieceBytes = 64 << 10;

// Where a run of pieces is to lie together on the device; null: each goes by itself.
std::byte* together(Queue& queue, std::span<const CopyPiece> run, size_t num_bytes) {
  const bool are_small = run.size() > 1 && num_bytes / run.size() < kLargePieceBytes;
  return are_small ? queue.scratch(num_bytes) : nullptr;
}

}  // namespace

void copy_pieces_in(Queue& queue, std::span<const CopyPiece> pieces) {
  const auto on_host = [](const CopyPiece& piece) { return piece.from; };
  for_each_run(pieces, on_host, [&](std::span<const CopyPiece> run, size_t num_bytes) {
    std::byte* const begin = together(queue, run, num_bytes);
    if (begin == nullptr) {
      for (const CopyPiece& piece : run) queue.copy_in(piece.to, piece.from, piece.num_bytes);
      return;
    }
    queue.copy_in(begin, run.front().from, num_bytes);
    CopyList scattered;
    const std::byte* from = begin;
    for (const CopyPiece& piece : run) {
      scattered.add(piece.to, from, piece.num_bytes);
      from += piece.num_bytes;
    }
    queue.copy_pieces(scattered.pieces());
  });
}

void copy_pieces_out(Queue& queue, std::span<const CopyPiece> pieces) {
  const auto on_host = [](const CopyPiece& piece) { return piece.to; };
  for_each_run(pieces, on_host, [&](std::span<const CopyPiece> run, size_t num_bytes) {
    std::byte* const begin = together(queue, run, num_bytes);
    if (begin == nullptr) {
      for (const CopyPiece& piece : run) queue.copy_out(piece.to, piece.from, piece.num_bytes);
      return;
    }
    CopyList gathered;
    std::byte* to = begin;
    for (const CopyPiece& piece : run) {
      gathered.add(to, piece.from, piece.num_bytes);
      to += piece.num_bytes;
    }
    queue.copy_pieces(gathered.pieces());
    queue.copy_out(run.front().to, begin, num_bytes);
  });
}

}  // namespace psstore::device
