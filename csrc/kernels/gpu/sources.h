// The gradient of a few neighbouring elements: the weighted sum of the contributions in rank order, divided
// and scaled, rounded as kernels/reduce.h rounds.
#pragma once

#include "kernels/codec_elements.h"
#include "kernels/gpu/batch.h"
#include "kernels/gpu/memory.h"

namespace psstore::gpu {

// ---- encodings: elements of a payload as floats -----------------------------------------------------

template <int N>
PSSTORE_GPU Pack<float, N> load_int8(const Source& source, int64_t num_elems, int64_t begin) {
  const auto* codes = static_cast<const std::byte*>(source.data) + codes_offset(num_elems);
  const Pack<int8_t, N> code = load_pack<int8_t, N>(codes, begin);
  Pack<float, N> out;
  for (int e = 0; e < N; ++e) {
    const auto scale = load_one<float>(source.data, (begin + e) / kEncodedBlock);
    out[e] = decoded_int8(scale, code[e]);
  }
  return out;
}

template <int N>
PSSTORE_GPU Pack<float, N> load_sign(const Source& source, int64_t num_elems, int64_t begin) {
  const auto* bits = static_cast<const std::byte*>(source.data) + codes_offset(num_elems);
  Pack<float, N> out;
  for (int e = 0; e < N; ++e) {
    const int64_t i = begin + e;
    const auto scale = load_one<float>(source.data, i / kEncodedBlock);
    const auto byte = static_cast<uint32_t>(load_one<uint8_t>(bits, i / 8));
    out[e] = decoded_sign(scale, (byte >> (i % 8) & 1U) != 0);
  }
  return out;
}

// A search for each vector: its upper steps are the same for all, and come from the cache.
template <int N>
PSSTORE_GPU Pack<float, N> load_topk(const Source& source, int64_t begin) {
  const auto num_kept = static_cast<int64_t>(source.num_bytes / kTopKEntryBytes);
  const auto* indices = static_cast<const std::byte*>(source.data);
  const std::byte* values = indices + num_kept * int64_t{sizeof(uint32_t)};
  const auto index_at = [=](int64_t entry) {
    return static_cast<int64_t>(load_one<uint32_t>(indices, entry));
  };
  Pack<float, N> out;
  for (int e = 0; e < N; ++e) out[e] = 0.0F;
  for (int64_t entry = first_entry(index_at, num_kept, begin); entry < num_kept; ++entry) {
    const int64_t place = index_at(entry) - begin;
    if (place < 0 || place >= N) break;
    const auto kept = load_one<float>(values, entry);
    for (int e = 0; e < N; ++e) out[e] = place == e ? kept : out[e];  // out stays in registers
  }
  return out;
}

template <int N>
PSSTORE_GPU Pack<float, N> load_encoded(const Source& source, int64_t num_elems, int64_t begin) {
  if (source.dtype == DType::kInt8) return load_int8<N>(source, num_elems, begin);
  if (source.dtype == DType::kSign) return load_sign<N>(source, num_elems, begin);
  return load_topk<N>(source, begin);
}

// ---- sums -----------------------------------------------------------------------------------------

// sum += weight * pack, product and sum rounded by themselves.
template <class T, class E, int N>
PSSTORE_GPU void add_weighted(Pack<T, N>& sum, T weight, const Pack<E, N>& pack) {
  for (int e = 0; e < N; ++e) sum[e] = sum[e] + weight * number<T>(pack[e]);
}

// -0 and not +0 is what added to any x gives x; no contribution at all counts as +0.
template <class T, int N>
PSSTORE_GPU Pack<T, N> nothing(uint32_t num_sources) {
  Pack<T, N> sum;
  for (int e = 0; e < N; ++e) sum[e] = num_sources == 0 ? T(0) : -T(0);
  return sum;
}

// ---- whole vectors of contributions that are alike: loads apart from what is done with them, so that several are
// under way at once. What load() returns, elements() makes numbers.

template <class E>
struct RawVectors {
  template <int N>
  PSSTORE_GPU Pack<E, N> load(const Source& source, int64_t begin) const {
    return load_pack<E, N, Alignment::kPack>(source.data, begin);
  }
  template <int N>
  PSSTORE_GPU Pack<E, N> elements(const Pack<E, N>& pack, int64_t) const {
    return pack;
  }
};

// A vector that begins at a multiple of its size lies within one block, and within one byte of signs.
template <class Codes>
struct Scaled {
  float scale;
  Codes codes;
};

PSSTORE_GPU float load_scale(const Source& source, int64_t begin) {
  return load_pack<float, 1, Alignment::kPack>(source.data, begin / kEncodedBlock)[0];
}

struct Int8Vectors {
  int64_t num_elems;

