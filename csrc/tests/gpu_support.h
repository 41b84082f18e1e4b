// The GPU's kernel bodies, run on the host: a batch as cuda_reduce_update_async() and
// cuda_reduced_squares_async() launch it, block after block and thread after thread.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <span>
#include <vector>

#include "kernels/gpu/plan.h"
#include "kernels/gpu/squares_body.h"
#include "kernels/gpu/table_body.h"
#include "kernels/gpu/update_body.h"
#include "random_floats.h"

namespace psstore {

// Memory at a chosen distance from a multiple of 16 bytes; exactly as long as it says, so that a sanitizer
// sees what is touched beyond.
class Shifted {
 public:
  Shifted(size_t num_bytes, size_t shift) : size_(num_bytes), shift_(shift) {
    bytes_.resize(std::max(size_t{1}, shift + num_bytes));  // no bytes have an address, too
  }
  Shifted(const void* content, size_t num_bytes, size_t shift) : Shifted(num_bytes, shift) {
    if (num_bytes > 0) std::memcpy(data(), content, num_bytes);
  }

  std::byte* data() { return bytes_.data() + shift_; }
  const std::byte* data() const { return bytes_.data() + shift_; }
  size_t size() const { return size_; }
  bool operator==(const Shifted& other) const {
    return size() == other.size() &&
           (size() == 0 || std::memcmp(data(), other.data(), size()) == 0);
  }

 private:
  size_t size_;
  size_t shift_;
  std::vector<std::byte> bytes_;  // operator new aligns it to 16
};

// A plan and its table, as they would lie on the device.
class HostTable {
 public:
  HostTable(gpu::Purpose purpose, std::span<const SliceUpdate> batch,
            int64_t max_blocks = gpu::kMaxBlocks)
      : plan(purpose, batch, max_blocks), memory_(whole_words(plan.num_bytes()), 0) {
    Shifted pinned(memory_.size(), 0);
    plan.write(pinned.data());
    const auto body = gpu::TableBody::of(memory_.data(), pinned.data(), plan.num_bytes());
    run_on_host(body, body.num_blocks());
  }

  template <class Visit>
  void for_each_launch(Visit visit) const {
    plan.for_each_launch(memory_.data(), visit);
  }

  const gpu::Plan plan;

 private:
  static size_t whole_words(size_t num_bytes) { return (num_bytes + 15) / 16 * 16; }

  Shifted memory_;
};

template <class T>
void run_update_on_host(const gpu::Variant& variant, const gpu::BatchView& view) {
  with_form<T>(variant.step, [&](auto form) {
    using Step = typename decltype(form)::type;
    gpu::with_sources<Step>(variant.sources, [&](auto sources) {
      using Sources = typename decltype(sources)::type;
      run_on_host(gpu::UpdateBody<Step, Sources>{view}, view.grid.num_blocks());
    });
  });
}

// Returns the number of launches.
inline int reduce_update_like_a_gpu(std::span<const SliceUpdate> batch,
                                    int64_t max_blocks = gpu::kMaxBlocks) {
  int num_launches = 0;
  HostTable(gpu::Purpose::kUpdate, batch, max_blocks)
      .for_each_launch(
          [&](const gpu::Variant& variant, const gpu::Launch&, const gpu::BatchView& view) {
            variant.is_double ? run_update_on_host<double>(variant, view)
                              : run_update_on_host<float>(variant, view);
            ++num_launches;
          });
  return num_launches;
}

inline std::vector<double> reduced_squares_like_a_gpu(std::span<const SliceUpdate> batch) {
  std::vector<double> sums(batch.size(), -1.0);
  HostTable(gpu::Purpose::kSquares, batch)
      .for_each_launch(
          [&](const gpu::Variant& variant, const gpu::Launch& launch, const gpu::BatchView& view) {
            if (variant.is_double) {
              run_on_host(gpu::SquaresBody<double>{view, sums.data()}, launch.num_slices);
            } else {
              run_on_host(gpu::SquaresBody<float>{view, sums.data()}, launch.num_slices);
            }
          });
  return sums;
}

}  // namespace psstore
