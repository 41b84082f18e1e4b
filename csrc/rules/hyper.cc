#include "rules/hyper.h"

#include <cmath>
#include <limits>
#include <span>
#include <sstream>
#include <string_view>

namespace psstore {
namespace {

using Numbers = std::map<std::string, double>;

// How one name reaches its field.
struct NumberField {
  const char* name;
  double Hyper::* field;
};
struct FlagField {
  const char* name;
  bool Hyper::* field;
};

constexpr NumberField kLr{"lr", &Hyper::lr};
constexpr NumberField kEps{"eps", &Hyper::eps};
constexpr NumberField kMomentum{"momentum", &Hyper::momentum};
constexpr NumberField kWeightDecay{"weight_decay", &Hyper::weight_decay};
constexpr FlagField kMaximize{"maximize", &Hyper::maximize};

constexpr NumberField kSgdNumbers[] = {
    kLr, kMomentum, {"dampening", &Hyper::dampening}, kWeightDecay};
constexpr FlagField kSgdFlags[] = {{"nesterov", &Hyper::nesterov}, kMaximize};

constexpr NumberField kAdamNumbers[] = {
    kLr, {"beta1", &Hyper::beta1}, {"beta2", &Hyper::beta2}, kEps, kWeightDecay};
constexpr FlagField kAdamFlags[] = {{"amsgrad", &Hyper::amsgrad}, kMaximize};

constexpr NumberField kAdagradNumbers[] = {
    kLr,
    {"lr_decay", &Hyper::lr_decay},
    kWeightDecay,
    {"initial_accumulator_value", &Hyper::initial_accumulator_value},
    kEps};
constexpr FlagField kAdagradFlags[] = {kMaximize};

// Of rows, which have no weight decay: torch refuses it for sparse gradients.
constexpr NumberField kSparseSgdNumbers[] = {kLr};
constexpr NumberField kSparseAdagradNumbers[] = {
    kLr,
    {"lr_decay", &Hyper::lr_decay},
    {"initial_accumulator_value", &Hyper::initial_accumulator_value},
    kEps};
constexpr NumberField kRowwiseAdagradNumbers[] = {
    kLr, {"initial_accumulator_value", &Hyper::initial_accumulator_value}, kEps};
constexpr NumberField kSparseAdamNumbers[] = {
    kLr, {"beta1", &Hyper::beta1}, {"beta2", &Hyper::beta2}, kEps};
constexpr FlagField kSparseFlags[] = {kMaximize};
constexpr NumberField kSparseMomentumNumbers[] = {kLr, kMomentum, {"dampening", &Hyper::dampening}};
constexpr NumberField kFtrlNumbers[] = {
    kLr,
    {"lr_power", &Hyper::lr_power},
    {"initial_accumulator_value", &Hyper::initial_accumulator_value},
    {"l1", &Hyper::l1},
    {"l2", &Hyper::l2},
    {"l2_shrinkage", &Hyper::l2_shrinkage},
    {"beta", &Hyper::beta}};

constexpr NumberField kRmsPropNumbers[] = {
    kLr, {"alpha", &Hyper::alpha}, kEps, kWeightDecay, kMomentum};
constexpr FlagField kRmsPropFlags[] = {{"centered", &Hyper::centered}, kMaximize};

constexpr NumberField kDelayedNesterovNumbers[] = {
    kLr, kMomentum, {"every", &Hyper::every}, {"activation", &Hyper::activation}};

struct Schema {
  const char* rule;
  std::span<const NumberField> numbers;
  std::span<const FlagField> flags;
};

Schema schema_of(RuleKind rule) {
  switch (rule) {
    case RuleKind::kAssign: return {"assign", {}, {}};
    case RuleKind::kAdd: return {"add", {}, {}};
    case RuleKind::kSgd: return {"sgd", kSgdNumbers, kSgdFlags};
    case RuleKind::kAdam: return {"adam", kAdamNumbers, kAdamFlags};
    case RuleKind::kAdamW: return {"adamw", kAdamNumbers, kAdamFlags};
    case RuleKind::kAdagrad: return {"adagrad", kAdagradNumbers, kAdagradFlags};
    case RuleKind::kRmsProp: return {"rmsprop", kRmsPropNumbers, kRmsPropFlags};
    case RuleKind::kReduce: return {"reduce", {}, {}};
    case RuleKind::kSparseSgd: return {"sparse_sgd", kSparseSgdNumbers, kSparseFlags};
    case RuleKind::kSparseAdagrad: return {"sparse_adagrad", kSparseAdagradNumbers, kSparseFlags};
    case RuleKind::kRowwiseAdagrad:
      return {"rowwise_adagrad", kRowwiseAdagradNumbers, kSparseFlags};
    case RuleKind::kSparseAdam: return {"sparse_adam", kSparseAdamNumbers, kSparseFlags};
    case RuleKind::kSparseMomentum: return {"sparse_momentum", kSparseMomentumNumbers, kSgdFlags};
    case RuleKind::kFtrl: return {"ftrl", kFtrlNumbers, kSparseFlags};
    case RuleKind::kDelayedNesterov: return {"delayed_nesterov", kDelayedNesterovNumbers, {}};
  }
  throw Error(ErrorCode::BAD_HYPER,
              "no update rule has the number " + std::to_string(static_cast<int>(rule)));
}

[[noreturn]] void refuse(const Schema& schema, std::string_view name, std::string_view problem) {
  throw Error(ErrorCode::BAD_HYPER, "rule '" + std::string(schema.rule) + "': hyper-parameter '" +
                                        std::string(name) + "' " + std::string(problem));
}

double number_named(const Schema& schema, const Numbers& given, const char* name) {
  const auto found = given.find(name);
  if (found == given.end()) refuse(schema, name, "is missing");
  if (!std::isfinite(found->second)) refuse(schema, name, "is not a finite number");
  return found->second;
}

bool flag_named(const Schema& schema, const Numbers& given, const char* name) {
  const double value = number_named(schema, given, name);
  if (value != 0.0 && value != 1.0) {
    refuse(schema, name, "is a flag: expected 0 or 1, got " + std::to_string(value));
  }
  return value == 1.0;
}

bool has_name(const Schema& schema, std::string_view name) {
  for (const NumberField& number : schema.numbers) {
    if (name == number.name) return true;
  }
  for (const FlagField& flag : schema.flags) {
    if (name == flag.name) return true;
  }
  return false;
}

// The checks of Keras' constructor, and that FTRL can divide by its learning rate.
void check_ftrl(const Schema& schema, const Hyper& hyper) {
  if (static_cast<float>(hyper.lr) <= 0) {
    refuse(
        schema, "lr",
        "is " + std::to_string(hyper.lr) + "; FTRL divides by it: expected more than 0 in float32");
  }
  if (hyper.lr_power > 0) {
    refuse(schema, "lr_power",
           "is " + std::to_string(hyper.lr_power) + "; expected 0 or less, -0.5 as a rule");
  }
}

// What the paper asks of its numbers: a momentum that there is, of whole numbers of gradients, and which is not given
// out in between more than once.
void check_delayed_nesterov(const Schema& schema, const Hyper& hyper) {
  if (hyper.momentum <= 0 || hyper.momentum >= 1) {
    refuse(schema, "momentum",
           "is " + std::to_string(hyper.momentum) + "; expected more than 0 and less than 1");
  }
  // Steps are counted in as many bits, schema.cc.
  if (hyper.every < 1 || hyper.every > 0x1p53 || hyper.every != std::floor(hyper.every)) {
    refuse(schema, "every",
           "is " + std::to_string(hyper.every) +
               "; so many gradients make a step of the momentum: expected a whole number from 1 to"
               " 2^53");
  }
  if (hyper.activation * hyper.every > 1) {
    refuse(schema, "activation",
           "is " + std::to_string(hyper.activation) + "; expected at most 1 / every, which is " +
               std::to_string(1 / hyper.every));
  }
}

bool may_be_negative(const NumberField& number) {
  return number.field == &Hyper::dampening || number.field == &Hyper::lr_power;
}

bool has_sgd_momentum(RuleKind rule) {
  return rule == RuleKind::kSgd || rule == RuleKind::kSparseMomentum;
}

// The checks of torch.optim's constructors: only SGD's dampening may be negative.
void check_ranges(const Schema& schema, RuleKind rule, const Hyper& hyper) {
  for (const NumberField& number : schema.numbers) {
    const double value = hyper.*number.field;
    if (value < 0 && !may_be_negative(number)) {
      refuse(schema, number.name, "is negative: " + std::to_string(value));
    }
  }
  if (hyper.beta1 >= 1) refuse(schema, "beta1", "is not below 1: " + std::to_string(hyper.beta1));
  if (hyper.beta2 >= 1) refuse(schema, "beta2", "is not below 1: " + std::to_string(hyper.beta2));
  if (has_sgd_momentum(rule) && hyper.nesterov && (hyper.momentum <= 0 || hyper.dampening != 0)) {
    refuse(schema, "nesterov", "needs a momentum above 0 and no dampening");
  }
  if (rule == RuleKind::kFtrl) check_ftrl(schema, hyper);
  if (rule == RuleKind::kDelayedNesterov) check_delayed_nesterov(schema, hyper);
}

}  // namespace

Hyper parse_hyper(RuleKind rule, const Numbers& given) {
  const Schema schema = schema_of(rule);
  for (const auto& [name, value] : given) {
    if (!has_name(schema, name)) refuse(schema, name, "is unknown");
  }
  Hyper hyper;
  for (const NumberField& number : schema.numbers) {
    hyper.*number.field = number_named(schema, given, number.name);
  }
  for (const FlagField& flag : schema.flags) {
    hyper.*flag.field = flag_named(schema, given, flag.name);
  }
  check_ranges(schema, rule, hyper);
  return hyper;
}

void check_fits(RuleKind rule, const Numbers& given, DType dtype) {
  if (dtype == DType::kFloat64) return;
  for (const auto& [name, value] : given) {
    if (std::abs(value) > std::numeric_limits<float>::max()) {
      std::ostringstream problem;
      problem << "is " << value << ", which is infinite in float32";
      refuse(schema_of(rule), name, problem.str());
    }
  }
}

// Which option asks for which buffer: the conditions of the torch functions that the rules cite.
StateLayout state_layout(RuleKind rule, const Hyper& hyper) {
  switch (rule) {
    case RuleKind::kAssign:
    case RuleKind::kAdd:
    case RuleKind::kReduce:
    case RuleKind::kSparseSgd:
    case RuleKind::kSparseAdagrad:
    case RuleKind::kRowwiseAdagrad:
    case RuleKind::kSparseAdam:
    case RuleKind::kSparseMomentum:
    case RuleKind::kFtrl: return {};
    case RuleKind::kSgd: return {{hyper.momentum != 0 ? "momentum_buffer" : nullptr}};
    case RuleKind::kAdam:
    case RuleKind::kAdamW:
      return {{"exp_avg", "exp_avg_sq", hyper.amsgrad ? "max_exp_avg_sq" : nullptr}};
    case RuleKind::kAdagrad: return {{"sum"}};
    case RuleKind::kRmsProp:
      return {{"square_avg", hyper.momentum > 0 ? "momentum_buffer" : nullptr,
               hyper.centered ? "grad_avg" : nullptr}};
    case RuleKind::kDelayedNesterov: return {{"momentum_buffer", "gradient_sum"}};
  }
  return {};
}

StateLayout largest_state_layout(RuleKind rule) {
  Hyper everything;
  everything.momentum = 1;
  everything.amsgrad = true;
  everything.centered = true;
  return state_layout(rule, everything);
}

}  // namespace psstore
