// Tensors, decisions and requests for data as a program chooses them: such as workers have and shards take, but for one
// thing now and then.
#pragma once

#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "choices.h"
#include "rows/contribution.h"
#include "server/data_service.h"
#include "table_support.h"
#include "wire/carry.h"
#include "wire_support.h"

namespace psstore::testing {

// ---- tensors ----------------------------------------------------------------------------------------

inline const RowBounds kChosenBounds[] = {
    {},
    {.max_rows = 4, .eviction = EvictionKind::kLeastRecent},
    {.eviction = EvictionKind::kTimeToLive,
     .time_to_live = 3,
     .admission = AdmissionKind::kAfter,
     .admit_after = 2},
};

// In the group that has its rule's number; one slice or two, or as many partitions of a table.
inline TensorDefinition chosen_tensor(Choices& choose, uint64_t id) {
  using enum RuleKind;
  TensorDefinition tensor;
  tensor.tensor_id = id;
  tensor.rule = choose.one_of({kSgd, kAdam, kAssign, kAdd, kSparseSgd, kSparseAdagrad});
  tensor.group = static_cast<uint32_t>(tensor.rule);
  tensor.zeros = !choose.one_in(4);
  const bool has_rows = is_of_rows(tensor.rule);
  if (has_rows) {
    tensor.dtype = choose.one_of({DType::kFloat32, DType::kBFloat16});
    tensor.rows = {choose.one_of({3U, 300U}),
                   {FirstValueKind::kNormal, 0, 1, id},
                   choose.one_of(kChosenBounds)};
  } else {
    tensor.dtype = choose.one_of({DType::kFloat32, DType::kFloat32, DType::kFloat64});
    if (compensates(tensor.rule) && choose.one_in(3)) tensor.compensation = 0.5;
  }
  for (uint64_t index = 0, last = choose.below(2); index <= last; ++index) {
    const uint64_t num_elems = choose.one_of<uint64_t>({5, 300, 5, 1, 300, 20'000});
    tensor.slices.push_back({make_key(id, index), has_rows ? 0 : num_elems});
  }
  return tensor;
}

// ---- decisions --------------------------------------------------------------------------------------

inline GroupHypers chosen_hypers(Choices& choose) {
  const auto group = [](RuleKind rule) { return static_cast<uint32_t>(rule); };
  const std::pair<const std::string, double> lr{"lr", 0.1}, eps{"eps", 0.1},
      maximize{"maximize", 0};
  return {{group(RuleKind::kSgd), sgd(0.5, /*momentum=*/choose.one_of({0.9, 0.0}))},
          {group(RuleKind::kAdam),
           {lr,
            {"beta1", 0.9},
            {"beta2", 0.99},
            eps,
            {"weight_decay", 0},
            {"amsgrad", choose.one_of({0.0, 1.0})},
            maximize}},
          {group(RuleKind::kSparseSgd), {lr, maximize}},
          {group(RuleKind::kSparseAdagrad),
           {lr, {"lr_decay", 0}, {"initial_accumulator_value", 0.1}, eps, maximize}}};
}

// The next one, of what some workers push next, or would have; it may lack what a rule needs.
inline Decision chosen_decision(Choices& choose, uint64_t number, std::span<const Origin> next) {
  std::vector<Member> members;
  for (const Origin& origin : next) {
    if (choose.one_in(4)) continue;
    Member one = member(origin.rank, origin.round + choose.one_of<uint64_t>({0, 0, 0, 1}));
    one.origin.incarnation = origin.incarnation;
    if (choose.one_in(4)) one.present = {{1 + choose.below(4), 5 + choose.below(12)}};
    members.push_back(std::move(one));
  }
  GroupHypers hypers = chosen_hypers(choose);
  if (choose.one_in(8)) hypers.erase(static_cast<uint32_t>(choose.below(16)));
  const Open open = choose.one_of({Open::kNothing, Open::kContributions, Open::kScale});
  return Decision(number, /*skip=*/choose.one_in(8), 2.0, std::move(members), std::move(hypers),
                  open);
}

// ---- requests ---------------------------------------------------------------------------------------

struct ChosenRequest {
  Op op;
  std::vector<SliceEntry> table = {};
  std::string body = {};
  Bytes payload = {};
};

inline bool is_meant_for(Op op, RuleKind rule) {
  switch (op) {
    case Op::kPUSH:
    case Op::kNORM: return applies_by_decision(rule);
    case Op::kRESTORE: return applies_by_decision(rule) && !is_of_rows(rule);
    case Op::kADD: return !applies_by_decision(rule);
    case Op::kASSIGN: return rule == RuleKind::kAssign || is_of_rows(rule);
    case Op::kPULL_ROWS:
    case Op::kLIST_ROWS: return is_of_rows(rule);
    default: return !is_of_rows(rule);
  }
}

// One that the operation is meant for, as a rule.
inline const TensorDefinition& chosen_target(Choices& choose, Op op,
                                             std::span<const TensorDefinition> tensors) {
  const size_t first = choose.below(tensors.size());
  const size_t num_tries = choose.one_in(16) ? 0 : tensors.size();
  for (size_t i = 0; i < num_tries; ++i) {
    const TensorDefinition& tensor = tensors[(first + i) % tensors.size()];
    if (is_meant_for(op, tensor.rule)) return tensor;
  }
  return tensors[first];
}

inline DType chosen_encoding(Choices& choose, Op op, const SlotSpec& spec) {
  using enum DType;
  if (choose.one_in(32)) return static_cast<DType>(choose.byte());
  if (op == Op::kPULL_ROWS) return choose.one_of({kFloat32, changes_of(kFloat32)});
  if (spec.has_rows()) return rows_in(choose.one_of({kFloat32, kBFloat16, kFloat16, kInt8}));
  if (op == Op::kPULL) return choose.one_of({spec.dtype, changes_of(spec.dtype), kInt8});
  if (op != Op::kPUSH && op != Op::kADD) return spec.dtype;
  return choose.one_of({spec.dtype, spec.dtype, kBFloat16, kInt8, kTopK});
}

// Over the first bytes.
template <typename T>
void put_ascending(Choices& choose, Bytes& values, size_t count) {
  T next = 0;
  for (size_t i = 0; i < count; ++i) {
    next = choose.one_in(64) ? static_cast<T>(choose.extreme()) : next + 1 + choose.byte() % 3;
    std::memcpy(values.data() + i * sizeof next, &next, sizeof next);
  }
}

// What is written of a slice.
inline Bytes chosen_values(Choices& choose, const SlotSpec& spec, DType encoding) {
  using Limits = std::numeric_limits<float>;
  const bool are_rows = is_rows_encoding(encoding);
  const size_t count = choose.below(6);  // of rows, or of elements that are kept
  const size_t num_bytes =
      are_rows ? count * contributed_row_bytes(spec.rows.dim, dtype_of_rows(encoding))
               : encoded_bytes(encoding, spec.num_elems, count);
  Floats floats(num_bytes / sizeof(float) + 1);
  const size_t first = choose.below(7);
  for (size_t i = 0; i < floats.size(); ++i) floats[i] = static_cast<float>((first + i) % 7) - 3;
  floats[choose.below(floats.size())] = choose.one_of({1.0F, Limits::max(), Limits::infinity()});
  Bytes values(num_bytes);
  if (!values.empty()) std::memcpy(values.data(), floats.data(), num_bytes);
  if (are_rows) put_ascending<uint64_t>(choose, values, count);
  if (encoding == DType::kTopK) put_ascending<uint32_t>(choose, values, count);
  if (choose.one_in(32)) values.resize(choose.byte());
  return values;
}

inline std::string chosen_carry(Choices& choose, uint64_t version) {
  Carry carry;
  if (choose.one_in(8)) carry.newest = version + choose.below(3);
  if (choose.one_in(8)) carry.at_least = version + choose.below(3);
  if (choose.one_in(2)) carry.scaled = version;
  carry.wait_s = choose.one_of({0.0, 5.0});
  carry.factor = choose.one_of<std::optional<double>>({0.5, 1.0, std::nullopt});
  return encode_carry(carry, carry.newest > 0 ? "decisions" : "");
}

// Behind the Carry of a PULL_ROWS: the rows that its table asks for, of which changes are asked by who has none (wire/rows_asked.h).
inline std::string chosen_ids(Choices& choose, std::span<const SliceEntry> table) {
  std::string ids, none;
  for (const SliceEntry& entry : table) {
    for (uint64_t i = 0; i < entry.version; ++i) {
      const uint64_t id = choose.below(10);
      ids.append(reinterpret_cast<const char*>(&id), sizeof id);
    }
    if (is_of_changes(entry.dtype)) none.resize(none.size() + 8 + 4 * entry.version);
  }
  return ids + none;
}

// Of some slices of these tensors, to a shard at that version.
inline ChosenRequest chosen_request(Choices& choose, std::span<const TensorDefinition> tensors,
                                    uint64_t version) {
  using enum Op;
  const Op op =
      choose.one_of({kPUSH, kPUSH, kPUSH, kPUSH, kPUSH, kPUSH, kPULL, kPULL, kASSIGN, kADD, kINIT,
                     kRESTORE, kNORM, kPULL_ROWS, kLIST_ROWS, kHOLD, kFREE, kRELEASE});
  ChosenRequest request{op};
  for (int left = choose.one_of({1, 2, 4, 0}); left > 0; --left) {
    const TensorDefinition& tensor = chosen_target(choose, op, tensors);
    const SlotSpec spec = tensor.slot(choose.one_of(tensor.slices));
    SliceEntry entry;
    entry.key = choose.one_in(32) ? choose.extreme() : spec.key;
    entry.version = op == kPULL_ROWS ? choose.below(6) : choose.one_of({uint64_t{0}, version + 1});
    entry.dtype = chosen_encoding(choose, op, spec);
    if (op == kRESTORE || op == kPULL) entry.part = choose.one_of<uint16_t>({0, 0, 1, 2, 3});
    if (DataService::is_write(op)) {
      const Bytes values = chosen_values(choose, spec, entry.dtype);
      entry.num_bytes = static_cast<uint32_t>(values.size());
      append(request.payload, values);
    }
    request.table.push_back(entry);
  }
  const bool carries = op == kPUSH || op == kPULL || op == kNORM || op == kPULL_ROWS;
  if (carries && choose.one_in(2)) request.body = chosen_carry(choose, version);
  if (op == kPULL_ROWS) request.body += chosen_ids(choose, request.table);
  return request;
}

}  // namespace psstore::testing
