// Groups of threads: a work-group (WG, a thread block) and `Lanes<kWidth>`, an aligned part of a warp.
//
// On the host a warp has one lane, and a WG has as many one-lane warps as the launch asks for (one by default, more
// under ThreadSanitizer, so that a missing sync() is found). A loop strided by size() is right on both.
#pragma once

#include "platform/platform.cuh"

#if !PO_ON_DEVICE
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace po {

#if PO_ON_DEVICE

inline constexpr int kWarpSize = 32;
inline constexpr int kMaxWarps = 32;  // of a WG

struct WorkGroup {
  PO_FN int rank() const { return static_cast<int>(threadIdx.x); }
  PO_FN int size() const { return static_cast<int>(blockDim.x); }
  PO_FN int index() const { return static_cast<int>(blockIdx.x); }
  PO_FN int count() const { return static_cast<int>(gridDim.x); }
  PO_FN int warp_index() const { return static_cast<int>(threadIdx.x / kWarpSize); }
  PO_FN int num_warps() const { return static_cast<int>(blockDim.x / kWarpSize); }
  PO_FN void sync() const { __syncthreads(); }
  // Memory of this WG alone: as many bytes as the launch asked for, at a multiple of kArenaAlignment<>.
  PO_FN uint8_t* arena() const {
    extern __shared__ __align__(kArenaAlignment<>) uint8_t po_arena[];
    return po_arena;
  }
};

template <int kWidth>
struct Lanes {
  static constexpr int kSize = kWidth;
  static constexpr int kPerWarp = kWarpSize / kWidth;

  PO_FN int rank() const { return static_cast<int>(threadIdx.x % kWidth); }
  PO_FN int size() const { return kWidth; }
  // Number of this group among the warp's kPerWarp groups.
  PO_FN int index() const { return static_cast<int>(threadIdx.x % kWarpSize / kWidth); }
  PO_FN void sync() const { __syncwarp(mask()); }

  template <class T>
  PO_FN T shuffle(T value, int source) const {
    return __shfl_sync(mask(), value, source, kWidth);
  }

  // The sum of `value` here and in the lane whose number differs in the bits of `distance`.
  PO_FN float add_across(float value, int distance) const {
    return value + __shfl_xor_sync(mask(), value, distance, kWidth);
  }

  // Bit l: `condition` of lane l.
  PO_FN uint32_t ballot(bool condition) const { return __ballot_sync(mask(), condition); }

  // Number of lanes whose `condition` is true.
  PO_FN int count(bool condition) const { return __popc(ballot(condition)); }

  // The union of the bits of all lanes.
  PO_FN uint64_t union_of(uint64_t bits) const {
    const unsigned low = __reduce_or_sync(mask(), static_cast<unsigned>(bits));
    const unsigned high = __reduce_or_sync(mask(), static_cast<unsigned>(bits >> 32));
    return static_cast<uint64_t>(high) << 32 | low;
  }

  // The sum of `value` over the lanes up to this one.
  template <class T>
  PO_FN T sum_through(T value) const {
    PO_UNROLL
    for (int distance = 1; distance < kWidth; distance *= 2) {
      const T before = __shfl_up_sync(mask(), value, distance, kWidth);
      if (rank() >= distance) value += before;
    }
    return value;
  }

  PO_FN unsigned mask() const {
    return kWidth == kWarpSize ? 0xffffffffu : ((1u << (kWidth % kWarpSize)) - 1u) << (index() * kWidth);
  }
};

#else

inline constexpr int kWarpSize = 1;
inline constexpr int kMaxWarps = 64;

struct WorkGroup {
  int rank_;
  int size_;
  int index_;
  int count_;
  pthread_barrier_t* barrier_;
  uint8_t* arena_;
  pthread_barrier_t* cluster_barrier_;
  int64_t bytes_to_next_;  // from this WG's shared memory to the next WG's

  int rank() const { return rank_; }
  int size() const { return size_; }
  int index() const { return index_; }
  int count() const { return count_; }
  int warp_index() const { return rank_; }
  int num_warps() const { return size_; }
  uint8_t* arena() const { return arena_; }
  void sync() const {
    if (size_ > 1) pthread_barrier_wait(barrier_);
  }
};

template <int kWidth>
struct Lanes {
  static constexpr int kSize = 1;
  static constexpr int kPerWarp = 1;

  int rank() const { return 0; }
  int size() const { return 1; }
  int index() const { return 0; }
  void sync() const {}

  template <class T>
  T shuffle(T value, int) const {
    return value;
  }
  uint32_t ballot(bool condition) const { return condition ? 1 : 0; }
  int count(bool condition) const { return condition ? 1 : 0; }
  uint64_t union_of(uint64_t bits) const { return bits; }
  template <class T>
  T sum_through(T value) const {
    return value;
  }
};

#endif

using Warp = Lanes<32>;

// The sum of 32 values that are spread over a warp's lanes: value i of a lane is number rank + i * size. Values are
// added as a tree of neighbors, so the order is the same on both backends. All lanes get it.
template <int kCount>
PO_FN float tree_sum([[maybe_unused]] const Warp& warp, float (&values)[kCount]) {
  static_assert(kCount * kWarpSize == 32, "32 values in all");
#if PO_ON_DEVICE
  PO_UNROLL
  for (int distance = 1; distance < 32; distance *= 2) values[0] = warp.add_across(values[0], distance);
#else
  for (int distance = 1; distance < kCount; distance *= 2) {
    for (int i = 0; i < kCount; i += 2 * distance) values[i] += values[i + distance];
  }
#endif
  return values[0];
}

#if PO_ON_DEVICE
// A barrier of some warps of a WG, `num_threads` in all. `barrier`: 1 to 15; sync() of a WG uses 0.
PO_FN void sync_warps(int barrier, int num_threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(num_threads) : "memory");
}
#endif

