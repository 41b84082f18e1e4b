// Rules of the protocol that a test may break, to see that the simulator notices. Nothing else breaks them.
#pragma once

#include <atomic>
#include <cstdint>

namespace psstore {

// X(name, what holds)
#define PSSTORE_BREAKABLE_RULES(X)                                                            \
  X(DECISIONS_COME_FIRST, "a push is staged after the decisions that it carries are applied") \
  X(CONTRIBUTIONS_ARE_WAITED_FOR, "a read waits while the decision on its slice lacks some")  \
  X(SCALES_ARE_HEARD, "a shard applies the scale that a worker tells it")                     \
  X(NO_NORM_IS_A_SKIP, "a decision whose norm is not finite is not applied")                  \
  X(THE_UNANSWERED_IS_SENT_AGAIN, "a client asks again what was not answered")                \
  X(APPLIED_WRITES_KEEP_THEIR_NUMBERS, "a write that a shard has taken is not renumbered")    \
  X(WRITES_HAVE_NO_GAPS, "later writes close the gap of one that was given up")               \
  X(WHAT_IS_HELD_IS_KEPT, "a slot keeps what readers hold before it takes a step")            \
  X(READS_ARE_AS_OF_THEIR_DECISION, "who reads as of a decision sees no later one")           \
  X(REPLIES_WAIT_FOR_STANDBYS, "nobody is told what the shard's standbys do not have")        \
  X(LEASES_HAVE_AN_END, "nobody is told anything once the shard's standby may lead by vote")  \
  X(WRITES_ARE_RECORDED, "standbys are sent what clients write")                              \
  X(WHAT_IS_LENT_IS_KEPT, "what standbys see of a client's memory it is not to write to")     \
  X(SCALES_ARE_RECORDED, "standbys are sent the scales of decisions")                         \
  X(WHAT_IS_STAGED_IS_FILLED_IN, "a new standby is sent the contributions that wait")         \
  X(WINDOWS_ARE_FILLED_IN, "a new standby knows which writes were applied")                   \
  X(ROWS_ARE_SUMMED, "rows that come twice in a push are summed")                             \
  X(ROWS_ARE_RECORDED, "standbys are sent rows")                                              \
  X(ROWS_KEEP_THEIR_CODEC, "what a new standby is sent of rows says what it is in")           \
  X(ASSIGNED_ROWS_END_HOLDS, "what is held is gone once rows of it are assigned")             \
  X(ASSIGNED_STATE_IS_NEW, "the state of a row that is assigned starts anew")                 \
  X(EVICTION_IS_BY_DECISIONS, "which rows go follows from what decisions changed")            \
  X(ADMISSION_COUNTS_ALL, "admission counts what each member brings")                         \
  X(COUNTS_ARE_WRITTEN, "a checkpoint has what admission has counted")                        \
  X(COUNTS_ARE_FILLED_IN, "a new standby is sent what admission has counted")                 \
  X(USAGE_IS_LOADED, "rows that are loaded were used when they were")                         \
  X(ROUNDING_IS_BY_DECISION, "rows are rounded by lots that follow from the decision")        \
  X(REFUSED_WRITES_STAY_REFUSED, "a write that was refused is refused when it comes again")   \
  X(REFUSALS_ARE_FILLED_IN, "a new standby knows which writes were refused")                  \
  X(MARKS_ARE_ADDED_UP, "who has missed versions is sent what has changed in any of them")    \
  X(CHANGES_ARE_OF_THEIR_VERSION, "changes up to a version have the elements of that one")    \
  X(STEPPED_ROWS_ARE_MARKED, "who keeps rows is told of those that a decision changes")       \
  X(ASSIGNED_ROWS_ARE_MARKED, "who keeps rows is told of those that are assigned")            \
  X(EVICTED_ROWS_ARE_MARKED, "who keeps rows is told of those that are evicted")              \
  X(STEPPED_ROWS_ARE_NOTED, "a delta has the rows that a decision has changed")               \
  X(ASSIGNED_ROWS_ARE_NOTED, "a delta has the rows that were assigned")                       \
  X(NOTES_MOVE_WITH_ROWS, "what is noted of a row is noted of the place that it moves to")    \
  X(ROW_MARKS_ARE_THEIR_OWN, "what was read of other marks is sent anew")                     \
  X(BASES_ARE_THEIR_OWN, "a gradient is compensated from what its own worker was sent")       \
  X(BASES_MOVE, "what a worker is sent is its base from then on")                             \
  X(BASES_ARE_RECORDED, "standbys are told what workers were sent")                           \
  X(BASES_ARE_FILLED_IN, "a new standby is sent the bases of workers")                        \
  X(MARKS_ARE_SINCE_THEN, "who has a version since which nothing is marked is sent the whole")

enum class BreakableRule : uint32_t {
#define PSSTORE_X(name, meaning) k##name,
  PSSTORE_BREAKABLE_RULES(PSSTORE_X)
#undef PSSTORE_X
};

inline std::atomic<uint64_t> broken_rules{0};  // a bit for each

inline bool holds(BreakableRule rule) {
  return (broken_rules.load(std::memory_order_relaxed) >> static_cast<uint32_t>(rule) & 1U) == 0;
}

}  // namespace psstore