  template <int N>
  PSSTORE_GPU Scaled<Pack<int8_t, N>> load(const Source& source, int64_t begin) const {
    const auto* codes = static_cast<const std::byte*>(source.data) + codes_offset(num_elems);
    return {load_scale(source, begin), load_pack<int8_t, N, Alignment::kPack>(codes, begin)};
  }
  template <int N>
  PSSTORE_GPU Pack<float, N> elements(const Scaled<Pack<int8_t, N>>& loaded, int64_t) const {
    Pack<float, N> out;
    for (int e = 0; e < N; ++e) out[e] = decoded_int8(loaded.scale, loaded.codes[e]);
    return out;
  }
};

struct SignVectors {
  int64_t num_elems;

  template <int N>
  PSSTORE_GPU Scaled<Pack<uint8_t, N>> load(const Source& source, int64_t begin) const {
    const auto* bits = static_cast<const std::byte*>(source.data) + codes_offset(num_elems);
    return {load_scale(source, begin), {load_one<uint8_t>(bits, begin / 8)}};
  }
  template <int N>
  PSSTORE_GPU Pack<float, N> elements(const Scaled<Pack<uint8_t, N>>& loaded, int64_t begin) const {
    const auto byte = static_cast<uint32_t>(loaded.codes[0]);
    Pack<float, N> out;
    for (int e = 0; e < N; ++e) {
      out[e] = decoded_sign(loaded.scale, (byte >> ((begin + e) % 8) & 1U) != 0);
    }
    return out;
  }
};

// Contributions of any number and any kinds.
template <class T>
class AnySources {
 public:
  static constexpr bool kAligned = false;
  static constexpr size_t kStreams = 1;
  static constexpr size_t kVectorBytes = 0;  // not known
  template <int N>
  struct Loaded {};  // read by sum(), a group after the other

  PSSTORE_GPU AnySources(const BatchView& batch, const Slice& slice)
      : sources_(batch.sources + slice.first_source),
        num_sources_(slice.num_sources),
        are_alike_(slice.sources_are_alike != 0),
        num_elems_(slice.vectors.num_elems) {}

  template <int N>
  PSSTORE_GPU Loaded<N> load(int64_t) const {
    return {};
  }
  template <int N>
  PSSTORE_GPU Pack<T, N> sum(int64_t begin, const Loaded<N>&) const {
    Pack<T, N> sum = nothing<T, N>(num_sources_);
    uint32_t k = 0;
    if constexpr (N > 1) {
      if (are_alike_) k = add_alike(sum, begin);
    }
    for (; k < num_sources_; ++k) add(sum, sources_[k], begin);
    return sum;
  }

 private:
  // As many as there are groups of; returns their number.
  template <int N>
  PSSTORE_GPU uint32_t add_alike(Pack<T, N>& sum, int64_t begin) const {
    switch (sources_[0].dtype) {
      case DType::kFloat32: return add_groups(sum, begin, RawVectors<float>{});
      case DType::kFloat64:
        if constexpr (sizeof(T) == sizeof(double)) {
          return add_groups(sum, begin, RawVectors<double>{});
        }
        return 0;
      case DType::kBFloat16: return add_groups(sum, begin, RawVectors<BFloat16>{});
      case DType::kFloat16: return add_groups(sum, begin, RawVectors<Float16>{});
      case DType::kInt8: return add_groups(sum, begin, Int8Vectors{num_elems_});
      case DType::kSign: return add_groups(sum, begin, SignVectors{num_elems_});
      case DType::kTopK: return 0;
    }
    return 0;
  }

