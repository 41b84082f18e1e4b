#include "table/decision.h"

#include <algorithm>
#include <cmath>

namespace psstore {
namespace {

[[noreturn]] void refuse(uint64_t number, const std::string& what) {
  throw Error(ErrorCode::BAD_ARGUMENT, "decision " + std::to_string(number) + ": " + what);
}

}  // namespace

bool Member::lacks(uint64_t tensor_id) const {
  return std::binary_search(absent.begin(), absent.end(), tensor_id);
}

Decision::Decision(uint64_t number, bool skip, double divisor, std::vector<Member> members,
                   GroupHypers hypers)
    : number_(number),
      skip_(skip),
      divisor_(divisor),
      members_(std::move(members)),
      hypers_(std::move(hypers)) {
  if (number_ == 0) refuse(number_, "numbers begin with 1");
  if (!std::isfinite(divisor_) || divisor_ == 0) {
    refuse(number_, "can't divide by " + std::to_string(divisor_));
  }
  for (size_t i = 0; i < members_.size(); ++i) {
    Member& member = members_[i];
    if (i > 0 && members_[i - 1].origin.rank >= member.origin.rank) {
      refuse(number_, "rank " + std::to_string(member.origin.rank) + " comes after rank " +
                          std::to_string(members_[i - 1].origin.rank));
    }
    if (!std::isfinite(member.weight)) {
      refuse(number_,
             "the weight of rank " + std::to_string(member.origin.rank) + " is not finite");
    }
    std::sort(member.absent.begin(), member.absent.end());
  }
}

void PendingDecision::require_hyper(const SlotSpec& spec) {
  const std::pair<uint32_t, RuleKind> wanted{spec.group, spec.rule};
  if (hypers_.count(wanted) != 0) return;
  const auto given = decision_.hypers().find(spec.group);
  if (given == decision_.hypers().end()) {
    throw Error(ErrorCode::BAD_HYPER, "decision " + std::to_string(decision_.number()) +
                                          " has no hyper-parameters for group " +
                                          std::to_string(spec.group) + ", which tensor " +
                                          std::to_string(tensor_of(spec.key)) + " is in");
  }
  hypers_.emplace(wanted, parse_hyper(spec.rule, given->second));
}

const Hyper& PendingDecision::hyper(const SlotSpec& spec) const {
  return hypers_.at({spec.group, spec.rule});
}

}  // namespace psstore
