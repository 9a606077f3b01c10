// C entries to the element types' conversions on the host, for tests.
#include "platform/random.cuh"
#include "platform/scalar.cuh"

namespace {

template <class Scalar>
void widen(const uint16_t* from, uint32_t* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] = po::float_bits(Scalar::to_float(from[i]));
}

template <class Scalar>
void narrow(const uint32_t* from, typename Scalar::Storage* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] = Scalar::from_float(po::bits_float(from[i]));
}

template <class Scalar>
void narrow_stochastically(const uint32_t* from, const uint32_t* random, uint16_t* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] = Scalar::round_stochastically(po::bits_float(from[i]), random[i]);
}

}  // namespace

extern "C" {

void widen_float16(const uint16_t* from, uint32_t* to, int64_t count) { widen<po::Float16>(from, to, count); }
void widen_bfloat16(const uint16_t* from, uint32_t* to, int64_t count) { widen<po::BFloat16>(from, to, count); }
void narrow_float16(const uint32_t* from, uint16_t* to, int64_t count) { narrow<po::Float16>(from, to, count); }
void narrow_bfloat16(const uint32_t* from, uint16_t* to, int64_t count) { narrow<po::BFloat16>(from, to, count); }
void narrow_stochastically_float16(const uint32_t* from, const uint32_t* random, uint16_t* to, int64_t count) {
  narrow_stochastically<po::Float16>(from, random, to, count);
}
void narrow_stochastically_bfloat16(const uint32_t* from, const uint32_t* random, uint16_t* to, int64_t count) {
  narrow_stochastically<po::BFloat16>(from, random, to, count);
}
// The words of one draw for each counter, [count, 4].
void draw(const uint32_t* counters, const uint64_t* keys, uint32_t* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t* c = counters + 4 * i;
    const po::RandomWords drawn = po::philox({{c[0], c[1], c[2], c[3]}}, keys[i]);
    for (int word = 0; word < 4; ++word) to[4 * i + word] = drawn.words[word];
  }
}
void narrow_float8_e4m3fn(const uint32_t* from, uint8_t* to, int64_t count) { narrow<po::Float8E4M3>(from, to, count); }
}
