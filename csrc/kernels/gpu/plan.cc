// Two passes over a batch: what it needs, then the table. Slices keep their order within a variant.
#include "kernels/gpu/plan.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <new>

#include "kernels/gpu/first_slices.h"
#include "kernels/kernel_set.h"

namespace psstore::gpu {
namespace {

// Bit by bit, since -0 is not 0; padding is after the last member only.
bool is_same(const Hyper* one, const Hyper* other) {
  constexpr size_t kBytes = offsetof(Hyper, centered) + sizeof(Hyper::centered);
  if (one == nullptr || other == nullptr) return one == other;
  return one == other || std::memcmp(one, other, kBytes) == 0;
}

// What the slices of one variant have in common with the one before: most have its step.
class StepRun {
 public:
  // Whether the update needs a step of its own.
  bool begins_with(const SliceUpdate& update) {
    if (any_ && step_ == update.step && rule_ == update.rule && is_same(hyper_, update.hyper)) {
      return false;
    }
    any_ = true;
    hyper_ = update.hyper;
    step_ = update.step;
    rule_ = update.rule;
    return true;
  }

 private:
  bool any_ = false;
  const Hyper* hyper_ = nullptr;
  int64_t step_ = 0;
  RuleKind rule_ = RuleKind::kAssign;
};
using StepRuns = std::array<StepRun, kNumVariants>;

VectorMap vectors_of(Purpose purpose, const SliceUpdate& update) {
  const auto bytes = static_cast<int64_t>(dtype_bytes(update.dtype));
  const int lead = purpose == Purpose::kUpdate ? lead_of(update.value_out, bytes) : 0;
  return {update.num_elems, static_cast<int>(16 / bytes), lead};
}

// The kernels read value and state by element at least: other memory than that is no tensor of ours.
void check_alignment(const SliceUpdate& update) {
  const size_t bytes = dtype_bytes(update.dtype);
  bool aligned = is_aligned(update.value_in, bytes) && is_aligned(update.value_out, bytes) &&
                 is_aligned(update.shadow, sizeof(BFloat16));
  for (const void* state : update.state) aligned = aligned && is_aligned(state, bytes);
  if (!aligned) {
    throw Error(ErrorCode::INTERNAL,
                "slice update: value, state and shadow on a GPU are aligned to their elements");
  }
}

// Throws if the update breaks what a kernel of that purpose requires.
void check_for(Purpose purpose, const SliceUpdate& update) {
  if (update.sorted) {
    throw Error(ErrorCode::INTERNAL, "slice update: no kernel of a GPU sorts contributions");
  }
  if (update.base != nullptr) {
    throw Error(ErrorCode::INTERNAL, "slice update: no kernel of a GPU compensates a gradient");
  }
  if (purpose == Purpose::kSquares) return check_reduction(update);
  check_update(update);
  check_alignment(update);
}

// Whether the vectors of a float tensor are whole accesses in memory of `elem_bytes` an element, too.
bool lies_like(const VectorMap& vectors, const void* data, size_t elem_bytes) {
  const size_t first =
      reinterpret_cast<uintptr_t>(data) - elem_bytes * static_cast<size_t>(vectors.lead);
  return first % (elem_bytes * static_cast<size_t>(vectors.vector_elems)) == 0;
}

// An encoded payload that begins with a whole scale has whole scales, and codes at multiples of 4 bytes.
bool takes_whole_accesses(const VectorMap& vectors, const Contribution& one) {
  switch (one.dtype) {
    case DType::kTopK: return false;
    case DType::kInt8:
    case DType::kSign: return vectors.lead == 0 && is_aligned(one.data, sizeof(float));
    default: return lies_like(vectors, one.data, dtype_bytes(one.dtype));
  }
}

bool sources_are_alike(const VectorMap& vectors, std::span<const Contribution> contributions) {
  return std::ranges::all_of(contributions, [&](const Contribution& one) {
    return one.dtype == contributions.front().dtype && takes_whole_accesses(vectors, one);
  });
}

bool is_aligned_throughout(const SliceUpdate& update) {
  const VectorMap vectors = vectors_of(Purpose::kUpdate, update);
  bool aligned = lies_like(vectors, update.value_in, sizeof(float)) &&
                 lies_like(vectors, update.value_out, sizeof(float)) &&
                 (update.shadow == nullptr || lies_like(vectors, update.shadow, sizeof(BFloat16)));
  const StateLayout layout = state_layout(update.rule, *update.hyper);
  for (int slot = 0; slot < kMaxStates; ++slot) {
    const void* state = update.state[static_cast<size_t>(slot)];
    aligned = aligned && (!layout.uses(slot) || lies_like(vectors, state, sizeof(float)));
  }
  return aligned && sources_are_alike(vectors, update.contributions);
}

SourceForm form_for(DType dtype, size_t count) {
  if (dtype != DType::kFloat32 && dtype != DType::kBFloat16) return SourceForm::kAny;
  const bool is_float = dtype == DType::kFloat32;
  switch (count) {
    case 1: return is_float ? SourceForm::kFloat1 : SourceForm::kBFloat1;
    case 2: return is_float ? SourceForm::kFloat2 : SourceForm::kBFloat2;
    case 4: return is_float ? SourceForm::kFloat4 : SourceForm::kBFloat4;
    case 8: return is_float ? SourceForm::kFloat8 : SourceForm::kBFloat8;
    default: return SourceForm::kAny;
  }
}

SourceForm source_form(StepForm step, const SliceUpdate& update) {
  if (!has_aligned_sources(step) || update.dtype != DType::kFloat32) return SourceForm::kAny;
  if (update.contributions.empty()) return SourceForm::kAny;
  const SourceForm form = form_for(update.contributions.front().dtype, update.contributions.size());
  return form != SourceForm::kAny && is_aligned_throughout(update) ? form : SourceForm::kAny;
}

template <class T>
void put_step(StepForm form, const SliceUpdate& update, StepBytes& bytes) {
  with_form<T>(form, [&](auto type) {
    using Step = typename decltype(type)::type;
    static_assert(sizeof(Step) <= kStepBytes && alignof(Step) <= alignof(StepBytes));
    ::new (bytes.bytes) Step(Step::make(update));
  });
}

Slice slice_of(Purpose purpose, const SliceUpdate& update) {
  Slice slice{};
  slice.vectors = vectors_of(purpose, update);
  slice.value_in = update.value_in;
  slice.value_out = update.value_out;
  slice.shadow = update.shadow;
  for (size_t slot = 0; slot < kMaxStates; ++slot) slice.state[slot] = update.state[slot];
  slice.divisor = update.divisor;
  slice.scale = update.scale;
  slice.num_sources = static_cast<uint32_t>(update.contributions.size());
  slice.state_is_new = update.state_is_new;
  slice.sources_are_alike = sources_are_alike(slice.vectors, update.contributions);
  return slice;
}

constexpr uint64_t rounded_up(uint64_t bytes) {
  return (bytes + 15) / 16 * 16;
}

// Writes the parts of one launch, slice after slice.
class LaunchWriter {
 public:
  LaunchWriter() = default;
  LaunchWriter(const Launch& launch, std::byte* table)
      : slice_(reinterpret_cast<Slice*>(table + launch.slices)),
        sources_(reinterpret_cast<Source*>(table + launch.sources)),
        blocks_(launch.grid, reinterpret_cast<uint32_t*>(table + launch.first_slices)) {}

