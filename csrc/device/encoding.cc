#include "device/encoding.h"

#include <algorithm>
#include <string>
#include <vector>

namespace psstore::device {
namespace {

// Floats that are made of sources in half precision: of so many slices at a time that they take no more room.
constexpr size_t kWidenedBytes = 16 << 20;

// Steps of the plain rules, which do what is needed here: assign a weighted sum of one or none, or add it.
class PlainSteps {
 public:
  explicit PlainSteps(size_t most) { contributions_.reserve(most); }

  void add(RuleKind rule, void* value, int64_t num_elems) {
    SliceUpdate& update = updates_.emplace_back();
    update.rule = rule;
    update.num_elems = num_elems;
    update.value_in = update.value_out = value;
  }
  void add(RuleKind rule, void* value, int64_t num_elems, const Contribution& contribution) {
    add(rule, value, num_elems);
    contributions_.push_back(contribution);
    updates_.back().contributions = {&contributions_.back(), 1};
  }
  void queue_to(Queue& queue) const { queue.reduce_update(updates_); }

 private:
  std::vector<SliceUpdate> updates_;
  std::vector<Contribution> contributions_;  // stay where they are: updates refer to them
};

size_t widened_bytes(const ToSend& slice) {
  if (slice.dtype == DType::kFloat32) return 0;
  return static_cast<size_t>(slice.num_elems) * sizeof(float);
}

size_t bytes_of_floats(const ToDecode& slice) {
  if (slice.to == DType::kFloat32 || slice.to == slice.dtype) return 0;
  return static_cast<size_t>(slice.num_elems) * sizeof(float);
}

// As many as fit, and one at least.
std::span<const ToSend> first_group(std::span<const ToSend> slices) {
  size_t num_bytes = widened_bytes(slices.front());
  size_t count = 1;
  while (count < slices.size()) {
    num_bytes += widened_bytes(slices[count]);
    if (num_bytes > kWidenedBytes) break;
    ++count;
  }
  return slices.first(count);
}

std::byte* room(Queue& queue, size_t num_bytes) {
  std::byte* const memory = queue.scratch(std::max<size_t>(num_bytes, 1));
  if (memory != nullptr) return memory;
  throw Error(ErrorCode::OUT_OF_MEMORY, "a device has no " + std::to_string(num_bytes) +
                                            " bytes left for payloads on their way");
}

// `widened`: room for floats. Returns the end of the payloads.
std::byte* encode_group(Queue& queue, std::span<const ToSend> group, std::byte* widened,
                        std::byte* payload) {
  PlainSteps steps(2 * group.size());
  std::vector<ToEncode> batch;
  batch.reserve(group.size());
  for (const ToSend& slice : group) {
    const void* source = slice.source;
    if (slice.dtype != DType::kFloat32) {
      steps.add(RuleKind::kAssign, widened, slice.num_elems,
                {.data = slice.source, .dtype = slice.dtype});
      source = widened;
      widened += widened_bytes(slice);
    }
    if (slice.lacked == nullptr) {
      steps.add(RuleKind::kAssign, slice.lacking, slice.num_elems);
    } else {
      steps.add(RuleKind::kAssign, slice.lacking, slice.num_elems,
                {.data = slice.lacked, .weight = slice.lacked_scale});
    }
    batch.push_back({.encoding = slice.encoding,
                     .source = source,
                     .residual = slice.lacking,
                     .num_elems = slice.num_elems,
                     .num_kept = slice.num_kept,
                     .payload = payload});
    payload += slice.payload_bytes();
  }
  steps.queue_to(queue);
  queue.encode(batch);
  return payload;
}

}  // namespace

void encode_out(Queue& queue, void* to_host, std::span<const ToSend> slices) {
  size_t payload_bytes = 0;
  size_t all_widened = 0;
  size_t largest = kWidenedBytes;
  for (const ToSend& slice : slices) {
    payload_bytes += slice.payload_bytes();
    all_widened += widened_bytes(slice);
    largest = std::max(largest, widened_bytes(slice));
  }
  const size_t room_widened = std::min(all_widened, largest);
  std::byte* const widened = room(queue, room_widened + payload_bytes);
  std::byte* const payloads = widened + room_widened;
  std::byte* payload = payloads;
  while (!slices.empty()) {
    const std::span<const ToSend> group = first_group(slices);
    payload = encode_group(queue, group, widened, payload);
    slices = slices.subspan(group.size());
  }
  queue.copy_out(to_host, payloads, payload_bytes);
}

void decode_in(Queue& queue, const void* from_host, size_t num_bytes,
               std::span<const ToDecode> slices) {
  size_t floats_bytes = 0;  // of what goes from one half precision to the other by way of them
  for (const ToDecode& slice : slices) floats_bytes += bytes_of_floats(slice);
  std::byte* floats = room(queue, floats_bytes + num_bytes);
  const std::byte* const payloads = floats + floats_bytes;
  queue.copy_in(floats + floats_bytes, from_host, num_bytes);
  PlainSteps steps(slices.size());
  CopyList copies;
  std::vector<ToEncode> halves;
  for (const ToDecode& slice : slices) {
    void* value = slice.value;
    if (slice.dtype == slice.to) {
      const size_t elem_bytes = dtype_bytes(slice.to);
      copies.add(value, payloads + slice.offset, static_cast<size_t>(slice.num_elems) * elem_bytes);
      continue;
    }
    if (slice.to != DType::kFloat32) {
      halves.push_back({.encoding = slice.to,
                        .source = floats,
                        .num_elems = slice.num_elems,
                        .payload = slice.value});
      value = floats;
      floats += bytes_of_floats(slice);
    }
    const RuleKind rule = is_encoding(slice.dtype) ? RuleKind::kAdd : RuleKind::kAssign;
    steps.add(rule, value, slice.num_elems,
              {.data = payloads + slice.offset, .dtype = slice.dtype});
  }
  queue.copy_pieces(copies.pieces());
  steps.queue_to(queue);
  queue.encode(halves);
}

void give_out(Queue& queue, std::span<const ToGiveOut> arrays) {
  CopyList copies;
  std::vector<ToEncode> halves;
  for (const ToGiveOut& array : arrays) {
    if (array.dtype == DType::kFloat32) {
      copies.add(array.to, array.floats, static_cast<size_t>(array.num_elems) * sizeof(float));
    } else {
      halves.push_back({.encoding = array.dtype,
                        .source = array.floats,
                        .num_elems = array.num_elems,
                        .payload = array.to});
    }
  }
  queue.copy_pieces(copies.pieces());
  queue.encode(halves);
}

}  // namespace psstore::device
