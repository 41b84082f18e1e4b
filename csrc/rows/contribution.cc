#include "rows/contribution.h"

#include <algorithm>
#include <optional>

namespace psstore {

MergedRows::MergedRows(std::span<const RowContribution> contributions) {
  size_t most = 0;
  size_t all = 0;
  for (const RowContribution& one : contributions) {
    most = std::max(most, one.num_rows());
    all += one.num_rows();
  }
  ids.reserve(most);
  ends.reserve(most);
  gradients.reserve(all);
  std::vector<size_t> next(contributions.size());
  while (true) {
    std::optional<uint64_t> least;
    for (size_t k = 0; k < contributions.size(); ++k) {
      if (next[k] == contributions[k].num_rows()) continue;
      const uint64_t id = contributions[k].id(next[k]);
      least = std::min(least.value_or(id), id);
    }
    if (!least) return;
    for (size_t k = 0; k < contributions.size(); ++k) {
      const RowContribution& one = contributions[k];
      if (next[k] == one.num_rows() || one.id(next[k]) != *least) continue;
      gradients.push_back({one.gradient(next[k]++), one.dtype(), one.weight(), 0});
    }
    ids.push_back(*least);
    ends.push_back(gradients.size());
  }
}

}  // namespace psstore
