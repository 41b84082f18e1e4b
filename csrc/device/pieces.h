// Many pieces between a device and the host: small ones that lie together on the host go in one copy, through
// memory of the queue's own, where one launch gathers or scatters them.
#pragma once

#include "device/device.h"

namespace psstore::device {

// As Queue::copy_in() and copy_out() of each. None of them reads or writes what another one writes.
void copy_pieces_in(Queue& queue, std::span<const CopyPiece> pieces);
void copy_pieces_out(Queue& queue, std::span<const CopyPiece> pieces);

}  // namespace psstore::device
