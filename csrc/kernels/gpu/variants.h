// The kinds of update kernels there are, and which of them a slice is given to.
#pragma once

#include <cstdint>

#include "kernels/gpu/sources.h"
#include "kernels/steps.h"

namespace psstore::gpu {

// How gradients are read: any contributions, or so many aligned ones of one dtype.
enum class SourceForm : uint8_t {
  kAny,
  kFloat1,
  kFloat2,
  kFloat4,
  kFloat8,
  kBFloat1,
  kBFloat2,
  kBFloat4,
  kBFloat8,
};
inline constexpr int kNumSourceForms = 9;

// Not one for each combination, which would be hundreds, and minutes of compiling: the special ways to read are
// there for what models are trained with, the general one for all.
constexpr bool has_aligned_sources(StepForm form) {
  return form == StepForm::kSgd || form == StepForm::kSgdMomentum || form == StepForm::kAdam;
}

struct Variant {
  StepForm step;
  bool is_double;
  SourceForm sources;

  int index() const {
    return (static_cast<int>(step) * 2 + (is_double ? 1 : 0)) * kNumSourceForms +
           static_cast<int>(sources);
  }
  static Variant of_index(int index) {
    const int kind = index / kNumSourceForms;
    return {static_cast<StepForm>(kind / 2), kind % 2 == 1,
            static_cast<SourceForm>(index % kNumSourceForms)};
  }
};
inline constexpr int kNumVariants = kNumStepForms * 2 * kNumSourceForms;

template <class Visit>
auto with_aligned_sources(SourceForm form, Visit visit) {
  switch (form) {
    case SourceForm::kAny: break;
    case SourceForm::kFloat1: return visit(Type<AlignedSources<float, float, 1>>{});
    case SourceForm::kFloat2: return visit(Type<AlignedSources<float, float, 2>>{});
    case SourceForm::kFloat4: return visit(Type<AlignedSources<float, float, 4>>{});
    case SourceForm::kFloat8: return visit(Type<AlignedSources<float, float, 8>>{});
    case SourceForm::kBFloat1: return visit(Type<AlignedSources<float, BFloat16, 1>>{});
    case SourceForm::kBFloat2: return visit(Type<AlignedSources<float, BFloat16, 2>>{});
    case SourceForm::kBFloat4: return visit(Type<AlignedSources<float, BFloat16, 4>>{});
    case SourceForm::kBFloat8: return visit(Type<AlignedSources<float, BFloat16, 8>>{});
  }
  return visit(Type<AnySources<float>>{});
}

// Calls `visit` with the Type<> of the sources that a kernel of the form `Step` reads, and returns what it does.
template <class Step, class Visit>
auto with_sources(SourceForm form, Visit visit) {
  if constexpr (sizeof(typename Step::Element) == sizeof(double)) {
    return visit(Type<AnySources<double>>{});
  } else if constexpr (has_aligned_sources(Step::kForm)) {
    return with_aligned_sources(form, visit);
  } else {
    return visit(Type<AnySources<float>>{});
  }
}

}  // namespace psstore::gpu