#if !PO_ON_DEVICE

// Returns, with acquire order, when is_waiting(*word) is false. Whoever makes it false calls `wake_sleepers`. A thread
// that called sched_yield until then would leave its core to a busy process for a whole time slice, in each round.
template <class Word, class Condition>
void sleep_while(const Word* word, const Condition& is_waiting) {
  Word seen;
  while (is_waiting(seen = __atomic_load_n(word, __ATOMIC_ACQUIRE))) {  // @handover-acquire
    // Returns at once if the word's low half has changed.
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, static_cast<uint32_t>(seen), nullptr, nullptr, 0);
  }
}

template <class Word>
void wake_sleepers(const Word* word) {
  syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

#endif

// Hands work from some threads of a WG to others, round after round, without a wait of the former. Accesses before the
// arrivals of a round are visible after its await. Lies in shared memory. No thread may be a round late when the next
// but one begins to arrive. On the GPU it is an mbarrier: a releasing atomic would first drain the thread's copies.
class Handover {
 public:
  // One thread; a sync of the WG must follow.
  PO_FN void start(int arrivals_per_round) {
#if PO_ON_DEVICE
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(address()), "r"(arrivals_per_round) : "memory");
#else
    word_ = 0;
    arrivals_per_round_ = static_cast<uint64_t>(arrivals_per_round);
    missing_bytes_ = 0;
#endif
  }

  PO_FN void arrive() {
#if PO_ON_DEVICE
    asm volatile("{ .reg .b64 s; mbarrier.arrive.release.cta.shared.b64 s, [%0]; }" ::"r"(address()) : "memory");
#else
    const uint64_t arrivals = __atomic_add_fetch(&word_, 1, __ATOMIC_ACQ_REL);  // @handover-release
    if (arrivals % arrivals_per_round_ == 0) wake_sleepers(&word_);
#endif
  }

  // Arrives for this thread once all copies (copy_async) that it has started have landed.
  PO_FN void arrive_behind_copies() {
#if PO_ON_DEVICE
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(address()) : "memory");
#else
    arrive();
#endif
  }

  // Arrives for this thread. The round ends when all arrivals have come, and `bytes` of tiles (copy_tile_async) have
  // landed. Some bytes may have landed before.
  PO_FN void arrive_behind_tiles(uint32_t bytes) {
#if PO_ON_DEVICE
    asm volatile("{ .reg .b64 s; mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 s, [%0], %1; }" ::"r"(address()),
                 "r"(bytes)
                 : "memory");
#else
    __atomic_add_fetch(&missing_bytes_, bytes, __ATOMIC_RELAXED);
    arrive();
#endif
  }

#if PO_ON_DEVICE
  PO_FN uint32_t address() const { return static_cast<uint32_t>(__cvta_generic_to_shared(&word_)); }
#else
  void tile_has_come(uint32_t bytes) {
    if (__atomic_sub_fetch(&missing_bytes_, bytes, __ATOMIC_RELEASE) == 0) wake_sleepers(&missing_bytes_);
  }
#endif

  // Whether a round is over: then `await` would return at once.
  PO_FN bool is_over(uint32_t round) const {
#if PO_ON_DEVICE
    uint32_t is_over = 0;
    asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(is_over)
                 : "r"(address()), "r"(round & 1)
                 : "memory");
    return is_over != 0;
#else
    return (__atomic_load_n(&word_, __ATOMIC_ACQUIRE) / arrivals_per_round_ & 1) != (round & 1) &&
           __atomic_load_n(&missing_bytes_, __ATOMIC_ACQUIRE) == 0;
#endif
  }

  // Rounds count from 0. The wait is for threads of this WG, and for tiles; these wait for no peer meanwhile.
  PO_FN void await(uint32_t round) const {
#if PO_ON_DEVICE
    uint32_t is_over = 0;
    while (is_over == 0) {
#if __CUDA_ARCH__ >= 900
      asm volatile(
          "{ .reg .pred p; mbarrier.try_wait.parity.acquire.cta.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
          : "=r"(is_over)
          : "r"(address()), "r"(round & 1)
          : "memory");
#else
      asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                   : "=r"(is_over)
                   : "r"(address()), "r"(round & 1)
                   : "memory");
#endif
    }
#else
    // Compares the parity alone, as the GPU does, so that a thread that is a round late fails here too.
    const auto in_round = [&](uint64_t arrivals) { return (arrivals / arrivals_per_round_ & 1) == (round & 1); };
    sleep_while(&word_, in_round);
    sleep_while(&missing_bytes_, [](int64_t bytes) { return bytes != 0; });
#endif
  }

 private:
#if !PO_ON_DEVICE
  uint64_t arrivals_per_round_;
  int64_t missing_bytes_;
#endif
  uint64_t word_;
};

// Arrives for a warp.
PO_FN void hand_over(Handover& handover) {
  const Warp warp;
  warp.sync();
  if (warp.rank() == 0) handover.arrive();
}

}  // namespace po
