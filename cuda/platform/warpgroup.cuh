// Warpgroups of sm_90a: four warps whose tensor cores multiply tiles of shared memory. Device only. A kernel that uses
// them has the suffix "a" in its `LaunchShape`.
#pragma once

#include "platform/scalar.cuh"

namespace po {

#if PO_ON_DEVICE

// Sets the registers of each thread of this warpgroup. A multiple of 8. All four warps.
template <int kRegisters>
PO_FN void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
PO_FN void leave_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Where a tile lies in shared memory, with a swizzle of 128 bytes. It begins at a multiple of 1024. Its rows, of 128
// bytes, are next to each other. `box_bytes`: from 64 columns to the next 64, where a tile has more.
PO_FN uint64_t tile_descriptor(const uint8_t* tile, uint32_t box_bytes) {
  constexpr uint64_t kEightRows = 1024, kSwizzle128 = 1ull << 62;
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(tile));
  return (address & 0x3ffff) >> 4 | static_cast<uint64_t>(box_bytes >> 4) << 16 | (kEightRows >> 4) << 32 | kSwizzle128;
}

// Products of a warpgroup are asynchronous. They use the registers of their sums, and shared memory, until they are
// awaited. `begin_products` comes before the first one after an access to the sums.
PO_FN void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
PO_FN void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Returns when all but the last `kPending` commits are complete.
template <int kPending>
PO_FN void await_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Sums (+)= A * B: A is 64 x 16, B is 16 x kColumns, both in shared memory. Lane 4 g + t of warp w has, for each eight
// columns, columns 2 t and 2 t + 1 of row 16 w + g, then those of row 16 w + g + 8. kIsMMajor, kIsNMajor: rows of A, and
// columns of B, follow each other in memory. Otherwise the 16 elements that are multiplied do.
template <int kColumns>
struct WarpgroupProduct;

// clang-format off
#define PO_NAMES_8 "%0,%1,%2,%3,%4,%5,%6,%7"
#define PO_NAMES_16 PO_NAMES_8 "," "%8,%9,%10,%11,%12,%13,%14,%15"
#define PO_NAMES_24 PO_NAMES_16 "," "%16,%17,%18,%19,%20,%21,%22,%23"
#define PO_NAMES_32 PO_NAMES_24 "," "%24,%25,%26,%27,%28,%29,%30,%31"
#define PO_NAMES_40 PO_NAMES_32 "," "%32,%33,%34,%35,%36,%37,%38,%39"
#define PO_NAMES_48 PO_NAMES_40 "," "%40,%41,%42,%43,%44,%45,%46,%47"
#define PO_NAMES_56 PO_NAMES_48 "," "%48,%49,%50,%51,%52,%53,%54,%55"
#define PO_NAMES_64 PO_NAMES_56 "," "%56,%57,%58,%59,%60,%61,%62,%63"
#define PO_NAMES_72 PO_NAMES_64 "," "%64,%65,%66,%67,%68,%69,%70,%71"
#define PO_NAMES_80 PO_NAMES_72 "," "%72,%73,%74,%75,%76,%77,%78,%79"
#define PO_NAMES_88 PO_NAMES_80 "," "%80,%81,%82,%83,%84,%85,%86,%87"
#define PO_NAMES_96 PO_NAMES_88 "," "%88,%89,%90,%91,%92,%93,%94,%95"
#define PO_NAMES_104 PO_NAMES_96 "," "%96,%97,%98,%99,%100,%101,%102,%103"
#define PO_NAMES_112 PO_NAMES_104 "," "%104,%105,%106,%107,%108,%109,%110,%111"
#define PO_NAMES_120 PO_NAMES_112 "," "%112,%113,%114,%115,%116,%117,%118,%119"
#define PO_NAMES_128 PO_NAMES_120 "," "%120,%121,%122,%123,%124,%125,%126,%127"
#define PO_EIGHT_SUMS(i) "+f"(sums[i]), "+f"(sums[i + 1]), "+f"(sums[i + 2]), "+f"(sums[i + 3]), \
  "+f"(sums[i + 4]), "+f"(sums[i + 5]), "+f"(sums[i + 6]), "+f"(sums[i + 7])
