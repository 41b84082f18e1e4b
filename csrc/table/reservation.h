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
      : backend_(backend), num_bytes_(num_bytes) {
    backend->reserve(num_bytes_);
  }
  ~Reservation() {
    if (const auto backend = backend_.lock()) backend->unreserve(num_bytes_);
  }
  Reservation(const Reservation&) = delete;
  Reservation& operator=(const Reservation&) = delete;

 private:
  const std::weak_ptr<Backend> backend_;  // which may hold what it is for
  const uint64_t num_bytes_;
};

}  // namespace psstore
