// What is to be written to a connection, in order, from where it lies.
//
// Bytes that are sent are let go of by tidy(), not by sent(): what keeps them may be Python's, and sending needs no GIL.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <deque>
#include <memory>
#include <span>
#include <vector>

namespace psstore {

class Outgoing {
 public:
  // A frame: its head, and its payload, which `owner` keeps as it is.
  void add(std::vector<std::byte> head, std::span<const std::span<std::byte>> payload = {},
           std::shared_ptr<const void> owner = nullptr);

  bool done() const { return first_ == pieces_.size(); }
  size_t num_bytes() const { return num_bytes_; }
  // What is still to be sent.
  std::span<const iovec> pieces() const { return std::span(pieces_).subspan(first_); }
  // The same, by frames. REQUIRES: nothing is sent yet.
  std::vector<std::span<const iovec>> frames() const;
  // So many bytes of it are.
  void sent(size_t num_bytes);
  // The payload of the owner's frame lies there from now on, in one piece: what is not sent of it is sent from there.
  void move_payload(const void* owner, std::span<const std::byte> to);
  // Some of the payload of the owner's frame is still to be sent.
  bool sends_payload(const void* owner) const { return unsent_frame(owner) != nullptr; }
  // Lets go of frames that are sent.
  void tidy();
  void clear();

 private:
  struct Frame {
    std::vector<std::byte> head;
    std::shared_ptr<const void> owner;
    size_t end;  // of its pieces
    bool has_payload;
  };

  // Null: there is none, or no payload of it is left.
  const Frame* unsent_frame(const void* owner) const;

  void add_piece(std::span<const std::byte> bytes, bool may_join);

  std::vector<iovec> pieces_;
  size_t first_ = 0;  // not wholly sent
  size_t num_bytes_ = 0;
  std::deque<Frame> frames_;
};

}  // namespace psstore