#define PO_SUMS_8 PO_EIGHT_SUMS(0)
#define PO_SUMS_16 PO_SUMS_8, PO_EIGHT_SUMS(8)
#define PO_SUMS_24 PO_SUMS_16, PO_EIGHT_SUMS(16)
#define PO_SUMS_32 PO_SUMS_24, PO_EIGHT_SUMS(24)
#define PO_SUMS_40 PO_SUMS_32, PO_EIGHT_SUMS(32)
#define PO_SUMS_48 PO_SUMS_40, PO_EIGHT_SUMS(40)
#define PO_SUMS_56 PO_SUMS_48, PO_EIGHT_SUMS(48)
#define PO_SUMS_64 PO_SUMS_56, PO_EIGHT_SUMS(56)
#define PO_SUMS_72 PO_SUMS_64, PO_EIGHT_SUMS(64)
#define PO_SUMS_80 PO_SUMS_72, PO_EIGHT_SUMS(72)
#define PO_SUMS_88 PO_SUMS_80, PO_EIGHT_SUMS(80)
#define PO_SUMS_96 PO_SUMS_88, PO_EIGHT_SUMS(88)
#define PO_SUMS_104 PO_SUMS_96, PO_EIGHT_SUMS(96)
#define PO_SUMS_112 PO_SUMS_104, PO_EIGHT_SUMS(104)
#define PO_SUMS_120 PO_SUMS_112, PO_EIGHT_SUMS(112)
#define PO_SUMS_128 PO_SUMS_120, PO_EIGHT_SUMS(120)
#define PO_WGMMA_OF(type, columns, count, a, b, adds, major_a, major_b)                                                \
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %" #adds ", 0;\n"                                                       \
               "wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." type "." type                                   \
               " {" PO_NAMES_##count "}, %" #a ", %" #b ", p, 1, 1, %" #major_a ", %" #major_b "; }"                   \
               : PO_SUMS_##count                                                                                       \
               : "l"(a_tile), "l"(b_tile), "r"(static_cast<int>(is_added)), "n"(kIsMMajor), "n"(kIsNMajor))
#define PO_WGMMA(columns, count, a, b, adds, major_a, major_b)                                                         \
  template <>                                                                                                          \
  struct WarpgroupProduct<columns> {                                                                                   \
    template <class Scalar, int kIsMMajor, int kIsNMajor>                                                              \
    static PO_FN void add(float (&sums)[count], uint64_t a_tile, uint64_t b_tile, bool is_added) {                     \
      if constexpr (std::is_same_v<Scalar, BFloat16>) {                                                                \
        PO_WGMMA_OF("bf16", columns, count, a, b, adds, major_a, major_b);                                             \
      } else {                                                                                                         \
        static_assert(std::is_same_v<Scalar, Float16>, "tensor cores multiply 16-bit elements here");                  \
        PO_WGMMA_OF("f16", columns, count, a, b, adds, major_a, major_b);                                              \
      }                                                                                                                \
    }                                                                                                                  \
  };
PO_WGMMA(64, 32, 32, 33, 34, 35, 36)
PO_WGMMA(80, 40, 40, 41, 42, 43, 44)
PO_WGMMA(96, 48, 48, 49, 50, 51, 52)
PO_WGMMA(112, 56, 56, 57, 58, 59, 60)
PO_WGMMA(128, 64, 64, 65, 66, 67, 68)
PO_WGMMA(144, 72, 72, 73, 74, 75, 76)
PO_WGMMA(160, 80, 80, 81, 82, 83, 84)
PO_WGMMA(176, 88, 88, 89, 90, 91, 92)
PO_WGMMA(192, 96, 96, 97, 98, 99, 100)
PO_WGMMA(208, 104, 104, 105, 106, 107, 108)
PO_WGMMA(224, 112, 112, 113, 114, 115, 116)
PO_WGMMA(240, 120, 120, 121, 122, 123, 124)
PO_WGMMA(256, 128, 128, 129, 130, 131, 132)
// clang-format on

// Two elements, rounded, the first one in the lower half.
template <class Scalar>
PO_FN uint32_t rounded_pair(float first, float second) {
  uint32_t pair;
  if constexpr (std::is_same_v<Scalar, BFloat16>) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
  } else {
    static_assert(std::is_same_v<Scalar, Float16>);
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
  }
  return pair;
}

// Stores 16 rows of 16 columns, rounded, from eight sums of each lane as above. Each lane names one half of a row,
// which is 16 bytes: lane l names columns 8 * (l / 16) and the following of row l % 16.
template <class Scalar>
PO_FN void store_rounded(uint8_t* half_row, const float* sums) {
  uint32_t words[4];
  PO_UNROLL
  for (int i = 0; i < 4; ++i) words[i] = rounded_pair<Scalar>(sums[2 * i], sums[2 * i + 1]);
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                   static_cast<uint32_t>(__cvta_generic_to_shared(half_row))),
               "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
               : "memory");
}

#endif

}  // namespace po