  template <int N, class Vectors>
  PSSTORE_GPU uint32_t add_groups(Pack<T, N>& sum, int64_t begin, const Vectors& vectors) const {
    uint32_t k = 0;
    PSSTORE_ROLLED
    for (; k + 4 <= num_sources_; k += 4) add_group<4>(sum, begin, vectors, sources_ + k);
    if (k + 2 <= num_sources_) {
      add_group<2>(sum, begin, vectors, sources_ + k);
      k += 2;
    }
    return k;
  }

  template <int kCount, int N, class Vectors>
  PSSTORE_GPU void add_group(Pack<T, N>& sum, int64_t begin, const Vectors& vectors,
                             const Source* sources) const {
    decltype(vectors.template load<N>(*sources, begin)) loaded[kCount];
    for (int j = 0; j < kCount; ++j) loaded[j] = vectors.template load<N>(sources[j], begin);
    for (int j = 0; j < kCount; ++j) {
      add_weighted(sum, static_cast<T>(sources[j].weight), vectors.elements(loaded[j], begin));
    }
  }

  template <int N>
  PSSTORE_GPU void add(Pack<T, N>& sum, const Source& source, int64_t begin) const {
    const auto weight = static_cast<T>(source.weight);
    switch (source.dtype) {
      case DType::kFloat32:
        return add_weighted(sum, weight, load_pack<float, N>(source.data, begin));
      case DType::kFloat64:
        // Only a float64 tensor is given one.
        if constexpr (sizeof(T) == sizeof(double)) {
          add_weighted(sum, weight, load_pack<double, N>(source.data, begin));
        }
        return;
      case DType::kBFloat16:
        return add_weighted(sum, weight, load_pack<BFloat16, N>(source.data, begin));
      case DType::kFloat16:
        return add_weighted(sum, weight, load_pack<Float16, N>(source.data, begin));
      case DType::kInt8:
      case DType::kSign:
      case DType::kTopK:
        return add_weighted(sum, weight, load_encoded<N>(source, num_elems_, begin));
    }
  }

  const Source* sources_;
  uint32_t num_sources_;
  bool are_alike_;
  int64_t num_elems_;
};

// kCount contributions of one dtype, where value, state and all that belongs to them are aligned alike: their
// loads are under way at once.
template <class T, class E, int kCount>
class AlignedSources {
 public:
  static constexpr bool kAligned = true;
  static constexpr size_t kStreams = kCount;  // of loads that a thread has under way
  static constexpr size_t kVectorBytes = kCount * sizeof(E) * kVectorElems<T>;
  template <int N>
  struct Loaded {
    Pack<E, N> packs[kCount];
  };

  PSSTORE_GPU AlignedSources(const BatchView& batch, const Slice& slice) {
    for (int k = 0; k < kCount; ++k) {
      const Source& source = batch.sources[slice.first_source + static_cast<uint32_t>(k)];
      data_[k] = source.data;
      weight_[k] = static_cast<T>(source.weight);
    }
  }

  template <int N>
  PSSTORE_GPU Loaded<N> load(int64_t begin) const {
    Loaded<N> loaded;
    for (int k = 0; k < kCount; ++k) {
      loaded.packs[k] = load_pack<E, N, Alignment::kPack>(data_[k], begin);
    }
    return loaded;
  }
  template <int N>
  PSSTORE_GPU Pack<T, N> sum(int64_t, const Loaded<N>& loaded) const {
    Pack<T, N> sum = nothing<T, N>(kCount);
    for (int k = 0; k < kCount; ++k) add_weighted(sum, weight_[k], loaded.packs[k]);
    return sum;
  }

 private:
  const void* data_[kCount];
  T weight_[kCount];
};

// Quotient and product each with a rounding of its own; a divisor of 1 changes nothing and costs nothing.
template <class T, int N>
PSSTORE_GPU void divide_and_scale(Pack<T, N>& sum, T divisor, T scale) {
  for (int e = 0; e < N; ++e) {
    sum[e] = (divisor == T(1) ? sum[e] : sum[e] / divisor) * scale;
  }
}

}  // namespace psstore::gpu
