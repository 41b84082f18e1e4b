// Where the payload in flight goes: into ranges of memory one after the other, or nowhere. Counts what
// is missing and, if asked, checksums what passes while it is still in the cache.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <utility>
#include <vector>

#include "core/crc32c.h"
#include "wire/limits.h"

namespace psstore {

class PayloadSink {
 public:
  using Ranges = std::vector<std::span<std::byte>>;

  PayloadSink() = default;
  // REQUIRES: `ranges` hold `num_bytes` in all, or are none: the payload is passed over.
  PayloadSink(uint64_t num_bytes, Ranges ranges, bool checksum)
      : missing_(num_bytes), ranges_(std::move(ranges)), checksum_(checksum) {
    skip_full_ranges();
  }

  uint64_t missing() const { return missing_; }
  uint32_t crc() const { return crc_; }

  // The rest of the current range if it is worth receiving in place; else empty.
  std::span<std::byte> direct_window() const {
    if (current_ == ranges_.size() || ranges_[current_].size() < kDirectReceiveBytes) return {};
    return ranges_[current_];
  }
  // REQUIRES: `num_bytes` were written to the start of direct_window().
  void received_in_place(size_t num_bytes) { pass(ranges_[current_].first(num_bytes)); }

  // What is missing goes nowhere.
  void let_pass() { current_ = ranges_.size(); }

  // Takes the bytes that belong to this payload from the start of `bytes`; returns how many.
  size_t take(std::span<const std::byte> bytes) {
    const auto total = static_cast<size_t>(std::min<uint64_t>(bytes.size(), missing_));
    for (size_t taken = 0; taken < total;) {
      std::span<const std::byte> piece = bytes.subspan(taken, total - taken);
      if (current_ < ranges_.size()) {
        piece = piece.first(std::min(piece.size(), ranges_[current_].size()));
        std::memcpy(ranges_[current_].data(), piece.data(), piece.size());
      }
      pass(piece);
      taken += piece.size();
    }
    return total;
  }

 private:
  void pass(std::span<const std::byte> bytes) {
    if (checksum_) crc_ = crc32c(bytes, crc_);
    missing_ -= bytes.size();
    if (current_ == ranges_.size()) return;
    ranges_[current_] = ranges_[current_].subspan(bytes.size());
    skip_full_ranges();
  }
  void skip_full_ranges() {
    while (current_ < ranges_.size() && ranges_[current_].empty()) ++current_;
  }

  uint64_t missing_ = 0;
  Ranges ranges_;       // what is left of each
  size_t current_ = 0;  // first with something left
  bool checksum_ = false;
  uint32_t crc_ = 0;
};

}  // namespace psstore
