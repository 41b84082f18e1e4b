// Random operations on rows beside a dictionary (row_model.h), as many as one asks for:
//
//   cmake -S . -B build/cpp -DPSSTORE_TESTS=ON -DPSSTORE_PYTHON=OFF && cmake --build build/cpp --target row_operations
//   build/cpp/csrc/tests/row_operations 1000000000 1      # count, seed
//
// Ends with 1 if a row was not what the dictionary says.
#include <cstdint>
#include <cstdio>
#include <cstdlib>

#include "row_model.h"

int main(int num_arguments, char** arguments) {
  if (num_arguments != 3) {
    std::fprintf(stderr, "usage: %s COUNT SEED\n", arguments[0]);
    return 2;
  }
  const uint64_t count = std::strtoull(arguments[1], nullptr, 10);
  const uint64_t seed = std::strtoull(arguments[2], nullptr, 10);
  // One table after the other, so that each grows from nothing. Of every other one rows go all the time.
  constexpr uint64_t kOperationsOfOne = 20'000'000;
  constexpr uint64_t kIds = 100'000;
  constexpr uint64_t kEvictedEvery[] = {5'000, 15};
  uint64_t num_done = 0;
  uint64_t num_differences = 0;
  for (uint64_t table = 0; num_done < count; ++table) {
    psstore::testing::RowModel model(seed + table, kIds, kEvictedEvery[table % 2]);
    while (model.num_operations() < kOperationsOfOne && num_done + model.num_operations() < count) {
      model.go_on();
    }
    num_done += model.num_operations();
    num_differences += model.num_differences();
    std::printf("%llu operations, %llu differences; %zu rows at the end of table %llu\n",
                static_cast<unsigned long long>(num_done),
                static_cast<unsigned long long>(num_differences), model.store().num_rows(),
                static_cast<unsigned long long>(table));
    std::fflush(stdout);
  }
  return num_differences == 0 ? 0 : 1;
}
