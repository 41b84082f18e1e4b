// What a standby must have as its shard has it, by what it is: values, state, what waits, and which writes were taken.
#pragma once

#include <initializer_list>
#include <map>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "shard/shard.h"

namespace psstore::testing {

using Facts = std::map<std::string, std::string>;

inline Facts facts_of(Shard& shard, std::span<const TensorDefinition> tensors,
                      std::initializer_list<const char*> writers) {
  Facts facts;
  for (const TensorDefinition& tensor : tensors) {
    for (const SliceSpec& slice : tensor.slices) {
      const std::string of = "slice " + std::to_string(slice.key) + ": ";
      for (auto& [name, bytes] : shard.state(slice.key)) facts[of + name] = std::move(bytes);
    }
  }
  const auto stats = shard.stats();
  for (const char* name : {"version", "slots", "held_slots", "staged_bytes"}) {
    facts[name] = std::to_string(stats.at(name));
  }
  for (const SlotCopy& copy : shard.copies().value_or(std::vector<SlotCopy>())) {
    const std::string of = "slice " + std::to_string(copy.image.key) + ": ";
    if (copy.squares) facts[of + "squares"] = std::to_string(*copy.squares);
    for (const auto& [origin, slice] : copy.staged) {
      facts[of + "rank " + std::to_string(origin.rank) + ", round " +
            std::to_string(origin.round)] = {reinterpret_cast<const char*>(slice.data()),
                                             slice.num_bytes};
    }
  }
  for (const auto& [writer, refusals] : shard.refusals()) {
    for (const auto& [sequence, begin, end, status] : refusals.runs) {
      facts[writer + ", write " + std::to_string(sequence) + " from " + std::to_string(begin)] =
          std::to_string(end) + " " + std::to_string(static_cast<int>(status));
    }
  }
  for (const char* writer : writers) {
    facts[writer] = std::to_string(shard.last_sequence(writer));
  }
  return facts;
}

}  // namespace psstore::testing
