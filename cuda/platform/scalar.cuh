// Element types of tensors: fp32, fp16 and bf16, converted to fp32 and rounded (to nearest, ties to even) from fp32.
#pragma once

#include "platform/memory.cuh"

#if !PO_ON_DEVICE
#include <string.h>
#endif

namespace po {

PO_FN uint32_t float_bits(float value) {
#if PO_ON_DEVICE
  return __float_as_uint(value);
#else
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
#endif
}

PO_FN float bits_float(uint32_t bits) {
#if PO_ON_DEVICE
  return __uint_as_float(bits);
#else
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
#endif
}

// A product that is not fused with an addition, on either backend (the host build has -ffp-contract=off).
PO_FN float rounded_product(float a, float b) {
#if PO_ON_DEVICE
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}

PO_FN float square_root(float x) {
#if PO_ON_DEVICE
  return __fsqrt_rn(x);
#else
  return __builtin_sqrtf(x);
#endif
}

struct Float32 {
  using Storage = uint32_t;
  static PO_FN float to_float(Storage x) { return bits_float(x); }
  static PO_FN Storage from_float(float x) { return float_bits(x); }
};

struct BFloat16 {
  using Storage = uint16_t;
  static PO_FN float to_float(Storage x) { return bits_float(static_cast<uint32_t>(x) << 16); }
  static PO_FN Storage from_float(float x) {
#if PO_ON_DEVICE
    uint16_t result;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(result) : "f"(x));
    return result;
#else
    const uint32_t bits = float_bits(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;  // NaN: rounding could carry it into infinity
    return static_cast<Storage>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
#endif
  }
  // Rounds up or down in magnitude, by a random number of 16 bits: the expected value is x.
  static PO_FN Storage round_stochastically(float x, uint32_t random) {
    const uint32_t bits = float_bits(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
    return static_cast<Storage>((bits + random) >> 16);
  }
};

struct Float16 {
  using Storage = uint16_t;
  static PO_FN float to_float(Storage x) {
#if PO_ON_DEVICE
    float result;
    asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(x));
    return result;
#else
    const uint32_t sign = static_cast<uint32_t>(x & 0x8000u) << 16;
    const uint32_t magnitude = x & 0x7fffu;
    if (magnitude >= 0x7c00u) return bits_float(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
    // A half's bits are moved to the float's place and scaled by 2^112: this scales subnormals exactly as well.
    return bits_float(sign | float_bits(bits_float(magnitude << 13) * bits_float(0x77800000u)));
#endif
  }
  static PO_FN Storage from_float(float x) {
#if PO_ON_DEVICE
    uint16_t result;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result) : "f"(x));
    return result;
#else
    const uint32_t bits = float_bits(x);
    const auto sign = static_cast<Storage>((bits >> 16) & 0x8000u);
    const uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return 0x7fff;                                 // NaN as the GPU's conversion gives it
    if (magnitude >= 0x477ff000u) return static_cast<Storage>(sign | 0x7c00u);  // rounds to 65520 or more: infinity
    if (magnitude < 0x38800000u) {
      // Subnormal half: adding 0.5 makes the float adder round at the half's last place.
      return static_cast<Storage>(sign | (float_bits(bits_float(magnitude) + 0.5f) - 0x3f000000u));
    }
    return static_cast<Storage>(sign | ((magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13));
#endif
  }
  // The same as BFloat16's. Below 2^-14 the expected value may be less in magnitude, by 2^-40 at most.
  static PO_FN Storage round_stochastically(float x, uint32_t random) {
    const uint32_t bits = float_bits(x);
    const uint32_t sign = (bits >> 16) & 0x8000u;
    const uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return 0x7fff;
    if (magnitude >= 0x47800000u) return static_cast<Storage>(sign | 0x7c00u);  // 65536 and more
    if (magnitude < 0x38800000u) {
      // Subnormal half: the 16 bits below its last place, 2^-24, are whole numbers of 2^-40.
      const auto units = static_cast<uint32_t>(bits_float(magnitude) * 0x1p40f);
      return static_cast<Storage>(sign | (units + random) >> 16);
    }
    return static_cast<Storage>(sign | (magnitude - 0x38000000u + (random >> 3)) >> 13);
  }
};

// Four exponent bits and three of mantissa, no infinities (torch.float8_e4m3fn). Larger values become the largest one,
// 448; NaN stays NaN.
struct Float8E4M3 {
  using Storage = uint8_t;
  static PO_FN Storage from_float(float x) {
#if PO_ON_DEVICE && __CUDA_ARCH__ >= 890
    uint16_t pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(x));
    return static_cast<Storage>(pair);
#else
    const uint32_t bits = float_bits(x);
    const auto sign = static_cast<uint32_t>((bits >> 24) & 0x80u);
    const uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return 0x7f;
    if (magnitude >= 0x43e00000u) return static_cast<Storage>(sign | 0x7eu);  // 448 and more
    if (magnitude < 0x3c800000u) {
      // Below 2^-6: adding 2^14 makes the float adder round at the last place of subnormals, 2^-9.
      return static_cast<Storage>(sign | (float_bits(bits_float(magnitude) + 16384.0f) - 0x46800000u));
    }
    const uint32_t rounded = (magnitude - 0x3c000000u + 0x7ffffu + ((magnitude >> 20) & 1u)) >> 20;
    return static_cast<Storage>(sign | (rounded < 0x7eu ? rounded : 0x7eu));
#endif
  }
};

