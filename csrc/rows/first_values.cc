#include "rows/first_values.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "core/half.h"
#include "core/philox.h"

namespace psstore {
namespace {

// In (0, 1), exact.
double unit(uint32_t word) {
  return (static_cast<double>(word) + 0.5) * 0x1p-32;
}

// Of x in (0, 1/2], to the last bits of a double, and without a library's rounding: x is m 2^e with m in [sqrt(1/2),
// sqrt(2)), and log(m) = 2 artanh((m - 1) / (m + 1)), whose argument is below 0.172.
double natural_log(double x) {
  const auto bits = std::bit_cast<uint64_t>(x);
  auto exponent = static_cast<double>(static_cast<int>(bits >> 52) - 1023);
  double m = std::bit_cast<double>((bits & 0x000FFFFFFFFFFFFF) | 0x3FF0000000000000);  // in [1, 2)
  if (m > 1.4142135623730951) {
    m *= 0.5;
    exponent += 1;
  }
  const double s = (m - 1) / (m + 1);
  const double square = s * s;
  double sum = 0;
  for (int k = 23; k >= 1; k -= 2) sum = sum * square + 1.0 / k;
  return 2 * s * sum + exponent * 0.6931471805599453;
}

double value_of(const FirstValues& of, uint32_t word) {
  switch (of.kind) {
    case FirstValueKind::kConstant: break;
    case FirstValueKind::kUniform: return of.a + (of.b - of.a) * unit(word);
    case FirstValueKind::kNormal: return of.a + of.b * normal_quantile(unit(word));
  }
  return of.a;
}

}  // namespace

double normal_quantile(double p) {
  const double q = p - 0.5;
  if (std::abs(q) <= 0.425) {
    const double r = 0.180625 - q * q;
    return q * (((5.9109374720e1 * r + 1.5929113202e2) * r + 5.0434271938e1) * r + 3.3871327179e0) /
           (((6.7187563600e1 * r + 7.8757757664e1) * r + 1.7895169469e1) * r + 1.0);
  }
  double r = std::sqrt(-natural_log(std::min(p, 1 - p)));
  double z = 0;
  if (r <= 5) {
    r -= 1.6;
    z = (((1.7023821103e-1 * r + 1.3067284816e0) * r + 2.7568153900e0) * r + 1.4234372777e0) /
        ((1.2021132975e-1 * r + 7.3700164250e-1) * r + 1.0);
  } else {
    r -= 5;
    z = (((1.7337203997e-2 * r + 4.2868294337e-1) * r + 3.0812263860e0) * r + 6.6579051150e0) /
        ((1.2258202635e-2 * r + 2.4197894225e-1) * r + 1.0);
  }
  return q < 0 ? -z : z;
}

void write_first_values(const FirstValues& of, uint64_t id, size_t dim, DType dtype,
                        std::byte* row) {
  RandomWords words{};
  for (size_t i = 0; i < dim; ++i) {
    if (i % 4 == 0 && of.kind != FirstValueKind::kConstant) words = philox(of.seed, id, i / 4);
    const auto value = static_cast<float>(value_of(of, words.word[i % 4]));
    if (dtype == DType::kBFloat16) {
      const BFloat16 nearest = to_bfloat16(value);
      std::memcpy(row + i * sizeof nearest, &nearest, sizeof nearest);
    } else {
      std::memcpy(row + i * sizeof value, &value, sizeof value);
    }
  }
}

}  // namespace psstore
