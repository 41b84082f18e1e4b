#include "rows/contribution.h"

#include <algorithm>

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
  struct Next {
    const RowContribution* of;
    size_t row;
    uint64_t id;
  };
  std::vector<Next> next;  // of those that have rows left
  for (const RowContribution& one : contributions) {
    if (one.num_rows() > 0) next.push_back({&one, 0, one.id(0)});
  }
  while (!next.empty()) {
    const uint64_t least = std::ranges::min_element(next, {}, &Next::id)->id;
    bool ended = false;
    for (Next& one : next) {
      if (one.id != least) continue;
      gradients.push_back({one.of->gradient(one.row), one.of->dtype(), one.of->weight(), 0});
      ended |= ++one.row == one.of->num_rows();
      if (one.row < one.of->num_rows()) one.id = one.of->id(one.row);
    }
    ids.push_back(least);
    ends.push_back(gradients.size());
    if (ended) std::erase_if(next, [](const Next& one) { return one.row == one.of->num_rows(); });
  }
}

}  // namespace psstore