// Types as values, for a kernel's configuration.
enum class DType { kFloat32, kFloat16, kBFloat16 };
enum class IndexType { kInt32, kInt64 };

namespace detail {
template <DType>
struct ScalarOf;
template <>
struct ScalarOf<DType::kFloat32> {
  using Type = Float32;
};
template <>
struct ScalarOf<DType::kFloat16> {
  using Type = Float16;
};
template <>
struct ScalarOf<DType::kBFloat16> {
  using Type = BFloat16;
};
template <IndexType>
struct IndexOf;
template <>
struct IndexOf<IndexType::kInt32> {
  using Type = int32_t;
};
template <>
struct IndexOf<IndexType::kInt64> {
  using Type = int64_t;
};
}  // namespace detail

template <DType kType>
using ScalarOf = typename detail::ScalarOf<kType>::Type;
template <IndexType kType>
using IndexOf = typename detail::IndexOf<kType>::Type;

// A vector's elements. The loops have compile-time bounds, so the storage stays in registers.
template <class Scalar, int kBytes>
struct VectorOf {
  using Storage = typename Scalar::Storage;
  static constexpr int kCount = kBytes / static_cast<int>(sizeof(Storage));

  // sums += vectors, element by element, in fp32.
  template <int kVectors>
  static PO_FN void add_to(float (&sums)[kVectors][kCount], const Vector<kBytes> (&vectors)[kVectors],
                           [[maybe_unused]] int num_vectors) {
#if PO_ON_DEVICE
    PO_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      Storage x[kCount];
      __builtin_memcpy(x, &vectors[v], kBytes);
      PO_UNROLL
      for (int i = 0; i < kCount; ++i) sums[v][i] += Scalar::to_float(x[i]);
    }
#else
    for_each_sum(sums, num_vectors, [&](float& sum, int i) { sum += element(vectors, i); });
#endif
  }

  // sums += scale * vectors. Product and sum round once each on both backends (the host build has -ffp-contract=off).
  template <int kVectors>
  static PO_FN void add_scaled_to(float (&sums)[kVectors][kCount], const Vector<kBytes> (&vectors)[kVectors],
                                  float scale, [[maybe_unused]] int num_vectors) {
#if PO_ON_DEVICE
    PO_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      Storage x[kCount];
      __builtin_memcpy(x, &vectors[v], kBytes);
      PO_UNROLL
      for (int i = 0; i < kCount; ++i) sums[v][i] = __fadd_rn(sums[v][i], __fmul_rn(Scalar::to_float(x[i]), scale));
    }
#else
    for_each_sum(sums, num_vectors, [&](float& sum, int i) { sum += element(vectors, i) * scale; });
#endif
  }

  static PO_FN Vector<kBytes> round(const float (&sum)[kCount]) {
    Storage x[kCount];
    PO_UNROLL
    for (int i = 0; i < kCount; ++i) x[i] = Scalar::from_float(sum[i]);
    Vector<kBytes> vector;
    __builtin_memcpy(&vector, x, kBytes);
    return vector;
  }

#if !PO_ON_DEVICE
  // sums *= factor
  template <int kVectors>
  static void scale(float (&sums)[kVectors][kCount], float factor, int num_vectors) {
    for_each_sum(sums, num_vectors, [factor](float& sum, int) { sum *= factor; });
  }

 private:
  // One flat loop, which the compiler vectorizes.
  template <int kVectors, class Update>
  static void for_each_sum(float (&sums)[kVectors][kCount], int num_vectors, const Update& update) {
    float* __restrict first = &sums[0][0];
    for (int i = 0; i < num_vectors * kCount; ++i) update(first[i], i);
  }

  static float element(const void* vectors, int i) {
    Storage x;
    memcpy(&x, static_cast<const uint8_t*>(vectors) + static_cast<size_t>(i) * sizeof(x), sizeof(x));
    return Scalar::to_float(x);
  }
#endif
};

}  // namespace po
