#include "server/server_protocol.h"

#include <algorithm>
#include <new>
#include <utility>

namespace psstore {

void ServerProtocol::open(std::string writer, bool wants_checksum) {
  client_->writer = std::move(writer);
  client_->wants_checksum = wants_checksum;
  open_ = true;
  service_.opened(client_);
}

void ServerProtocol::allow(std::span<const uint8_t> ops) {
  allowed_.reset();
  for (const uint8_t op : ops) allowed_.set(op);
}

void ServerProtocol::check_allowed(Op op) const {
  if (is_allowed(op)) return;
  throw Error(ErrorCode::NOT_ALLOWED,
              "the token that this client connected with is for reading only: operation " +
                  std::to_string(static_cast<int>(op)) + " writes; connect with a worker's token");
}

void ServerProtocol::attach(const Life& worker) {
  client_->worker = worker;
  client_->traffic = service_.traffic_of(worker.rank);
  service_.attached(worker);
}

void ServerProtocol::follow() {
  client_->follows = true;
  replies_.set_gate(nullptr, client_->connection);
  service_.replication().follow(client_->connection, replies_, client_->wants_checksum);
}

void ServerProtocol::lead() {
  client_->leads = true;
  open({}, /*wants_checksum=*/false);
  service_.leads(client_);
}

void ServerProtocol::again(std::shared_ptr<Frame> frame) {
  announced_ = false;
  again_ = std::move(frame);
}

std::shared_ptr<Frame> ServerProtocol::next_frame(double now_s) {
  service_.replication().is_now(now_s);
  while (!is_shut()) {
    std::shared_ptr<Frame> frame = fetch();
    if (frame == nullptr) return nullptr;
    asked_ |= open_;
    if (std::exchange(announced_, false)) return frame;
    const bool is_heard = !service_.is_closed() || client_->follows;  // others wait for its word
    if (open_ && is_heard && take(frame, now_s)) continue;
    announced_ = !frame->complete;
    return frame;
  }
  return nullptr;
}

std::shared_ptr<Frame> ServerProtocol::fetch() {
  if (again_ != nullptr) return std::exchange(again_, nullptr);
  std::shared_ptr<Frame> frame = decoder_.next_frame();
  if (frame != nullptr && frame->complete && open_) attach_payload(*frame);
  return frame;
}

// First of all: once the frame is gone, whatever became of it, that memory is the client's again.
void ServerProtocol::attach_payload(Frame& frame) const {
  const Header& header = frame.header;
  if (!header.is_shared() || header.payload_bytes == 0) return;
  const std::string what = "operation " + std::to_string(static_cast<int>(header.op));
  if (!DataService::is_write(header.op)) {
    throw Error(ErrorCode::UNEXPECTED_MESSAGE, what + " of this connection can't have a payload");
  }
  const auto attach = [&](const auto& memory) {
    const auto entries = frame.table.entries();
    const auto found =
        std::ranges::find_if(memory, [&](const auto& one) { return one->begins_here(entries); });
    if (found == memory.end()) {
      throw Error(ErrorCode::UNEXPECTED_MESSAGE,
                  what + " lies in no memory that its connection shares");
    }
    frame.payload = (*found)->range_of(entries, header.request);
  };
  if (client_->leads) {
    attach(client_->seen);
  } else {
    attach(client_->arenas);
  }
}

bool ServerProtocol::take_record(const std::shared_ptr<Frame>& frame) {
  const Header& header = frame->header;
  if (client_->follows) {
    if (!frame->complete) return false;  // no word of a standby's has a payload
    Replication& replication = service_.replication();
    if (header.op == Op::kRELEASE) {
      replication.let_go(client_->connection, header.request);
    } else if (DataService::acknowledges(header.op)) {
      replication.acknowledged(client_->connection, header.request);
    } else {
      return false;
    }
    return true;
  }
  if (!DataService::replays(header.op)) return false;
  if (frame->complete) {
    service_.replay(*frame, replies_);
  } else {
    decoder_.accept(service_.memory_for(header.payload_bytes));
  }
  return true;
}

bool ServerProtocol::take(const std::shared_ptr<Frame>& frame, double now_s) {
  const Header& header = frame->header;
  if (client_->follows || client_->leads) return take_record(frame);
  if (header.op == Op::kRELEASE && frame->complete) {
    client_->leases.end(header.request);
    return true;
  }
  if (!DataService::takes(header)) return false;
  std::exception_ptr failed;
  ErrorCode code = ErrorCode::OUT_OF_MEMORY;
  try {
    if (frame->complete && refused_) std::rethrow_exception(std::exchange(refused_, nullptr));
    check_allowed(header.op);
    if (service_.brings_news(*client_, *frame)) return false;
    if (frame->complete) {
      service_.answer(client_, frame, replies_, now_s);
    } else {
      receive(*frame);
    }
    return true;
  } catch (const Error& error) {
    if (ends_connection(error.code())) throw;
    code = error.code();
    failed = std::current_exception();
  } catch (const std::bad_alloc&) {
    failed = std::current_exception();
  }
  if (!frame->complete) {
    refused_ = std::move(failed);
    decoder_.discard();
  } else if (is_allowed(header.op)) {
    service_.refuse(*client_, *frame, std::move(failed), code, replies_);
  } else {
    service_.fail(client_->connection, header.request, std::move(failed));
  }
  return true;
}

void ServerProtocol::receive(Frame& frame) {
  if (BufferRef destination = service_.admit(*client_, frame)) {
    decoder_.accept(std::move(destination));
  } else {
    decoder_.discard();
  }
}

}  // namespace psstore