  void add(Slice slice, std::span<const Contribution> contributions) {
    slice.first_source = num_sources_;
    slice.first_chunk = blocks_.num_chunks();
    for (const Contribution& one : contributions) {
      sources_[num_sources_++] = {one.data, one.num_bytes, one.weight, one.dtype};
    }
    slice_[blocks_.num_slices()] = slice;
    blocks_.add(slice.vectors.num_chunks());
  }

  // The slice after the last.
  void end() const {
    slice_[blocks_.num_slices()] = Slice{};
    slice_[blocks_.num_slices()].first_chunk = blocks_.num_chunks();
  }

 private:
  Slice* slice_ = nullptr;
  Source* sources_ = nullptr;
  FirstSlices blocks_;
  uint32_t num_sources_ = 0;
};

}  // namespace

Variant Plan::variant_of(const SliceUpdate& update) const {
  const bool is_double = update.dtype == DType::kFloat64;
  if (purpose_ == Purpose::kSquares) return {StepForm::kAssign, is_double, SourceForm::kAny};
  const StepForm step = step_form(update);
  return {step, is_double, source_form(step, update)};
}

Plan::Plan(Purpose purpose, std::span<const SliceUpdate> batch, int64_t max_blocks)
    : purpose_(purpose), batch_(batch) {
  variants_.reserve(batch.size());
  StepRuns runs{};
  std::array<int64_t, kNumVariants> num_chunks{};
  for (const SliceUpdate& update : batch) {
    check_for(purpose, update);
    const auto index = static_cast<uint16_t>(variant_of(update).index());
    variants_.push_back(index);
    Launch& launch = launches_[index];
    ++launch.num_slices;
    launch.num_sources += static_cast<int64_t>(update.contributions.size());
    num_chunks[index] += vectors_of(purpose, update).num_chunks();
    if (runs[index].begins_with(update)) ++num_steps_;
  }
  for (size_t index = 0; index < kNumVariants; ++index) {
    launches_[index].grid = Grid::of(num_chunks[index], max_blocks);
  }
  place_parts();
}

void Plan::place_parts() {
  uint64_t end = 0;
  const auto place = [&](int64_t count, size_t bytes) {
    const uint64_t begin = end;
    end = rounded_up(begin + static_cast<uint64_t>(count) * bytes);
    return begin;
  };
  for (Launch& launch : launches_) {
    if (launch.num_slices == 0) continue;
    launch.slices = place(launch.num_slices + 1, sizeof(Slice));
    launch.sources = place(launch.num_sources, sizeof(Source));
    launch.first_slices = place(launch.grid.num_blocks(), sizeof(uint32_t));
  }
  steps_ = end;
}

void Plan::write(std::byte* table) const {
  StepRuns runs{};
  std::array<uint32_t, kNumVariants> last_step{};
  std::array<LaunchWriter, kNumVariants> writers;
  for (size_t index = 0; index < kNumVariants; ++index) {
    writers[index] = LaunchWriter(launches_[index], table);
  }
  auto* steps = reinterpret_cast<StepBytes*>(table + steps_);
  uint32_t num_steps = 0;
  for (size_t position = 0; position < batch_.size(); ++position) {
    const SliceUpdate& update = batch_[position];
    const size_t index = variants_[position];
    if (runs[index].begins_with(update)) {
      last_step[index] = num_steps++;
      const Variant variant = Variant::of_index(static_cast<int>(index));
      StepBytes& bytes = steps[last_step[index]];
      variant.is_double ? put_step<double>(variant.step, update, bytes)
                        : put_step<float>(variant.step, update, bytes);
    }
    Slice slice = slice_of(purpose_, update);
    slice.step = last_step[index];
    slice.position = static_cast<uint32_t>(position);
    writers[index].add(slice, update.contributions);
  }
  for (size_t index = 0; index < kNumVariants; ++index) {
    if (launches_[index].num_slices > 0) writers[index].end();
  }
}

BatchView Plan::view(const Launch& launch, const std::byte* table) const {
  return {reinterpret_cast<const Slice*>(table + launch.slices),
          reinterpret_cast<const Source*>(table + launch.sources),
          reinterpret_cast<const StepBytes*>(table + steps_),
          reinterpret_cast<const uint32_t*>(table + launch.first_slices), launch.grid};
}

}  // namespace psstore::gpu
