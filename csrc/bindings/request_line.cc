#include "bindings/request_line.h"

#include <pybind11/stl.h>

#include <utility>

namespace psstore::bindings {

bool RequestLine::send_held() {
  Held held = std::exchange(held_, {});
  if (held.newest_write != 0) last_write_out_ = held.newest_write;
  if (!held.outgoing.send(fd_) || held.outgoing.done()) return true;
  const py::object owners = py::cast(held.owners);
  for (const iovec& piece : held.outgoing.pieces()) {
    leave(make_readonly_view(owners, {static_cast<std::byte*>(piece.iov_base), piece.iov_len}));
  }
  return false;
}

}  // namespace psstore::bindings
