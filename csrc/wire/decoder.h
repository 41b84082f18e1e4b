// Bytes in, frames out: the receiving half of the protocol without a socket or a clock (sans-IO).
//
//   window = decoder.writable()       where the kernel shall write next
//   decoder.written(n)                it wrote n bytes there
//   frame = decoder.next_frame()      a frame, or null: more bytes are needed
//
// A frame passes through these stages; bytes are taken up by next_frame, accept and discard:
//
//   stage       bytes go to              left when            for
//   kHeader     the header               64 are there         kFields
//   kFields     table, body, their CRC   all are there        kAnnounced; kHeader if no payload
//   kAnnounced  nowhere: the caller      accept or discard    kPayload
//               has the incomplete frame
//   kPayload    the destination          all are there        kHeader
//
// Everything goes through the head buffer, except that a payload range with kDirectReceiveBytes or
// more missing is itself the window: the kernel writes where the bytes are to live.
//
// Memory: a length is held against its limit when its header is complete, before anything is allocated.
// A decoder owns the head buffer, at most kMaxSlices entries, and of a body no more than twice what
// has arrived.
//
// Errors: what the peer did wrong is a psstore::Error with a ProtocolError's code; from then on every
// call throws the same error again. Calls out of order are std::invalid_argument and change nothing.
// Not thread-safe: one connection, one thread at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "core/buffer.h"
#include "wire/frame.h"
#include "wire/limits.h"
#include "wire/payload_sink.h"
#include "wire/receive_buffer.h"

namespace psstore {

class FrameDecoder {
 public:
  // Where the next bytes go. Valid until any other call on the decoder but written().
  struct Window {
    std::span<std::byte> bytes;   // not empty
    bool in_destination = false;  // they lie in what accept() was given, else in head_buffer()
  };

  explicit FrameDecoder(FrameLimits limits = {});

  // Applies from the next header on.
  void set_limits(FrameLimits limits) { limits_ = limits; }

  // Throws std::invalid_argument if the head buffer is full: next_frame was not called until null.
  Window writable();
  // REQUIRES: `num_bytes` were written to the start of the last window.
  void written(size_t num_bytes);

  // Copies `bytes` in, for transports that own their memory. What has no room yet (a payload without
  // destination, frames not fetched) is kept aside and taken up by next_frame. Throws
  // std::invalid_argument if something is kept aside already.
  void feed(std::span<const std::byte> bytes);

  // The next frame, complete or announcing its payload; null if more bytes are needed. Throws
  // std::invalid_argument if an announced payload is unanswered.
  std::shared_ptr<Frame> next_frame();

  // Receive the announced payload into `destination`, which the frame then shares, or scatter it: slice
  // i of the table to ranges[i], or nowhere if it has no bytes. The memory of `ranges` must live until
  // the frame is complete or the decoder is gone. Ranges of other sizes than the table says are a
  // BAD_HEADER: the peer sent what was not asked for. A Buffer of another size is refused, and another
  // may be tried.
  void accept(BufferRef destination);
  void accept(std::span<const std::span<std::byte>> ranges);
  // Let the announced payload pass by.
  void discard();
  // The same with what is missing of one that was accepted, whose destination is not to be written to any more.
  void let_pass();

  // Bytes of an unfinished frame have arrived, or a frame has not been fetched: the end of the stream
  // now would be a truncated frame.
  bool mid_frame() const;

  // The memory of windows that are not in a destination.
  const BufferRef& head_buffer() const { return head_.memory(); }
  // The memory of a window in a destination that is a Buffer.
  const BufferRef& destination() const { return frame_->payload; }

 private:
  enum class Stage { kHeader, kFields, kAnnounced, kPayload };
  using Ranges = PayloadSink::Ranges;

  void throw_if_broken() const;
  // Runs `step`; an Error that it throws is what every later call will throw.
  template <typename Step>
  auto breaking_on_error(Step step);
  void require_announced(const char* call) const;

  Window next_window();
  void received(const Window& window, size_t num_bytes);
  // Copies what fits from the start of `bytes` to where the next bytes go; returns how many did.
  size_t place(std::span<const std::byte> bytes);
  // Moves what feed kept aside to where there is room; false: nothing moved.
  bool take_aside();

  // Taking bytes up; false: more are needed.
  bool take_header();
  bool take_fields();
  bool take_table();
  bool take_body();
  bool take_fields_crc();
  bool take_payload();
  std::shared_ptr<Frame> advance();
  std::shared_ptr<Frame> finish();
  void start_payload(Ranges ranges);

  // What the current frame is held against.
  void check_lengths(const Header& header) const;
  void check_table() const;
  Ranges match_ranges(std::span<const std::span<std::byte>> ranges) const;

  FrameLimits limits_;
  std::optional<Error> broken_;
  Stage stage_ = Stage::kHeader;
  bool speaks_ours_ = false;  // the first header was one: another preamble is damage since then
  ReceiveBuffer head_;
  Window lent_;  // what writable() gave out last; empty once something else has happened

  // What feed could not place: [aside_begin_, end).
  std::vector<std::byte> aside_;
  size_t aside_begin_ = 0;

  // The frame in the making; null in kHeader.
  std::shared_ptr<Frame> frame_;
  std::vector<SliceEntry> entries_;  // its table, while it arrives
  size_t table_received_bytes_ = 0;
  PayloadSink sink_;
};

}  // namespace psstore
