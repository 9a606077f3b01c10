// Division by a number that a launch knows from its plan: a product and a shift. A GPU divides with some 25 dependent
// instructions, and a warp that looks up a block's owner divides many times.
#pragma once

#include "platform/describe.cuh"

namespace po {

struct Divisor {
  uint64_t multiplier;  // 2^shift / value, rounded up
  int32_t shift;        // 31 + log2(value), rounded up
  int32_t value;        // at least 1; 0: not used
};
PO_DESCRIBE(Divisor, multiplier, shift, value)

constexpr Divisor divisor_of(int32_t value) {
  int32_t shift = 31;
  while (int64_t{1} << (shift - 31) < value) ++shift;
  const uint64_t dividend = uint64_t{1} << shift;
  return {value == 0 ? 0 : (dividend - 1) / static_cast<uint64_t>(value) + 1, shift, value};
}
PO_QUERY(divisor_multiplier, (int64_t value), divisor_of(static_cast<int32_t>(value)).multiplier)
PO_QUERY(divisor_shift, (int64_t value), divisor_of(static_cast<int32_t>(value)).shift)

// The quotient of a number that is not negative. The multiplier is too large by less than 1. The number (below 2^31)
// and the shift make that less than 1 / value, so the quotient never reaches the next whole number. The product has 63
// bits.
PO_FN int operator/(int number, const Divisor& divisor) {
  return static_cast<int>(static_cast<uint64_t>(static_cast<uint32_t>(number)) * divisor.multiplier >> divisor.shift);
}
PO_FN int operator%(int number, const Divisor& divisor) { return number - number / divisor * divisor.value; }

}  // namespace po
