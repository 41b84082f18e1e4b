// The header: its bytes on the wire, and what is refused before anything else is looked at.
#include "wire/header.h"

#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "core/crc32c.h"
#include "wire/encoder.h"
#include "wire/limits.h"

namespace psstore::testing {
namespace {

using Bytes = std::vector<std::byte>;

Bytes encode(const FrameParts& parts) {
  Bytes bytes(parts.encoded_bytes());
  check_parts(parts);
  encode_frame(parts, bytes.data());
  return bytes;
}

Bytes valid_header() {
  return encode({.op = Op::kSTATS, .request = 0x1122334455667788});
}

// `change` applied to a valid header, the checksum made right again.
Bytes changed(const std::function<void(Header&)>& change) {
  Bytes bytes = valid_header();
  Header header;
  std::memcpy(&header, bytes.data(), kHeaderBytes);
  change(header);
  header.header_crc = compute_header_crc(header);
  std::memcpy(bytes.data(), &header, kHeaderBytes);
  return bytes;
}

ErrorCode code_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.code();
  }
  return ErrorCode::OK;
}

ErrorCode parse_code(const Bytes& bytes) {
  return code_of([&] { parse_header(bytes); });
}

TEST(Header, LiesOnTheWireAsDrawn) {
  const SliceEntry entry{.key = 5};
  const Bytes body(3);
  const Bytes bytes = encode({.op = Op::kPULL,
                              .request = 0x0102030405060708,
                              .round = 9,
                              .rank = 10,
                              .incarnation = 11,
                              .sequence = 12,
                              .table = std::span(&entry, 1),
                              .body = body});
  const auto at = [&](size_t offset) { return std::to_integer<int>(bytes[offset]); };
  EXPECT_EQ(std::string(reinterpret_cast<const char*>(bytes.data()), 4), "PSS1");
  EXPECT_EQ(at(4), 3);   // version
  EXPECT_EQ(at(5), 12);  // op
  EXPECT_EQ(at(8), 1);   // num_slices
  EXPECT_EQ(at(12), 3);  // body_bytes
  EXPECT_EQ(at(24), 8);  // request, lowest byte first
  EXPECT_EQ(at(31), 1);
  EXPECT_EQ(at(32), 9);   // round
  EXPECT_EQ(at(40), 10);  // rank
  EXPECT_EQ(at(44), 11);  // incarnation
  EXPECT_EQ(at(48), 12);  // sequence
  uint32_t crc;
  std::memcpy(&crc, bytes.data() + 60, sizeof crc);
  EXPECT_EQ(crc, crc32c(std::span(bytes).first(60)));
  const size_t fields_bytes = sizeof(SliceEntry) + 3;
  ASSERT_EQ(bytes.size(), kHeaderBytes + fields_bytes + kFieldsCrcBytes);
  std::memcpy(&crc, bytes.data() + kHeaderBytes + fields_bytes, sizeof crc);
  EXPECT_EQ(crc, crc32c(std::span(bytes).subspan(kHeaderBytes, fields_bytes)));
}

TEST(Header, ParsesWhatItEncodes) {
  const Header header = parse_header(valid_header());
  EXPECT_EQ(header.op, Op::kSTATS);
  EXPECT_EQ(header.request, 0x1122334455667788u);
}

TEST(Header, AForeignProtocolIsToldByItsFirstBytes) {
  const std::string http = "GET / HTTP/1.1\r\n";
  for (size_t size = 1; size < http.size(); ++size) {
    const auto prefix = std::as_bytes(std::span(http).first(size));
    EXPECT_EQ(code_of([&] { check_preamble(prefix); }), ErrorCode::BAD_MAGIC);
  }
}

TEST(Header, EveryPrefixOfAGoodHeaderPasses) {
  const Bytes bytes = valid_header();
  for (size_t size = 0; size <= bytes.size(); ++size) check_preamble(std::span(bytes).first(size));
}

TEST(Header, AnotherVersionIsBadVersionWhateverFollows) {
  Bytes bytes = valid_header();
  bytes[4] = std::byte{kProtocolVersion + 1};
  bytes.resize(5);
  EXPECT_EQ(code_of([&] { check_preamble(bytes); }), ErrorCode::BAD_VERSION);
}

TEST(Header, EveryFlippedBitIsNoticed) {
  const Bytes good = valid_header();
  for (size_t bit = 0; bit < 8 * kHeaderBytes; ++bit) {
    Bytes bytes = good;
    bytes[bit / 8] ^= std::byte{1} << (bit % 8);
    EXPECT_EQ(parse_code(bytes), ErrorCode::BAD_CHECKSUM) << "bit " << bit;
  }
}

TEST(Header, OpsFlagsAndChecksumsOutOfRangeAreBadHeader) {
  EXPECT_EQ(parse_code(changed([](Header& h) { h.op = Op{99}; })), ErrorCode::BAD_HEADER);
  EXPECT_EQ(parse_code(changed([](Header& h) { h.flags = 4; })), ErrorCode::BAD_HEADER);
  EXPECT_EQ(parse_code(changed([](Header& h) { h.payload_crc = 1; })), ErrorCode::BAD_HEADER);
}

TEST(Encoder, RefusesWhatAPeerWouldRefuse) {
  const SliceEntry entry{.num_bytes = 8};
  const std::span table(&entry, 1);
  const std::vector<SliceEntry> many(kMaxSlices + 1);
  const Bytes long_body(kMaxBodyBytes + 1);
  const auto code = [](const FrameParts& parts) { return code_of([&] { check_parts(parts); }); };
  EXPECT_EQ(code({.table = table, .payload_bytes = 8}), ErrorCode::OK);
  EXPECT_EQ(code({.table = table, .payload_bytes = 7}), ErrorCode::BAD_ARGUMENT);
  EXPECT_EQ(code({.table = many}), ErrorCode::BAD_ARGUMENT);
  EXPECT_EQ(code({.body = long_body}), ErrorCode::BAD_ARGUMENT);
  EXPECT_EQ(code({.payload_bytes = kMaxPayloadBytes + 1}), ErrorCode::BAD_ARGUMENT);
}

TEST(Encoder, RefusesPartsThatAPeerWouldRefuse) {
  const SliceEntry state{.part = kMaxPart};
  const SliceEntry beyond{.part = kMaxPart + 1};
  const auto code = [](Op op, const SliceEntry& entry) {
    return code_of([&] { check_parts({.op = op, .table = {&entry, 1}}); });
  };
  EXPECT_EQ(code(Op::kPULL, state), ErrorCode::OK);
  EXPECT_EQ(code(Op::kRESTORE, state), ErrorCode::OK);
  EXPECT_EQ(code(Op::kRESTORE, beyond), ErrorCode::BAD_ARGUMENT);
  EXPECT_EQ(code(Op::kPUSH, state), ErrorCode::BAD_ARGUMENT);
  EXPECT_EQ(code(Op::kNORM, state), ErrorCode::BAD_ARGUMENT);
}

}  // namespace
}  // namespace psstore::testing
