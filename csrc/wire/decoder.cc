#include "wire/decoder.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

namespace psstore {
namespace {

void check_received(const char* what, uint64_t num_bytes, uint64_t limit) {
  if (num_bytes <= limit) return;
  throw Error(ErrorCode::FRAME_TOO_LARGE, std::string("a frame's ") + what + " of " +
                                              std::to_string(num_bytes) + " bytes: at most " +
                                              std::to_string(limit) + " are allowed here");
}

}  // namespace

FrameDecoder::FrameDecoder(FrameLimits limits)
    : limits_(limits), head_(BufferPool::create(0)->allocate(kHeadBufferBytes)) {}

void FrameDecoder::throw_if_broken() const {
  if (broken_) throw Error(*broken_);
}

template <typename Step>
auto FrameDecoder::breaking_on_error(Step step) {
  throw_if_broken();
  lent_ = {};
  try {
    return step();
  } catch (const Error& error) {
    broken_ = error;
    frame_.reset();
    sink_ = {};  // whoever owns the destination may free it now
    throw;
  }
}

bool FrameDecoder::mid_frame() const {
  return stage_ != Stage::kHeader || !head_.empty() || !aside_.empty();
}

// ---- bytes arrive -----------------------------------------------------------------------------------

FrameDecoder::Window FrameDecoder::next_window() {
  if (stage_ == Stage::kPayload && head_.empty() && !sink_.direct_window().empty()) {
    return {sink_.direct_window(), true};
  }
  const std::span<std::byte> room = head_.room();
  if (stage_ == Stage::kPayload) return {room, false};
  return {room.first(std::min(room.size(), kFrameReadBytes)), false};
}

void FrameDecoder::received(const Window& window, size_t num_bytes) {
  if (window.in_destination) {
    sink_.received_in_place(num_bytes);
  } else {
    head_.filled(num_bytes);
  }
}

FrameDecoder::Window FrameDecoder::writable() {
  throw_if_broken();
  lent_ = next_window();
  if (lent_.bytes.empty()) {
    throw std::invalid_argument("the receive buffer is full: fetch the frames in it first");
  }
  return lent_;
}

void FrameDecoder::written(size_t num_bytes) {
  throw_if_broken();
  const Window window = std::exchange(lent_, {});
  if (num_bytes > window.bytes.size()) {
    throw std::invalid_argument("more bytes than the window holds: ask for one before each read");
  }
  if (num_bytes > 0) received(window, num_bytes);
}

void FrameDecoder::feed(std::span<const std::byte> bytes) {
  throw_if_broken();
  lent_ = {};
  if (!aside_.empty()) {
    throw std::invalid_argument("bytes fed before still wait for next_frame, accept or discard");
  }
  while (const size_t num_bytes = place(bytes)) bytes = bytes.subspan(num_bytes);
  aside_.assign(bytes.begin(), bytes.end());
}

size_t FrameDecoder::place(std::span<const std::byte> bytes) {
  const Window window = next_window();
  const size_t num_bytes = std::min(window.bytes.size(), bytes.size());
  if (num_bytes == 0) return 0;
  std::memcpy(window.bytes.data(), bytes.data(), num_bytes);
  received(window, num_bytes);
  return num_bytes;
}

bool FrameDecoder::take_aside() {
  if (aside_.empty()) return false;
  const size_t num_bytes = place(std::span(aside_).subspan(aside_begin_));
  aside_begin_ += num_bytes;
  if (aside_begin_ == aside_.size()) {
    aside_ = {};  // its memory too: it may be large
    aside_begin_ = 0;
  }
  return num_bytes > 0;
}

// ---- frames leave -----------------------------------------------------------------------------------

std::shared_ptr<Frame> FrameDecoder::next_frame() {
  if (stage_ == Stage::kAnnounced && !broken_) {
    throw std::invalid_argument("a payload is announced: accept or discard it first");
  }
  return breaking_on_error([this] {
    std::shared_ptr<Frame> frame = advance();
    while (frame == nullptr && take_aside()) frame = advance();
    return frame;
  });
}

std::shared_ptr<Frame> FrameDecoder::advance() {
  if (stage_ == Stage::kHeader && !take_header()) return nullptr;
  if (stage_ == Stage::kFields) {
    if (!take_fields()) return nullptr;
    if (frame_->header.streamed_bytes() == 0) return finish();
    stage_ = Stage::kAnnounced;
    return frame_;
  }
  return take_payload() ? finish() : nullptr;
}

bool FrameDecoder::take_header() {
  const std::span<const std::byte> bytes = head_.bytes();
  if (!speaks_ours_) check_preamble(bytes);
  if (bytes.size() < kHeaderBytes) return false;
  const Header header = parse_header(bytes);
  speaks_ours_ = true;
  check_lengths(header);
  frame_ = std::make_shared<Frame>();
  frame_->header = header;
  entries_.assign(header.num_slices, SliceEntry{});
  table_received_bytes_ = 0;
  head_.take(kHeaderBytes);
  stage_ = Stage::kFields;
  return true;
}

void FrameDecoder::check_lengths(const Header& header) const {
  if (header.num_slices > kMaxSlices) {
    throw Error(ErrorCode::FRAME_TOO_LARGE, "a frame of " + std::to_string(header.num_slices) +
                                                " slices: at most " + std::to_string(kMaxSlices) +
                                                " are allowed");
  }
  check_received("slice table", header.table_bytes(), limits_.max_body_bytes);
  check_received("body", header.body_bytes, limits_.max_body_bytes);
  check_received("payload", header.payload_bytes, limits_.max_payload_bytes);
}

bool FrameDecoder::take_fields() {
  if (!take_table() || !take_body() || !take_fields_crc()) return false;
  frame_->table = SliceTable(std::move(entries_));
  check_table();
  return true;
}

bool FrameDecoder::take_table() {
  const std::span<std::byte> table = std::as_writable_bytes(std::span(entries_));
  const size_t missing = table.size() - table_received_bytes_;
  if (missing == 0) return true;
  const auto bytes = head_.bytes().first(std::min(missing, head_.bytes().size()));
  std::memcpy(table.data() + table_received_bytes_, bytes.data(), bytes.size());
  table_received_bytes_ += bytes.size();
  head_.take(bytes.size());
  return bytes.size() == missing;
}

bool FrameDecoder::take_body() {
  std::string& body = frame_->body;
  const size_t missing = frame_->header.body_bytes - body.size();
  const auto bytes = head_.bytes().first(std::min(missing, head_.bytes().size()));
  body.append(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  head_.take(bytes.size());
  return bytes.size() == missing;
}

bool FrameDecoder::take_fields_crc() {
  if (!frame_->header.has_fields()) return true;
  if (head_.bytes().size() < kFieldsCrcBytes) return false;
  uint32_t came;
  std::memcpy(&came, head_.bytes().data(), sizeof came);
  head_.take(kFieldsCrcBytes);
  if (came != compute_fields_crc(entries_, std::as_bytes(std::span(frame_->body)))) {
    throw Error(ErrorCode::BAD_CHECKSUM, "the slice table or the body of operation " +
                                             std::to_string(static_cast<int>(frame_->header.op)) +
                                             " changed on the way: their CRC-32C differs");
  }
  return true;
}

void FrameDecoder::check_table() const {
  const SliceTable& table = frame_->table;
  const Header& header = frame_->header;
  if (table.empty() && !header.is_shared()) return;
  for (const SliceEntry& entry : table) {
    if (entry.offset != 0 && !header.is_shared()) {
      throw Error(ErrorCode::BAD_HEADER, "slice of key " + std::to_string(entry.key) +
                                             " has an offset, but its bytes are on the stream");
    }
    const Op op = header.op;
    if (!may_be_about(op, entry.part)) {
      throw Error(ErrorCode::BAD_HEADER, "slice of key " + std::to_string(entry.key) +
                                             ": operation " + std::to_string(static_cast<int>(op)) +
                                             " can't be about part " + std::to_string(entry.part));
    }
  }
  if (table.payload_bytes() != header.payload_bytes) {
    throw Error(ErrorCode::BAD_HEADER, "the slices have " + std::to_string(table.payload_bytes()) +
                                           " bytes in all, the payload " +
                                           std::to_string(header.payload_bytes));
  }
}

std::shared_ptr<Frame> FrameDecoder::finish() {
  const Header& header = frame_->header;
  if (header.has_checksum() && header.payload_crc != sink_.crc()) {
    throw Error(ErrorCode::BAD_CHECKSUM, "the payload of " + std::to_string(header.payload_bytes) +
                                             " bytes changed on the way: its CRC-32C differs");
  }
  frame_->complete = true;
  sink_ = {};
  stage_ = Stage::kHeader;
  return std::move(frame_);
}

// ---- payloads ---------------------------------------------------------------------------------------

void FrameDecoder::require_announced(const char* call) const {
  throw_if_broken();
  if (stage_ != Stage::kAnnounced) {
    throw std::invalid_argument(std::string(call) + " without an announced payload");
  }
}

void FrameDecoder::accept(BufferRef destination) {
  require_announced("accept");
  const uint64_t payload_bytes = frame_->header.payload_bytes;
  if (destination->size() != payload_bytes) {
    throw std::invalid_argument("a buffer of " + std::to_string(destination->size()) +
                                " bytes for a payload of " + std::to_string(payload_bytes));
  }
  Ranges ranges{{destination->data(), destination->size()}};
  frame_->payload = std::move(destination);
  start_payload(std::move(ranges));
}

void FrameDecoder::accept(std::span<const std::span<std::byte>> ranges) {
  require_announced("accept");
  breaking_on_error([&] { start_payload(match_ranges(ranges)); });
}

void FrameDecoder::discard() {
  require_announced("discard");
  start_payload({});
}

void FrameDecoder::let_pass() {
  lent_ = {};
  sink_.let_pass();
}

FrameDecoder::Ranges FrameDecoder::match_ranges(
    std::span<const std::span<std::byte>> ranges) const {
  const SliceTable& table = frame_->table;
  if (ranges.size() != table.size()) {
    throw Error(ErrorCode::BAD_HEADER, "a payload of " + std::to_string(table.size()) +
                                           " slices came where " + std::to_string(ranges.size()) +
                                           " were asked for");
  }
  Ranges matched;
  matched.reserve(ranges.size());
  for (size_t i = 0; i < ranges.size(); ++i) {
    if (table[i].num_bytes == 0) continue;
    if (table[i].num_bytes != ranges[i].size()) {
      throw Error(ErrorCode::BAD_HEADER,
                  "slice " + std::to_string(i) + " of key " + std::to_string(table[i].key) +
                      " came with " + std::to_string(table[i].num_bytes) + " bytes, expected " +
                      std::to_string(ranges[i].size()));
    }
    // Slices of one tensor lie side by side in the caller's memory: one range, received in one go.
    const bool continues =
        !matched.empty() && std::to_address(matched.back().end()) == ranges[i].data();
    if (continues) {
      matched.back() = {matched.back().data(), matched.back().size() + ranges[i].size()};
    } else {
      matched.push_back(ranges[i]);
    }
  }
  return matched;
}

void FrameDecoder::start_payload(Ranges ranges) {
  const Header& header = frame_->header;
  lent_ = {};
  sink_ = PayloadSink(header.payload_bytes, std::move(ranges), header.has_checksum());
  stage_ = Stage::kPayload;
  take_payload();
}

bool FrameDecoder::take_payload() {
  head_.take(sink_.take(head_.bytes()));
  return sink_.missing() == 0;
}

}  // namespace psstore
