// The tensor cores, for the product of a few vectors with rows of a matrix.
#pragma once

#include "platform/scalar.cuh"

namespace po {

#if PO_ON_DEVICE

// D += A * B of a warp: A is 16 x 16, B is 16 x 8, D is 16 x 8 in fp32. In lane 4 g + t: a[0], a[2] belong to row g of A
// and a[1], a[3] to row g + 8; b to column g of B; d[0], d[1] are columns 2 t and 2 t + 1 of row g, d[2], d[3] the same of
// row g + 8. An element of D depends on its row of A and its column of B alone.
template <class Scalar>
PO_FN void multiply_accumulate(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);

template <>
PO_FN void multiply_accumulate<BFloat16>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <>
PO_FN void multiply_accumulate<Float16>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

#endif

}  // namespace po
