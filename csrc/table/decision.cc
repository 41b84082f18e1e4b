#include "table/decision.h"

#include <algorithm>
#include <cmath>
#include <iterator>

namespace psstore {
namespace {

[[noreturn]] void refuse(uint64_t number, const std::string& what) {
  throw Error(ErrorCode::BAD_ARGUMENT, "decision " + std::to_string(number) + ": " + what);
}

bool is_ascending(const std::vector<std::pair<uint64_t, uint64_t>>& ranges) {
  for (size_t i = 0; i < ranges.size(); ++i) {
    if (ranges[i].second < ranges[i].first) return false;
    if (i > 0 && ranges[i].first <= ranges[i - 1].second) return false;
  }
  return true;
}

}  // namespace

bool Member::has(uint64_t tensor_id) const {
  const auto after = std::upper_bound(
      present.begin(), present.end(), tensor_id,
      [](uint64_t id, const std::pair<uint64_t, uint64_t>& range) { return id < range.first; });
  return after != present.begin() && tensor_id <= std::prev(after)->second;
}

Decision::Decision(uint64_t number, bool skip, double divisor, std::vector<Member> members,
                   GroupHypers hypers, Open open, bool averages)
    : number_(number),
      skip_(skip),
      divisor_(divisor),
      members_(std::move(members)),
      hypers_(std::move(hypers)),
      open_(skip ? Open::kNothing : open),
      averages_(averages) {
  if (number_ == 0) refuse(number_, "numbers begin with 1");
  if (!std::isfinite(divisor_) || divisor_ == 0) {
    refuse(number_, "can't divide by " + std::to_string(divisor_));
  }
  for (size_t i = 0; i < members_.size(); ++i) {
    const Member& member = members_[i];
    if (i > 0 && members_[i - 1].origin.rank >= member.origin.rank) {
      refuse(number_, "rank " + std::to_string(member.origin.rank) + " comes after rank " +
                          std::to_string(members_[i - 1].origin.rank));
    }
    if (!std::isfinite(member.weight)) {
      refuse(number_,
             "the weight of rank " + std::to_string(member.origin.rank) + " is not finite");
    }
    if (!std::isfinite(member.loss_scale) || member.loss_scale <= 0) {
      refuse(number_, "the loss scale of rank " + std::to_string(member.origin.rank) + " is " +
                          std::to_string(member.loss_scale));
    }
    if (!is_ascending(member.present)) {
      refuse(number_, "the ranges of rank " + std::to_string(member.origin.rank) +
                          " are not ascending and disjoint");
    }
  }
}

// Where all ranks are members, a rank is its own place.
const Member* Decision::member(uint32_t rank) const {
  if (rank < members_.size() && members_[rank].origin.rank == rank) return &members_[rank];
  const auto found = std::lower_bound(
      members_.begin(), members_.end(), rank,
      [](const Member& member, uint32_t wanted) { return member.origin.rank < wanted; });
  return found != members_.end() && found->origin.rank == rank ? &*found : nullptr;
}

void PendingDecision::set_scale(std::optional<double> factor) {
  lacks_scale_ = false;
  skip_ = !factor;
  scale_ = factor.value_or(1.0);
}

void PendingDecision::require_hyper(const SlotSpec& spec) {
  const std::pair<uint32_t, RuleKind> wanted{spec.group, spec.rule};
  if (hypers_.count(wanted) != 0) return;
  const auto given = decision_.hypers().find(spec.group);
  const bool has_some = given != decision_.hypers().end();
  if (!has_some && spec.rule != RuleKind::kReduce) {
    throw Error(ErrorCode::BAD_HYPER, "decision " + std::to_string(decision_.number()) +
                                          " has no hyper-parameters for group " +
                                          std::to_string(spec.group) + ", which tensor " +
                                          std::to_string(tensor_of(spec.key)) + " is in");
  }
  hypers_.emplace(wanted, has_some ? parse_hyper(spec.rule, given->second) : Hyper{});
}

const Hyper& PendingDecision::hyper(const SlotSpec& spec) const {
  return hypers_.at({spec.group, spec.rule});
}

}  // namespace psstore
