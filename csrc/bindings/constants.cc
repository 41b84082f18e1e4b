// The numbers that C++ and Python share: sizes, limits, and the lists of ops, errors, dtypes and rules.
#include "bindings/common.h"
#include "core/types.h"
#include "rows/row_bounds.h"
#include "rules/hyper.h"
#include "server/pending_reads.h"
#include "shm/push_arena.h"
#include "wire/header.h"
#include "wire/limits.h"

namespace psstore::bindings {
namespace {

py::object read_only(const py::dict& names) {
  return py::module_::import("types").attr("MappingProxyType")(names);
}

template <typename Enum>
int number(Enum value) {
  return static_cast<int>(value);
}

py::dict ops() {
  py::dict names;
#define PSSTORE_X(name, value, body, meaning) names[#name] = value;
  PSSTORE_OPS(PSSTORE_X)
#undef PSSTORE_X
  return names;
}

py::dict error_codes() {
  py::dict names;
#define PSSTORE_X(name, value, meaning) names[#name] = value;
  PSSTORE_ERROR_CODES(PSSTORE_X)
#undef PSSTORE_X
  return names;
}

py::dict dtypes() {
  py::dict names;
  names["float32"] = number(DType::kFloat32);
  names["float64"] = number(DType::kFloat64);
  names["bfloat16"] = number(DType::kBFloat16);
  names["float16"] = number(DType::kFloat16);
  names["int8"] = number(DType::kInt8);
  names["sign"] = number(DType::kSign);
  names["topk"] = number(DType::kTopK);
  names["rows"] = number(kRowsEncoding);
  names["rows_bfloat16"] = number(rows_in(DType::kBFloat16));
  names["rows_float16"] = number(rows_in(DType::kFloat16));
  names["rows_int8"] = number(rows_in(DType::kInt8));
  return names;
}

py::dict rules() {
  py::dict names;
  names["assign"] = number(RuleKind::kAssign);
  names["add"] = number(RuleKind::kAdd);
  names["sgd"] = number(RuleKind::kSgd);
  names["adam"] = number(RuleKind::kAdam);
  names["adamw"] = number(RuleKind::kAdamW);
  names["adagrad"] = number(RuleKind::kAdagrad);
  names["rmsprop"] = number(RuleKind::kRmsProp);
  names["reduce"] = number(RuleKind::kReduce);
  names["delayed_nesterov"] = number(RuleKind::kDelayedNesterov);
  return names;
}

py::dict row_rules() {
  py::dict names;
  names["sparse_sgd"] = number(RuleKind::kSparseSgd);
  names["sparse_adagrad"] = number(RuleKind::kSparseAdagrad);
  names["rowwise_adagrad"] = number(RuleKind::kRowwiseAdagrad);
  names["sparse_adam"] = number(RuleKind::kSparseAdam);
  names["sparse_momentum"] = number(RuleKind::kSparseMomentum);
  names["ftrl"] = number(RuleKind::kFtrl);
  return names;
}

py::dict reductions() {
  py::dict names;
  names["mean"] = number(ReductionKind::kMean);
  names["median"] = number(ReductionKind::kMedian);
  names["trimmed_mean"] = number(ReductionKind::kTrimmedMean);
  return names;
}

py::dict first_values() {
  py::dict names;
  names["constant"] = static_cast<int>(FirstValueKind::kConstant);
  names["uniform"] = static_cast<int>(FirstValueKind::kUniform);
  names["normal"] = static_cast<int>(FirstValueKind::kNormal);
  return names;
}

py::dict evictions() {
  py::dict names;
  names["lru"] = number(EvictionKind::kLeastRecent);
  names["lfu"] = number(EvictionKind::kLeastFrequent);
  names["ttl"] = number(EvictionKind::kTimeToLive);
  return names;
}

py::dict admissions() {
  py::dict names;
  names["always"] = number(AdmissionKind::kAlways);
  names["after"] = number(AdmissionKind::kAfter);
  names["probability"] = number(AdmissionKind::kProbability);
  return names;
}

// The names up to the last slot that the rule uses.
py::tuple state_names(RuleKind rule) {
  const StateLayout layout = largest_state_layout(rule);
  int num_slots = kMaxStates;
  while (num_slots > 0 && !layout.uses(num_slots - 1)) --num_slots;
  py::list names;
  for (int slot = 0; slot < num_slots; ++slot) {
    names.append(layout.names[static_cast<size_t>(slot)]);  // None for a null
  }
  return names;
}

py::dict states() {
  py::dict by_rule;
  for (const auto& [name, rule] : rules()) {
    by_rule[name] = state_names(static_cast<RuleKind>(rule.cast<int>()));
  }
  return by_rule;
}

}  // namespace

void bind_constants(py::module_& m) {
  m.attr("PROTOCOL_VERSION") = kProtocolVersion;
  m.attr("HEADER_BYTES") = kHeaderBytes;
  m.attr("FIELDS_CRC_BYTES") = kFieldsCrcBytes;
  m.attr("SLICE_ENTRY_BYTES") = sizeof(SliceEntry);
  m.attr("SLICE_INDEX_BITS") = kSliceIndexBits;
  m.attr("MAX_SLICES") = kMaxSlices;
  m.attr("MAX_BODY_BYTES") = kMaxBodyBytes;
  m.attr("MAX_PENDING_READS") = kMaxPendingReads;
  m.attr("MAX_PAYLOAD_BYTES") = kMaxPayloadBytes;
  m.attr("PRE_AUTH_MAX_BYTES") = kPreAuthMaxBytes;
  m.attr("FLAG_CHECKSUM") = kFlagChecksum;
  m.attr("FLAG_SHARED") = kFlagShared;
  m.attr("SHARED_FROM_BYTES") = kSharedFromBytes;
  m.attr("OPS") = read_only(ops());
  m.attr("ERROR_CODES") = read_only(error_codes());
  m.attr("CHANGES_BIT") = kChangesBit;
  m.attr("DTYPES") = read_only(dtypes());
  m.attr("RULES") = read_only(rules());
  m.attr("ROW_RULES") = read_only(row_rules());
  m.attr("REDUCTIONS") = read_only(reductions());
  m.attr("MAX_SORTED") = kMaxSorted;
  m.attr("FIRST_VALUES") = read_only(first_values());
  m.attr("MAX_ROW_DIM") = kMaxRowDim;
  m.attr("EVICTIONS") = read_only(evictions());
  m.attr("ADMISSIONS") = read_only(admissions());
  m.attr("MAX_TTL") = kMaxTimeToLive;
  m.attr("MAX_ADMIT_AFTER") = kMaxAdmitAfter;
  m.attr("STATES") = read_only(states());
}

}  // namespace psstore::bindings
