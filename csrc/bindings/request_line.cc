#include "bindings/request_line.h"

#include <sys/socket.h>

#include <cerrno>
#include <utility>

#include "bindings/started.h"
#include "wire/encoder.h"

namespace psstore::bindings {
namespace {

// Of one connection, before others have their turn: 4 MiB at most, as slices have 256 KiB.
constexpr int kReadsPerTurn = 16;

}  // namespace

void RequestLine::leave(std::span<const iovec> pieces, std::shared_ptr<void> owner) {
  if (pieces.empty()) return;
  const py::capsule kept(new std::shared_ptr<void>(std::move(owner)),
                         [](void* held) { delete static_cast<std::shared_ptr<void>*>(held); });
  for (const iovec& piece : pieces) {
    unsent_.attr("append")(
        make_readonly_view(kept, {static_cast<std::byte*>(piece.iov_base), piece.iov_len}));
  }
}

bool RequestLine::send_held() {
  Held held = std::exchange(held_, {});
  if (held.newest_write != 0) last_write_out_ = held.newest_write;
  if (!connected()) return true;
  if (free() && (!held.outgoing.send(fd_) || held.outgoing.done())) return true;
  auto owners = std::make_shared<std::vector<std::shared_ptr<void>>>(std::move(held.owners));
  leave(held.outgoing.pieces(), std::move(owners));
  return false;
}

void RequestLine::take_releases(std::byte* to) {
  for (const uint64_t request : releases_) {
    encode_frame({.op = Op::kRELEASE, .request = request}, to);
    to += kHeaderBytes;
  }
  releases_.clear();
}

bool RequestLine::send_releases() {
  auto frames = std::make_shared<std::vector<std::byte>>(release_bytes());
  take_releases(frames->data());
  const iovec piece{frames->data(), frames->size()};
  hold({&piece, 1}, std::move(frames), 0);
  return send_held();
}

// ---- requests of calls that were started ------------------------------------------------------------

std::shared_ptr<Frame> RequestLine::next_frame(PyDecoder& decoder, double now_s) {
  std::shared_ptr<Frame> frame;
  do {
    frame = decoder.next_frame();
  } while (frame != nullptr && take(decoder, frame, now_s));
  return frame;
}

// False: the session is to see to it.
bool RequestLine::take(PyDecoder& decoder, const std::shared_ptr<Frame>& frame, double now_s) {
  const auto found = find_started(frame->header.request);
  if (found == started_.end()) return false;
  const StartedRequest request = *found;
  if (!request.call->is_answer(request.frame, *frame) ||
      (frame->header.is_shared() && !request.call->read_shared(request.frame, *frame))) {
    request.call->hand_over();
    return false;
  }
  if (frame->complete) {
    forget_started(request.id);
    request.call->answered(request.frame, frame, now_s);
    return true;
  }
  const py::object destination = request.call->destination(request.frame);
  destination.is_none() ? decoder.discard() : decoder.accept(destination);
  return true;
}

// What ends a connection is found again by whoever goes on.
bool RequestLine::receive(double now_s) {
  const py::object kept = owner_;
  for (int reads = 0; reads < kReadsPerTurn && connected(); ++reads) {
    FrameDecoder& decoder = decoder_->decoder();
    ssize_t received = 0;
    std::span<std::byte> window;
    try {
      window = decoder.writable().bytes;
      {
        const py::gil_scoped_release released;
        received = recv(fd_, window.data(), window.size(), MSG_DONTWAIT);
      }
      if (received < 0) return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR;
      if (received == 0) return false;
      decoder.written(static_cast<size_t>(received));
      if (!take_frames(now_s)) return false;
    } catch (const Error&) {
      return false;
    }
    if (static_cast<size_t>(received) < window.size()) return true;  // that was all
  }
  return connected();
}

bool RequestLine::take_frames(double now_s) {
  std::shared_ptr<Frame> other = next_frame(*decoder_, now_s);
  if (other == nullptr) return true;
  decoder_->put_back(std::move(other));
  return false;
}

void RequestLine::forget_started(uint64_t id) {
  const auto found = find_started(id);
  if (found != started_.end()) started_.erase(found);
}

void RequestLine::hand_over() {
  while (!started_.empty()) {
    const std::shared_ptr<StartedCall> call = started_.front().call;
    call->hand_over();
  }
}

std::optional<double> RequestLine::next_deadline() const {
  std::optional<double> next;
  for (const StartedRequest& request : started_) {
    const double deadline_s = request.call->deadline_s();
    if (!next || deadline_s < *next) next = deadline_s;
  }
  return next;
}

}  // namespace psstore::bindings
