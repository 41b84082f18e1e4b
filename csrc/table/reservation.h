// Bytes that count with a backend's slots while it is there.
#pragma once

#include <cstdint>
#include <memory>

#include "table/backend.h"

namespace psstore {

class Reservation {
 public:
  // Throws what Backend::reserve() throws.
  Reservation(const std::shared_ptr<Backend>& backend, uint64_t num_bytes)
      : backend_(backend), left_bytes_(num_bytes) {
    backend->reserve(num_bytes);
  }
  ~Reservation() {
    if (const auto backend = backend_.lock()) backend->unreserve(left_bytes_);
  }
  Reservation(const Reservation&) = delete;
  Reservation& operator=(const Reservation&) = delete;

  // For Backend::allocate_reserved().
  uint64_t& left_bytes() { return left_bytes_; }

 private:
  const std::weak_ptr<Backend> backend_;  // which may hold what it is for
  uint64_t left_bytes_;
};

}  // namespace psstore
