#include "rows/overlay.h"

#include <cstdint>
#include <cstring>
#include <string>
#include <unordered_map>

#include "core/errors.h"
#include "rows/row_store.h"

namespace psstore {
namespace {

uint64_t id_at(const std::byte* record) {
  uint64_t id;
  std::memcpy(&id, record, sizeof id);
  return id;
}

// Records that are mostly asked for in the order in which they lie.
class Records {
 public:
  Records(std::span<const std::byte> bytes, size_t record_bytes)
      : bytes_(bytes), record_bytes_(record_bytes) {}

  // Null: there is none of that id.
  const std::byte* find(uint64_t id) {
    if (!has(next_, id)) {
      const size_t place = place_of(id);
      if (!has(place, id)) return nullptr;
      next_ = place;
    }
    return at(next_++);
  }
  bool are_all_taken() const { return next_ == size(); }
  // The next one, if it is of that id.
  const std::byte* take(uint64_t id) { return has(next_, id) ? at(next_++) : nullptr; }

 private:
  size_t size() const { return bytes_.size() / record_bytes_; }
  const std::byte* at(size_t place) const { return bytes_.data() + place * record_bytes_; }
  bool has(size_t place, uint64_t id) const { return place < size() && id_at(at(place)) == id; }
  // Where rows were evicted others lie in their places.
  size_t place_of(uint64_t id) {
    if (places_.empty()) {
      places_.reserve(size());
      for (size_t place = 0; place < size(); ++place) places_.emplace(id_at(at(place)), place);
    }
    const auto found = places_.find(id);
    return found == places_.end() ? size() : found->second;
  }

  const std::span<const std::byte> bytes_;
  const size_t record_bytes_;
  size_t next_ = 0;
  std::unordered_map<uint64_t, size_t> places_;
};

[[noreturn]] void refuse(const std::string& what) {
  throw Error(ErrorCode::BAD_ARGUMENT, what);
}

}  // namespace

void overlay_rows(std::span<const std::byte> base, std::span<const std::byte> changes,
                  size_t record_bytes, std::span<std::byte> records) {
  const auto are_records = [=](size_t num_bytes) {
    return record_bytes >= kIdBytes && num_bytes % record_bytes == 0;
  };
  if (!are_records(base.size()) || !are_records(records.size())) {
    refuse("what are to be records of " + std::to_string(record_bytes) + " bytes has " +
           std::to_string(base.size()) + " and " + std::to_string(records.size()) + " bytes");
  }
  const size_t num_rows = records.size() / record_bytes;
  if (changes.size() < num_rows * kIdBytes || !are_records(changes.size() - num_rows * kIdBytes)) {
    refuse("changes of " + std::to_string(changes.size()) + " bytes are not of " +
           std::to_string(num_rows) + " rows");
  }
  Records before(base, record_bytes);
  Records changed(changes.subspan(num_rows * kIdBytes), record_bytes);
  for (size_t i = 0; i < num_rows; ++i) {
    const uint64_t id = id_at(changes.data() + i * kIdBytes);
    const std::byte* record = changed.take(id);
    if (record != nullptr) {
      before.take(id);
    } else {
      record = before.find(id);
    }
    if (record == nullptr) refuse("row " + std::to_string(id) + " is neither there nor changed");
    std::memcpy(records.data() + i * record_bytes, record, record_bytes);
  }
  if (!changed.are_all_taken()) refuse("there are changes of rows that are not there");
}

}  // namespace psstore
