// One numbering of operations, shared by C++, Python (`_core.OPS`) and docs/protocol.md.
//
// A request's op is even, its reply's op is the next odd number; ERROR answers any request.
// Numbers are part of the wire format: they are never reused.
#pragma once

#include <cstdint>

namespace psstore {

// X(name, number, body, what it does)
#define PSSTORE_OPS(X)                                                                      \
  /* handshake: the only ops before WELCOME */                                              \
  X(HELLO, 2, "Hello", "client opens a session with a shard")                               \
  X(CHALLENGE, 3, "Challenge", "shard asks for proof of the token")                         \
  X(AUTH, 4, "Auth", "client proves that it has the token")                                 \
  X(WELCOME, 5, "Welcome", "the session is open; the shard map")                            \
  /* data: slice table, and where noted decisions in the body and a payload */              \
  X(PUSH, 10, "Carry", "stage contributions for a round (payload)")                         \
  X(PUSHED, 11, "", "their statuses")                                                       \
  X(PULL, 12, "Carry", "apply the carried decisions, then read slices")                     \
  X(PULLED, 13, "", "slices' statuses, versions and values (payload)")                      \
  X(ASSIGN, 14, "", "set values, once per sequence number (payload)")                       \
  X(ASSIGNED, 15, "", "their statuses")                                                     \
  X(ADD, 16, "", "add to values, once per sequence number (payload)")                       \
  X(ADDED, 17, "", "their statuses")                                                        \
  X(INIT, 18, "", "set values where there are none yet (payload)")                          \
  X(INITIALISED, 19, "", "their statuses")                                                  \
  X(RESTORE, 20, "", "set values and rule state, once per sequence (payload)")              \
  X(RESTORED, 21, "", "their statuses")                                                     \
  X(NORM, 22, "Carry", "apply the carried decisions, then sum squares by slice")            \
  X(NORMED, 23, "", "a float64 for each slice (payload)")                                   \
  X(PULL_ROWS, 24, "Carry", "apply the carried decisions, then read rows of tables")        \
  X(PULLED_ROWS, 25, "", "partitions' statuses and versions, and the rows (payload)")       \
  X(LIST_ROWS, 26, "Carry", "apply the carried decisions, then list rows of tables")        \
  X(LISTED_ROWS, 27, "", "how many rows partitions have, and some of them (payload)")       \
  /* schema: answered by every shard */                                                     \
  X(DEFINE, 30, "Define", "signed tensor definitions, carried by the client")               \
  X(DEFINED, 31, "", "every definition is known here")                                      \
  X(ATTACH, 32, "Attach", "signed membership, carried by the worker")                       \
  X(ATTACHED, 33, "Attached", "pushes of that incarnation are accepted here")               \
  X(SHARE, 34, "Share", "asks for memory that client and shard share")                      \
  X(SHARED, 35, "Shared", "where a client of the same machine gets it")                     \
  X(RELEASE, 36, "", "that answer's shared memory was read; no reply")                      \
  X(ATTEST, 38, "Attest", "asks what the shard has applied, and measured, signed")          \
  X(ATTESTED, 39, "Attested", "for the coordinator, carried by a worker")                   \
  X(HOLD, 40, "", "keep decisions from now on, for a reader of that sequence")              \
  X(HELD, 41, "", "the decision that the shard is at")                                      \
  X(FREE, 42, "", "that reader is done")                                                    \
  X(FREED, 43, "", "noted")                                                                 \
  X(SAVE, 44, "Save", "write the shard's file of a checkpoint")                             \
  X(SAVED, 45, "Saved", "what was written, signed, once it is")                             \
  /* coordinator: answered by shard 0 only */                                               \
  X(JOIN, 50, "Join", "become a worker")                                                    \
  X(JOINED, 51, "Joined", "rank, incarnation, round, last decisions")                       \
  X(CREATE, 52, "Create", "create or match tensors")                                        \
  X(CREATED, 53, "Created", "their signed definitions")                                     \
  X(READY, 54, "Ready", "the initial values of these tensors are in place")                 \
  X(READIED, 55, "", "noted")                                                               \
  X(COMMIT, 56, "Commit", "end a worker's round")                                           \
  X(COMMITTED, 57, "Committed", "decisions since the worker's last one")                    \
  X(DESCRIBE, 58, "Describe", "look tensors up")                                            \
  X(DESCRIBED, 59, "Described", "their signed definitions, names only if asked")            \
  X(BARRIER, 60, "Barrier", "wait for every worker")                                        \
  X(PASSED, 61, "", "all are here")                                                         \
  X(LEAVE, 62, "", "this worker is done")                                                   \
  X(LEFT, 63, "", "noted")                                                                  \
  X(DROP, 64, "Drop", "forget tensors")                                                     \
  X(DROPPED, 65, "Dropped", "their signed removal, to be carried to the shards")            \
  X(FINISH, 66, "Finish", "every contribution to an early decision is staged")              \
  X(FINISHED, 67, "Finished", "so are those of all its members")                            \
  X(DECISIONS, 68, "Decisions", "what was decided since")                                   \
  X(DECIDED, 69, "Decided", "the decisions that some shard may still lack")                 \
  X(BEGIN, 72, "Begin", "begin a checkpoint")                                               \
  X(BEGUN, 73, "Begun", "at which decision, and what shards are to be told")                \
  X(KEEP, 74, "Keep", "what shards have written is a checkpoint")                           \
  X(KEPT, 75, "Kept", "it is, or will be")                                                  \
  X(HAND_IN, 76, "HandIn", "what a worker's next life is to have again")                    \
  X(HANDED_IN, 77, "", "kept")                                                              \
  X(HAND_BACK, 78, "HandBack", "what this rank has handed in last")                         \
  X(HANDED_BACK, 79, "HandedBack", "that, and as of which decision")                        \
  X(STOP, 82, "Stop", "commits count up to a decision only")                                \
  X(STOPPED, 83, "Stopped", "noted; whether commits of the worker count still")             \
  /* a shard and its standby, on a connection between them */                               \
  X(FOLLOW, 90, "Follow", "a standby asks for all that the shard is and becomes")           \
  X(FOLLOWED, 91, "", "it is coming: from here on the shard asks, and it answers")          \
  X(FILL, 92, "", "slots as they are (payload)")                                            \
  X(FILLED, 93, "", "they are here")                                                        \
  X(RECORD, 94, "Record", "something else that has changed")                                \
  X(RECORDED, 95, "", "here, too")                                                          \
  X(SCALE, 96, "", "the scale of a decision, a float64; none: it is a skip")                \
  X(SCALED, 97, "", "known here, too")                                                      \
  X(COMPLETE, 98, "", "the standby has all that the shard was; no reply")                   \
  X(RETIRE, 108, "", "the standby ends, and will never lead; no reply")                     \
  X(PROMOTE, 100, "Promote", "somebody who knows: the other process of this shard is dead") \
  X(PROMOTED, 101, "", "this one is the shard, or will be at once")                         \
  X(ASK_WORD, 102, "AskWord", "may this standby lead, or is its shard to do without it?")   \
  X(WORD, 103, "Word", "what this shard has said to that first, and ever will")             \
  /* another number of shards, on any shard; the first two on shard 0 */                    \
  X(RESHARD, 104, "Reshard", "the store is to go on with so many shards")                   \
  X(RESHARDED, 105, "", "never: its connection ends with the shards that there are")        \
  X(FREEZE, 106, "Freeze", "hear nobody else any more, once nothing is on its way")         \
  X(FROZEN, 107, "Frozen", "whether it does so by now; ask again")                          \
  /* any shard */                                                                           \
  X(STATS, 70, "Stats", "counters; its body may be left out")                               \
  X(STATISTICS, 71, "Statistics", "the counters")                                           \
  /* liveness: header only, no reply, on a connection of its own */                         \
  X(HEARTBEAT, 80, "", "rank and incarnation in the header are alive")                      \
  /* any direction */                                                                       \
  X(ERROR, 255, "Failure", "a request failed; connection-wide if request is 0")

enum class Op : uint8_t {
#define PSSTORE_X(name, number, body, meaning) k##name = number,
  PSSTORE_OPS(PSSTORE_X)
#undef PSSTORE_X
};

// A write whose sequence says which of its client's it is, so that it counts once.
constexpr bool is_numbered(Op op) {
  return op == Op::kASSIGN || op == Op::kADD || op == Op::kRESTORE;
}

}  // namespace psstore
