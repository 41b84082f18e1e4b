// One request of a client to a shard, until its answer is there.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/types.h"
#include "wire/frame.h"

namespace psstore {

using MemoryRanges = std::span<const std::span<std::byte>>;

// A payload that is to be sent, or the table that says where it lies instead.
struct LaidOut {
  std::vector<SliceEntry> table;  // empty: `memory` is sent
  MemoryRanges memory;
  std::shared_ptr<const void> owner;  // of the memory
};

// Whoever made requests, and is told of their answers. It keeps the memory and the tables of its requests.
class Asker {
 public:
  Asker() = default;
  Asker(const Asker&) = delete;
  Asker& operator=(const Asker&) = delete;
  virtual ~Asker() = default;

  // Nobody wants the answer any more: its payload goes nowhere.
  virtual bool forgotten() const = 0;
  // Its caller waits no longer, and may do with its memory what it likes.
  virtual bool cancelled() const { return forgotten(); }
  // The answer to its request number `part` is whole.
  virtual void answered(size_t part, std::shared_ptr<Frame> answer) = 0;

  // The body of a request that carries no decisions, which has waited for so long.
  virtual std::string body(double /*waited_s*/) const { return {}; }
  // The payload of the request, if it lies on a device.
  virtual LaidOut lay_out(uint64_t /*number*/) { return {}; }
  // That payload is its owner's again: what is laid out from here on is what it is now.
  virtual void keep() {}
};

// What is sent of memory that its owner has again.
class OwnPayload {
 public:
  OwnPayload(MemoryRanges memory, size_t num_bytes)
      : bytes_(std::make_unique_for_overwrite<std::byte[]>(num_bytes)),
        range_(bytes_.get(), num_bytes) {
    std::byte* to = bytes_.get();
    for (const auto range : memory) to = std::ranges::copy(range, to).out;
  }
  OwnPayload(const OwnPayload&) = delete;
  OwnPayload& operator=(const OwnPayload&) = delete;

  MemoryRanges memory() const { return {&range_, 1}; }

 private:
  const std::unique_ptr<std::byte[]> bytes_;
  const std::span<std::byte> range_;
};

struct Request {
  enum class Kind : uint8_t {
    kPlain,       // the payload comes from `memory`, or the answer's goes there
    kFromDevice,  // its asker knows where the payload lies
    kByHand,      // whoever drives the session sees to its answer
  };

  uint64_t number = 0;  // of its session's requests
  Op op = Op::kERROR;
  Kind kind = Kind::kPlain;
  // Its values may be lent on a device that the ends share.
  bool may_land = false;
  // It says what the shard was not told yet: its body is a Carry with these two.
  bool carries = false;
  uint64_t at_least = 0;
  double wait_s = 0.0;
  std::string ids = {};  // of rows, behind the Carry
  uint64_t round = 0;
  uint64_t sequence = 0;  // of a write that counts once; else 0
  double began_s = 0.0;
  double deadline_s = 0.0;
  std::span<const SliceEntry> table = {};
  MemoryRanges memory = {};
  size_t memory_bytes = 0;
  std::unique_ptr<const OwnPayload> own = nullptr;  // if `memory` is no longer its asker's
  std::shared_ptr<Asker> asker;
  size_t part = 0;  // which of its asker's requests it is

  uint64_t scaled = 0;  // the decision whose scale it told when it was last sent; 0: none

  bool reads() const {
    return op == Op::kPULL || op == Op::kNORM || op == Op::kPULL_ROWS || op == Op::kLIST_ROWS;
  }
  bool sends_memory() const { return !reads() && !memory.empty(); }
  bool is_numbered() const { return psstore::is_numbered(op); }
  Op reply() const { return Op{static_cast<uint8_t>(static_cast<uint8_t>(op) + 1)}; }
  // The reply is slices, with a version.
  bool is_data() const { return op >= Op::kPUSH && op <= Op::kLIST_ROWS; }
};

// Of a request that is_data().
inline bool is_data_reply(Op op) {
  return op >= Op::kPUSHED && op <= Op::kLISTED_ROWS;
}

}  // namespace psstore
