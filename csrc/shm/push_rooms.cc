#include "shm/push_rooms.h"

#include <algorithm>
#include <atomic>
#include <stdexcept>

namespace psstore {

PushRooms::PushRooms(int control_fd, size_t arena_bytes)
    : num_blocks_(arena_bytes / kPushBlockBytes),
      control_(control_fd, size_of_sealed(control_fd), Access::kRead) {
  if (control_.size() != control_bytes(arena_bytes)) {
    throw std::invalid_argument("the files of a push arena do not belong together");
  }
}

std::optional<size_t> PushRooms::take(size_t num_bytes) {
  take_back();
  const size_t num_blocks = blocks_of(num_bytes);
  size_t begin = 0;
  auto next = rooms_.begin();
  for (; next != rooms_.end() && next->first_block - begin < num_blocks; ++next) {
    begin = next->first_block + next->num_blocks;
  }
  if (num_blocks > num_blocks_ - begin) return std::nullopt;
  rooms_.insert(next, {begin, num_blocks, std::nullopt});
  return begin;
}

void PushRooms::sent(size_t first_block, uint64_t number) {
  find(first_block)->number = number;
}

void PushRooms::cancel(size_t first_block) {
  rooms_.erase(find(first_block));
}

void PushRooms::take_back() {
  auto* const released = reinterpret_cast<uint64_t*>(control_.data());
  std::erase_if(rooms_, [&](const Room& room) {
    const std::atomic_ref<uint64_t> entry(released[room.first_block]);
    return room.number && entry.load(std::memory_order_acquire) == *room.number;
  });
}

std::vector<PushRooms::Room>::iterator PushRooms::find(size_t first_block) {
  return std::ranges::lower_bound(rooms_, first_block, {}, &Room::first_block);
}

}  // namespace psstore
