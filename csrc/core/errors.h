// One list of error codes: the C++ enum, the number on the wire and the Python class share it.
//
// python/psstore/errors.py maps each number to an exception class; a test compares the two lists.
// Numbers are part of the wire format: they are never reused.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace psstore {

// X(name, number, what it means)
#define PSSTORE_ERROR_CODES(X)                                                              \
  X(OK, 0, "no error")                                                                      \
  /* ProtocolError: the peer erred; its connection is closed. */                            \
  X(BAD_MAGIC, 1, "the first four bytes are not psstore's")                                 \
  X(BAD_VERSION, 2, "another protocol version")                                             \
  X(BAD_HEADER, 3, "a header field is out of range")                                        \
  X(FRAME_TOO_LARGE, 4, "a length exceeds its limit")                                       \
  X(BAD_BODY, 5, "a control body does not decode as its operation's message")               \
  X(UNEXPECTED_MESSAGE, 6, "the operation is not allowed in this state")                    \
  X(AUTH_FAILED, 7, "the token proof is wrong or missing")                                  \
  X(HANDSHAKE_TIMEOUT, 8, "the handshake or a started frame did not end in time")           \
  X(BAD_CHECKSUM, 9, "a checksum is wrong: bytes changed on the way")                       \
  X(BAD_SIGNATURE, 10, "a decision, definition or ticket was not signed by this store")     \
  X(TLS_FAILED, 11, "one side speaks no TLS, or a certificate is not accepted")             \
  /* UsageError: the caller erred; nothing changed. */                                      \
  X(UNKNOWN_TENSOR, 20, "no tensor of that name")                                           \
  X(UNKNOWN_KEY, 21, "no slice of that key on this shard")                                  \
  X(SHAPE_MISMATCH, 22, "the tensor exists with another shape")                             \
  X(DTYPE_MISMATCH, 23, "the tensor exists with another dtype, or the dtype can't be used") \
  X(RULE_MISMATCH, 24, "the operation does not fit the tensor's update rule")               \
  X(TENSOR_EXISTS, 25, "a tensor of that name exists already")                              \
  X(SIZE_MISMATCH, 26, "a slice's bytes do not match its definition")                       \
  X(RANK_TAKEN, 27, "the rank is held by a live worker")                                    \
  X(TOO_MANY_WORKERS, 28, "every announced rank is taken")                                  \
  X(STALE_INCARNATION, 29, "a newer life of this worker has joined")                        \
  X(ROUND_OUT_OF_ORDER, 30, "the round is not the one this worker is in")                   \
  X(NON_FINITE, 31, "the values contain NaN or infinity and the store refuses them")        \
  X(NOT_A_WORKER, 32, "the operation needs a worker that has joined")                       \
  X(BAD_HYPER, 33, "a hyper-parameter is unknown, missing or out of range")                 \
  X(NOT_INITIALISED, 34, "the tensor has no value yet")                                     \
  X(BAD_ARGUMENT, 35, "an argument is out of range")                                        \
  X(MISSING_CONTRIBUTION, 36, "a commit named what its worker had not pushed")              \
  X(NOT_ALLOWED, 37, "the token that was proved is of a role that may not do this")         \
  X(TABLE_FULL, 38, "a table has as many rows as it may have, and evicts none")             \
  /* Information in a reply, per slice. */                                                  \
  X(NOT_MODIFIED, 40, "nothing newer than the version asked about")                         \
  X(NOT_APPLIED, 41, "the decision on it still lacks contributions or its scale")           \
  X(NO_STATE, 42, "the update rule has not made this state yet")                            \
  /* AvailabilityError: somebody died, is slow or is gone. */                               \
  X(WORKER_LOST, 50, "a worker that this round needs is lost")                              \
  X(DEADLINE_EXCEEDED, 51, "a wait on a peer took longer than its deadline")                \
  X(STORE_UNREACHABLE, 52, "no connection to a shard could be made in time")                \
  X(SHUTTING_DOWN, 53, "the store is draining")                                             \
  X(STORE_CLOSED, 54, "this client is closed")                                              \
  X(OVERLOADED, 55, "a limit on connections or on clients is reached")                      \
  X(TORN_ROUND, 56, "a worker was lost after an early commit, before all was pushed")       \
  X(DEVICE_FAILED, 57, "the device that a shard lives on failed, and the shard with it")    \
  X(OUT_OF_MEMORY, 58, "it does not fit into the memory that a shard may use")              \
  X(VERSION_GONE, 59, "the version that is being read is not kept any longer")              \
  X(ROLLED_BACK, 60, "the store was restored at an earlier version; connect again")         \
  X(NOT_LEADING, 61, "a standby was asked what only its shard answers")                     \
  X(TOO_MANY_PROOFS, 62, "wrong proofs came from this address: none is heard for a while")  \
  /* StorageError: what checkpoints lie on, or what lies there; memory is as it was. */     \
  X(CHECKPOINT_NOT_FOUND, 70, "no complete checkpoint of that version is there")            \
  X(CHECKPOINT_DAMAGED, 71, "what is on storage is not what was written")                   \
  X(CHECKPOINT_UNSUPPORTED, 72, "the checkpoint has a format that this psstore can't read") \
  X(CHECKPOINT_PLACE_TAKEN, 73, "another store writes its checkpoints there")               \
  X(STORAGE_FAILED, 74, "the storage of checkpoints refused, or failed")                    \
  /* InternalError: we erred. */                                                            \
  X(INTERNAL, 90, "an invariant of psstore was violated")                                   \
  X(DECISION_GAP, 92, "a decision came before one that precedes it")

enum class ErrorCode : uint8_t {
#define PSSTORE_X(name, number, meaning) name = number,
  PSSTORE_ERROR_CODES(PSSTORE_X)
#undef PSSTORE_X
};

// Whether the number is one of the list.
constexpr bool is_error_code(uint8_t number) {
  switch (number) {
#define PSSTORE_X(name, code, meaning) case code:
    PSSTORE_ERROR_CODES(PSSTORE_X)
#undef PSSTORE_X
    return true;
    default: return false;
  }
}

// Of one slice in an answer: an answer without bytes may be all that there is to say.
constexpr bool is_failure(ErrorCode status) {
  return status != ErrorCode::OK && status != ErrorCode::NOT_MODIFIED &&
         status != ErrorCode::NO_STATE;
}

// Whether it is an error of the peer, whose connection ends; else of one request.
constexpr bool ends_connection(ErrorCode code) {
  return code <= ErrorCode::TLS_FAILED;
}

// What the core throws. The bindings turn it into the Python class of the same code.
class Error : public std::runtime_error {
 public:
  Error(ErrorCode code, const std::string& message) : std::runtime_error(message), code_(code) {}
  ErrorCode code() const { return code_; }

 private:
  ErrorCode code_;
};

}  // namespace psstore
