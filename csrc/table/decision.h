// The coordinator's record of one step as a shard applies it: immutable, checked when it is made.
//
// Signatures, quorum and staleness are elsewhere: whoever builds a Decision has checked that the store
// said so.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "rules/hyper.h"
#include "table/schema.h"

namespace psstore {

// Which contribution: that of one life of one rank in one round. The key of exactly-once.
struct Origin {
  uint32_t rank = 0;
  uint32_t incarnation = 0;
  uint64_t round = 0;

  bool operator==(const Origin&) const = default;
};

struct Member {
  Origin origin;
  float weight = 1.0F;
  // Tensors that it has a gradient for: inclusive ranges of ids, ascending and disjoint.
  std::vector<std::pair<uint64_t, uint64_t>> present;

  bool has(uint64_t tensor_id) const;
};

// Hyper-parameters by name, per parameter group.
using GroupHypers = std::map<uint32_t, std::map<std::string, double>>;

class Decision {
 public:
  // `members` in ascending rank order. Throws Error(BAD_ARGUMENT) for a number of 0, members or ranges
  // out of order, a weight that is not finite, a divisor that can't divide.
  Decision(uint64_t number, bool skip, double divisor, std::vector<Member> members,
           GroupHypers hypers);

  uint64_t number() const { return number_; }
  bool skip() const { return skip_; }
  double divisor() const { return divisor_; }
  const std::vector<Member>& members() const { return members_; }
  const GroupHypers& hypers() const { return hypers_; }

 private:
  uint64_t number_;
  bool skip_;
  double divisor_;
  std::vector<Member> members_;
  GroupHypers hypers_;
};

// A decision together with its hyper-parameters as the kernels take them: what slots are updated from.
// Parsed while it is checked, so that nothing is left to fail once slots change.
class PendingDecision {
 public:
  explicit PendingDecision(Decision decision) : decision_(std::move(decision)) {}

  const Decision& decision() const { return decision_; }

  // Throws Error(BAD_HYPER) if the decision lacks what slots of that rule and group need.
  void require_hyper(const SlotSpec& spec);
  // REQUIRES: require_hyper() of the same rule and group.
  const Hyper& hyper(const SlotSpec& spec) const;

 private:
  Decision decision_;
  std::map<std::pair<uint32_t, RuleKind>, Hyper> hypers_;
};

}  // namespace psstore
