// CRC-32C (Castagnoli): the checksum of headers and payloads. RFC 3720, appendix B.4, has test vectors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace psstore {

// The checksum of `bytes`, or with `seed` the checksum of what `seed` is the checksum of, followed by
// `bytes`: crc32c(b, crc32c(a)) == crc32c(a + b). Uses the processor's instruction where there is one.
uint32_t crc32c(std::span<const std::byte> bytes, uint32_t seed = 0);

// The same without special instructions: what the fast path is tested against.
uint32_t crc32c_portable(std::span<const std::byte> bytes, uint32_t seed = 0);

}  // namespace psstore
