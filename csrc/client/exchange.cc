#include "client/exchange.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "core/busy_poll.h"

namespace psstore {
namespace {

using Clock = std::chrono::steady_clock;

bool would_block(int error) {
  return error == EAGAIN || error == EWOULDBLOCK;
}

// Flags of recv.
constexpr int kMaySleep = 0;
constexpr int kDontWait = MSG_DONTWAIT;

}  // namespace

bool read_shared(const Call& call, const Frame& answer) {
  try {
    call.memory->read(answer.table.entries(), call.destination);
    return true;
  } catch (const Error&) {
    return false;
  }
}

Exchange::Exchange(std::vector<Peer> peers, std::vector<Call> calls)
    : peers_(std::move(peers)),
      calls_(std::move(calls)),
      outputs_(peers_.size()),
      num_unanswered_(calls_.size()) {
  for (const Call& call : calls_) {
    Outgoing& output = outputs_[call.peer];
    output.add(call.head);
    for (const std::span<std::byte> range : call.payload) output.add(range);
  }
}

bool Exchange::run(int bell, std::chrono::nanoseconds busy) {
  const auto end = Clock::now() + kLongestExchange;
  for (size_t peer = 0; peer < peers_.size(); ++peer) {
    if (!outputs_[peer].send(peers_[peer].fd)) return false;
  }
  if (busy <= busy.zero() && !sleep_in_recv()) return false;
  while (!over()) {
    if (!wait(bell, busy) || Clock::now() > end) return false;
  }
  return true;
}

bool Exchange::send() {
  for (size_t peer = 0; peer < peers_.size(); ++peer) outputs_[peer].send(peers_[peer].fd);
  return all_sent();
}

bool Exchange::all_sent() const {
  return std::ranges::all_of(outputs_, &Outgoing::done);
}

bool Exchange::over() const {
  return num_unanswered_ == 0 && all_sent();
}

// Most answers are small and here soon: then this is one system call, of one file, in place of two, of two.
bool Exchange::sleep_in_recv() {
  for (size_t peer = 0; peer < peers_.size() && all_sent(); ++peer) {
    const size_t before = num_unanswered_;
    if (!receive(peer, kMaySleep)) return false;
    if (num_unanswered_ == before) break;  // so it was not soon
  }
  return true;
}

bool Exchange::wait(int bell, std::chrono::nanoseconds busy) {
  std::vector<pollfd> files;
  files.reserve(peers_.size() + 1);
  for (size_t peer = 0; peer < peers_.size(); ++peer) {
    const int events = outputs_[peer].done() ? POLLIN : POLLIN | POLLOUT;
    files.push_back({peers_[peer].fd, static_cast<short>(events), 0});
  }
  files.push_back({bell, POLLIN, 0});
  const int found = poll_busily(files, kQuiet, busy);
  if (found <= 0 || files.back().revents != 0) return false;
  for (size_t peer = 0; peer < peers_.size(); ++peer) {
    const int events = files[peer].revents;
    if ((events & POLLOUT) != 0 && !outputs_[peer].send(peers_[peer].fd)) return false;
    if ((events & ~POLLOUT) != 0 && !receive(peer, kDontWait)) return false;
  }
  return true;
}

bool Exchange::receive(size_t peer, int flags) {
  FrameDecoder& decoder = *peers_[peer].decoder;
  try {
    for (;;) {
      const std::span<std::byte> window = decoder.writable().bytes;
      const ssize_t received =
          recv(peers_[peer].fd, window.data(), window.size(), std::exchange(flags, kDontWait));
      if (received <= 0) return received < 0 && would_block(errno);
      decoder.written(static_cast<size_t>(received));
      if (!take_frames(peer)) return false;
      if (static_cast<size_t>(received) < window.size()) return true;  // that was all
    }
  } catch (const Error&) {
    return false;  // the decoder says it again to whoever goes on
  }
}

bool Exchange::take_frames(size_t peer) {
  FrameDecoder& decoder = *peers_[peer].decoder;
  while (std::shared_ptr<Frame> frame = decoder.next_frame()) {
    Call* const call = asked_by(peer, *frame);
    if (call == nullptr || (frame->header.is_shared() && !read_shared(*call, *frame))) {
      peers_[peer].other = std::move(frame);
      return false;
    }
    if (frame->complete) {
      call->receiving = false;
      call->answer = std::move(frame);
      --num_unanswered_;
    } else {
      call->receiving = true;
      decoder.accept(call->destination);
    }
  }
  return true;
}

bool Call::is_answered_by(const Frame& frame) const {
  if (frame.header.op != reply || (!frame.complete && destination.empty())) return false;
  return !frame.header.is_shared() || memory != nullptr;
}

// Null: it is not the plain answer to a call. A payload goes nowhere but to a call that has a place for it.
Call* Exchange::asked_by(size_t peer, const Frame& reply) {
  const Header& header = reply.header;
  const auto found = std::ranges::find_if(calls_, [&](const Call& call) {
    return call.peer == peer && call.request == header.request && call.answer == nullptr;
  });
  return found != calls_.end() && found->is_answered_by(reply) ? &*found : nullptr;
}

}  // namespace psstore
