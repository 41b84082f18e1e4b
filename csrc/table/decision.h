// The coordinator's record of one step as a shard applies it: immutable, checked when it is made.
//
// Signatures, quorum and staleness are elsewhere: whoever builds a Decision has checked that the store
// said so.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "rules/hyper.h"
#include "table/schema.h"

namespace psstore {

// One life of a worker.
struct Life {
  uint32_t rank = 0;
  uint32_t incarnation = 0;

  bool operator==(const Life&) const = default;
};

// Which contribution: that of one life of one rank in one round. The key of exactly-once.
struct Origin {
  uint32_t rank = 0;
  uint32_t incarnation = 0;
  uint64_t round = 0;

  bool operator==(const Origin&) const = default;

  Life life() const { return {rank, incarnation}; }
};

struct Member {
  Origin origin;
  float weight = 1.0F;  // of its contribution in a sum
  // Tensors that it has a gradient for: inclusive ranges of ids, ascending and disjoint.
  std::vector<std::pair<uint64_t, uint64_t>> present;
  // By which its contribution is larger than its gradient; `weight` is divided by it already. Where members are
  // sorted, and nobody's weight counts, it is what is left of that.
  float loss_scale = 1.0F;

  bool has(uint64_t tensor_id) const;
};

// Hyper-parameters by name, per parameter group.
using GroupHypers = std::map<uint32_t, std::map<std::string, double>>;

// What a decision leaves open when it is made. A slot that it concerns is held, with the step not taken,
// until that is there.
enum class Open : uint8_t {
  kNothing,
  kContributions,  // early commit: members name what they will push
  kScale,          // clipping: known once the norm over all shards is
};

class Decision {
 public:
  // `members` in ascending rank order. A skip leaves nothing open, whatever `open` says. `averages`: the divisor makes
  // a mean of the sum.
  // Throws Error(BAD_ARGUMENT) for a number of 0, members or ranges out of order, a weight that is not
  // finite, a divisor or a loss scale that can't divide.
  Decision(uint64_t number, bool skip, double divisor, std::vector<Member> members,
           GroupHypers hypers, Open open = Open::kNothing, bool averages = true);

  uint64_t number() const { return number_; }
  bool skip() const { return skip_; }
  bool early() const { return open_ == Open::kContributions; }
  bool needs_scale() const { return open_ == Open::kScale; }
  double divisor() const { return divisor_; }
  bool averages() const { return averages_; }
  const std::vector<Member>& members() const { return members_; }
  const GroupHypers& hypers() const { return hypers_; }

  // The member of that rank; nullptr if there is none.
  const Member* member(uint32_t rank) const;

 private:
  uint64_t number_;
  bool skip_;
  double divisor_;
  std::vector<Member> members_;
  GroupHypers hypers_;
  Open open_;
  bool averages_;
};

// A decision together with what slots need to take its step: its hyper-parameters as the kernels take
// them, parsed while it is checked, so that nothing is left to fail once slots change; and its scale.
class PendingDecision {
 public:
  explicit PendingDecision(Decision decision)
      : decision_(std::move(decision)),
        skip_(decision_.skip()),
        lacks_scale_(decision_.needs_scale()) {}

  const Decision& decision() const { return decision_; }

  // No step is taken: the decision says so, or its scale did.
  bool skip() const { return skip_; }
  // What the reduced gradient is multiplied by. REQUIRES: !lacks_scale().
  double scale() const { return scale_; }
  bool lacks_scale() const { return lacks_scale_; }
  // Without a factor the decision becomes a skip. REQUIRES: lacks_scale().
  void set_scale(std::optional<double> factor);

  // Throws Error(BAD_HYPER) if the decision lacks what slots of that rule and group need. A group of
  // rules without hyper-parameters needs none.
  void require_hyper(const SlotSpec& spec);
  // Those that were required.
  const std::map<std::pair<uint32_t, RuleKind>, Hyper>& hypers() const { return hypers_; }
  // REQUIRES: require_hyper() of the same rule and group.
  const Hyper& hyper(const SlotSpec& spec) const;

 private:
  Decision decision_;
  bool skip_;
  bool lacks_scale_;
  double scale_ = 1.0;
  std::map<std::pair<uint32_t, RuleKind>, Hyper> hypers_;
};

}  // namespace psstore
