#include "client/session.h"

#include <utility>

#include "core/breakable_rules.h"
#include "core/crc32c.h"
#include "wire/carry.h"
#include "wire/encoder.h"

namespace psstore {
namespace {

// What was read is there, or its slice says why not: else memory that nobody has written to would be taken for it. Of
// how many slices values came the decoder has seen. Throws Error(BAD_HEADER).
void check_values(const Request& request, const Frame& answer) {
  if (!request.reads()) return;
  const MemoryRanges memory = request.memory;
  for (size_t i = 0; i < memory.size(); ++i) {
    const bool is_there = i < answer.table.size();
    if (is_there && (answer.table[i].num_bytes > 0 || answer.table[i].status != ErrorCode::OK))
      continue;
    if (memory[i].empty()) continue;
    throw Error(ErrorCode::BAD_HEADER, "of " + std::to_string(memory.size()) +
                                           " slices that were read the value of number " +
                                           std::to_string(i) + " did not come");
  }
}

}  // namespace

ClientSession::ClientSession(std::shared_ptr<CarriedDecisions> decisions)
    : decisions_(std::move(decisions)), decoder_(std::make_unique<FrameDecoder>()) {}

// ---- the connection ---------------------------------------------------------------------------------

void ClientSession::connected() {
  outgoing_.clear();
  decoder_ = std::make_unique<FrameDecoder>();
  broken_.reset();
}

void ClientSession::welcomed(uint64_t at_version, uint64_t last_sequence, double now_s) {
  is_up_ = true;
  version = told = at_version;
  renumber_writes(last_sequence);
  if (!holds(BreakableRule::kTHE_UNANSWERED_IS_SENT_AGAIN)) return;
  for (const std::shared_ptr<Request>& request : requests_) say(request, now_s);
}

void ClientSession::disconnected() {
  is_up_ = false;
  link_.close();
  shared_from_bytes_ = kNothingShared;
  memory_ = nullptr;
  releases_.clear();
  release_is_due = false;
  other_ = nullptr;
  last_write_said_ = last_write_out_ = 0;
  decoder_ = std::make_unique<FrameDecoder>();
  broken_.reset();
  if (receiving_ != nullptr) spent_.push_back(std::move(receiving_));
  outgoing_.clear();
}

void ClientSession::share(std::shared_ptr<ClientMemory> memory, size_t from_bytes) {
  memory_ = std::move(memory);
  shared_from_bytes_ = from_bytes;
}

// Closes the gaps of writes that were given up before they arrived: a shard takes no number out of turn. Safe here
// only: the shard reads nothing more from the connections before this one.
void ClientSession::renumber_writes(uint64_t last_applied) {
  if (!holds(BreakableRule::kWRITES_HAVE_NO_GAPS)) return;
  const uint64_t keeps_up_to =
      holds(BreakableRule::kAPPLIED_WRITES_KEEP_THEIR_NUMBERS) ? last_applied : 0;
  last_write = last_applied;
  for (const std::shared_ptr<Request>& request : requests_) {
    if (!request->is_numbered() || request->sequence <= keeps_up_to) continue;
    request->sequence = ++last_write;
  }
}

// ---- requests ---------------------------------------------------------------------------------------

void ClientSession::ask(std::shared_ptr<Request> request, double now_s) {
  request->number = next_request;
  if (request->is_numbered()) request->sequence = last_write + 1;
  if (is_up_) say(request, now_s);
  ++next_request;
  if (request->is_numbered()) ++last_write;
  requests_.push_back(std::move(request));
}

ClientSession::Requests::const_iterator ClientSession::position(uint64_t number) const {
  const auto found = std::ranges::lower_bound(requests_, number, {},
                                              [](const auto& request) { return request->number; });
  return found != requests_.end() && (*found)->number == number ? found : requests_.end();
}

std::shared_ptr<Request> ClientSession::request(uint64_t number) const {
  const auto found = position(number);
  return found == requests_.end() ? nullptr : *found;
}

std::shared_ptr<Request> ClientSession::take(uint64_t number) {
  const auto found = position(number);
  if (found == requests_.end()) return nullptr;
  std::shared_ptr<Request> taken = *found;
  if (taken->sends_memory() && outgoing_.sends_payload(taken.get())) keep(*taken);
  requests_.erase(found);
  return taken;
}

void ClientSession::keep_cancelled() {
  for (const std::shared_ptr<Request>& request : requests_) {
    if (!request->asker->cancelled()) continue;
    if (request->sends_memory()) keep(*request);
    if (request->kind == Request::Kind::kFromDevice) request->asker->keep();
  }
}

// Without it half of a frame would be what was asked, and half what is in that memory later.
void ClientSession::keep(Request& request) {
  if (request.own != nullptr) return;
  request.own = std::make_unique<const OwnPayload>(request.memory, request.memory_bytes);
  request.memory = request.own->memory();
  outgoing_.move_payload(&request, request.memory.front());
}

void ClientSession::say(const std::shared_ptr<Request>& asked, double now_s) {
  Request& request = *asked;
  const std::string body = body_of(request, now_s);
  FrameParts parts{.op = request.op,
                   .request = request.number,
                   .round = request.round,
                   .rank = speaker.rank,
                   .incarnation = speaker.incarnation,
                   .sequence = request.sequence,
                   .table = request.table,
                   .body = std::as_bytes(std::span(body)),
                   .payload_bytes = request.reads() ? 0 : request.memory_bytes};
  check_parts(parts);
  LaidOut payload = lay_out(request);
  if (!payload.table.empty()) parts.table = payload.table;
  parts.shared = !payload.table.empty() || may_be_lent(request);
  if (speaker.checksum && !payload.memory.empty()) {
    parts.payload_crc = 0;
    for (const auto range : payload.memory) parts.payload_crc = crc32c(range, *parts.payload_crc);
  }
  const size_t release_bytes = releases_.size() * kHeaderBytes;
  std::vector<std::byte> head(release_bytes + parts.encoded_bytes());
  encode_frame(parts, head.data() + release_bytes);
  take_releases(head.data());
  std::shared_ptr<const void> owner = asked;
  if (payload.owner != nullptr) owner = std::move(payload.owner);
  outgoing_.add(std::move(head), payload.memory, std::move(owner));
  if (request.is_data() && !request.reads()) last_write_said_ = request.number;
}

// The shard's wait began with ours, however often it is asked: its error says more, and must come first.
std::string ClientSession::body_of(Request& request, double now_s) {
  const double waited_s = now_s - request.began_s;
  if (!request.carries) return request.asker->body(waited_s);
  Carry carry;
  carry.at_least = request.at_least;
  carry.wait_s = std::max(0.0, request.wait_s - waited_s);
  std::string decisions;
  if (has_news()) {
    CarriedDecisions::News news = decisions_->since(told);
    carry.newest = news.newest;
    carry.scaled = news.scaled;
    carry.factor = news.factor;
    decisions = std::move(news.decisions);
    told = std::max(told, decisions_->last);
  }
  request.scaled = carry.scaled;
  return encode_carry(carry, decisions).append(request.ids);
}

LaidOut ClientSession::lay_out(const Request& request) {
  if (request.reads()) return {};
  if (request.kind == Request::Kind::kFromDevice) return request.asker->lay_out(request.number);
  LaidOut payload{.table = {}, .memory = request.memory, .owner = nullptr};
  if (carries(request.memory_bytes)) return payload;
  if (auto placed = memory_->place(request.table, request.memory, request.number)) {
    payload = {.table = std::move(*placed), .memory = {}, .owner = nullptr};
  }
  return payload;
}

// The answer's values need not come over the stream.
bool ClientSession::may_be_lent(const Request& request) const {
  const bool reads_values = request.op == Op::kPULL || request.op == Op::kPULL_ROWS;
  if (!reads_values || request.table.empty()) return false;
  if (request.kind == Request::Kind::kPlain) return !carries(request.memory_bytes);
  return memory_ != nullptr || request.may_land;
}

// ---- bytes ------------------------------------------------------------------------------------------

bool ClientSession::send() {
  last_write_out_ = last_write_said_;
  return !link_.is_open() || link_.send(outgoing_);
}

ClientSession::Received ClientSession::receive(int max_reads, bool may_sleep) {
  if (other_ != nullptr) return Received::kOther;
  let_forgotten_pass();
  for (int reads = 0; reads < max_reads; ++reads) {
    if (broken_) throw *broken_;
    const std::span<std::byte> window = decoder_->writable().bytes;
    const auto received = link_.receive(window, std::exchange(may_sleep, false));
    if (!received) return Received::kLost;
    if (*received == 0) break;
    decoder_->written(*received);
    if (!take_frames()) return Received::kOther;
    if (*received < window.size()) break;  // that was all
  }
  return Received::kAll;
}

void ClientSession::feed(std::span<const std::byte> bytes) {
  let_forgotten_pass();
  decoder_->feed(bytes);
  if (other_ == nullptr) take_frames();
}

void ClientSession::let_forgotten_pass() {
  if (receiving_ == nullptr || !receiving_->asker->forgotten()) return;
  decoder_->let_pass();
  spent_.push_back(std::move(receiving_));
}

std::shared_ptr<Frame> ClientSession::next_frame() {
  if (other_ == nullptr) take_frames();
  return std::exchange(other_, nullptr);
}

bool ClientSession::take_frames() {
  if (broken_) throw *broken_;
  try {
    while (std::shared_ptr<Frame> frame = decoder_->next_frame()) {
      if (take_frame(frame)) continue;
      other_ = std::move(frame);
      return false;
    }
  } catch (const Error& error) {
    broken_ = error;
    throw;
  }
  return true;
}

bool ClientSession::take_frame(const std::shared_ptr<Frame>& frame) {
  const Header& header = frame->header;
  if (frame->complete && receiving_ != nullptr) spent_.push_back(std::move(receiving_));
  const auto found = position(header.request);
  if (found == requests_.end() || !is_plain_answer(**found, *frame)) return false;
  const std::shared_ptr<Request>& request = *found;
  if (!frame->complete) {
    if (request->asker->forgotten()) {
      decoder_->discard();
    } else {
      decoder_->accept(request->memory);
      receiving_ = request;
    }
    return true;
  }
  check_values(*request, *frame);
  if (header.is_shared()) {
    if (!request->asker->forgotten()) memory_->read(frame->table.entries(), request->memory);
    if (link_.is_hung_up()) return true;  // the shard takes steps there again: it is asked anew
    add_release(header.request);
  }
  if (request->is_data()) heard(header.sequence, request->scaled);
  answered_.push_back({request, frame});
  requests_.erase(found);
  return true;
}

bool ClientSession::is_plain_answer(const Request& request, const Frame& frame) const {
  if (!is_up_ || request.kind == Request::Kind::kByHand) return false;
  if (frame.header.op != request.reply() || request.op == Op::kHOLD) return false;
  if (frame.header.payload_bytes == 0) return !frame.header.is_shared();
  const bool has_place = request.reads() && !request.memory.empty();
  return has_place && (!frame.header.is_shared() || memory_ != nullptr);
}

bool ClientSession::tell_answered() {
  if (answered_.empty()) return false;
  while (!answered_.empty()) {
    const Answered one = std::move(answered_.front());
    answered_.pop_front();
    one.request->asker->answered(one.request->part, one.frame);
  }
  return true;
}

// ---- releases ---------------------------------------------------------------------------------------

void ClientSession::take_releases(std::byte* to) {
  for (const uint64_t request : releases_) {
    encode_frame({.op = Op::kRELEASE, .request = request}, to);
    to += kHeaderBytes;
  }
  releases_.clear();
}

void ClientSession::release() {
  if (releases_.empty()) return;
  std::vector<std::byte> frames(releases_.size() * kHeaderBytes);
  take_releases(frames.data());
  outgoing_.add(std::move(frames));
}

bool ClientSession::release_if_due() {
  if (releases_.size() < (speaker.keeps_releases ? kMaxKeptReleases : 1)) return false;
  release();
  return true;
}

}  // namespace psstore
