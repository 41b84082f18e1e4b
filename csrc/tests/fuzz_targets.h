// Fuzz targets: what a byte string has them do, and what they throw if that broke a promise. libfuzzer.cc has libFuzzer
// drive one of them; each is run for a moment by a test of its own, too.
#pragma once

#include <cstddef>
#include <span>

namespace psstore::testing {

void fuzz_decoder(std::span<const std::byte> program);
void fuzz_replication(std::span<const std::byte> program);

}  // namespace psstore::testing
