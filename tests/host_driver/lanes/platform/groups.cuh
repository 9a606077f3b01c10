// Warps of 32 lanes on the host, each lane a thread: what only a GPU shows otherwise. A collective that some lanes pass by ends the
// program, as does one that lanes come to with different ones; and to ThreadSanitizer a lane's memory is ordered before another's
// only by the collectives and syncs that order it on a GPU.
//
// Stands before cuda/ on the include path. WGs have whole warps.
#pragma once

#define kWarpSize kOneLane
#define WorkGroup WorkGroupOfLanes
#define Lanes OneLane
#define Warp WarpOfOneLane
#define tree_sum tree_sum_of_one_lane
#include_next "platform/groups.cuh"
#undef kWarpSize
#undef WorkGroup
#undef Lanes
#undef Warp
#undef tree_sum

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "exits.h"

namespace po {

inline constexpr int kWarpSize = 32;

namespace lanes {

// Where so many lanes of a warp meet: each continues after what the others did before. They sleep on one word, since
// a mutex would be handed from one lane to the next.
class Meeting {
 public:
  // Of those who have not come to it, which ends with the last of them.
  uint32_t round() const { return round_.load(std::memory_order_relaxed); }

  // Returns when all have come, and fails where they do not.
  void arrive_and_wait(int count) {
    const uint32_t round = round_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == count) {
      arrived_.store(0, std::memory_order_relaxed);
      round_.store(round + 1, std::memory_order_release);
      futex(FUTEX_WAKE_PRIVATE, INT_MAX, nullptr);
      return;
    }
    const auto begin = std::chrono::steady_clock::now();
    while (round_.load(std::memory_order_acquire) == round) {
      constexpr timespec kPatience{20, 0};
      futex(FUTEX_WAIT_PRIVATE, static_cast<int>(round), &kPatience);
      if (std::chrono::steady_clock::now() - begin < std::chrono::seconds(kPatience.tv_sec)) continue;
      if (round_.load(std::memory_order_acquire) != round) break;
      std::fprintf(stderr, "a lane waits for others that do not come to its collective\n");
      std::_Exit(driver::kTimedOut);
    }
  }

 private:
  void futex(int operation, int value, const timespec* patience) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&round_), operation, value, patience, nullptr, 0);
  }

  std::atomic<int> arrived_{0};
  std::atomic<uint32_t> round_{0};
};

// What the lanes of a tile, or of a whole warp, show one another. They meet once for each collective. What they have
// shown stays until the meeting after the next one, which a lane reaches only after it has looked.
struct Board {
  struct Shown {
    uint8_t values[kWarpSize][16];
    int kinds[kWarpSize];
  };

  Shown& shown() { return turns[meeting.round() % 2]; }

  Meeting meeting;
  Shown turns[2];
};

struct WarpState {
  Board boards[6][kWarpSize];  // by the logarithm of the number of lanes, and by which of the warp's tiles they are
};

struct Self {
  WarpState* warp = nullptr;
  int lane = 0;
};
inline thread_local Self self;

// The state of a warp of a WG, which is known by its barrier. Each launch has one of its own: the WGs of two PEs may lie at one
// address in turn, and nothing orders the accesses of their lanes. Each lane asks once.
inline WarpState* state_of(const void* wg, int warp) {
  struct Entry {
    std::unique_ptr<WarpState> state;
    int asked = 0;
  };
  static std::mutex mutex;
  static std::map<std::pair<const void*, int>, Entry> entries;
  const std::lock_guard lock(mutex);
  Entry& entry = entries[{wg, warp}];
  if (entry.asked++ % kWarpSize == 0) entry.state = std::make_unique<WarpState>();
  return entry.state.get();
}

}  // namespace lanes

struct WorkGroup : WorkGroupOfLanes {
  WorkGroup(int rank, int size, int index, int count, pthread_barrier_t* barrier, uint8_t* arena,
            pthread_barrier_t* cluster_barrier, int64_t bytes_to_next)
      : WorkGroupOfLanes{rank, size, index, count, barrier, arena, cluster_barrier, bytes_to_next} {
    lanes::self = {lanes::state_of(barrier, rank / kWarpSize), rank % kWarpSize};
  }

  int warp_index() const { return rank() / kWarpSize; }
  int num_warps() const { return size() / kWarpSize; }
};

template <int kWidth>
struct Lanes {
  static constexpr int kSize = kWidth;
  static constexpr int kPerWarp = kWarpSize / kWidth;

  int rank() const { return lanes::self.lane % kWidth; }
  int size() const { return kWidth; }
  int index() const { return lanes::self.lane / kWidth; }
  void sync() const { meet(kSync); }

  template <class T>
  T shuffle(T value, int source) const {
    T values[kWidth];
    gather(kShuffle, value, values);
    return values[source % kWidth];
  }

  float add_across(float value, int distance) const {
    float values[kWidth];
    gather(kAddAcross, value, values);
    return value + values[rank() ^ distance];
  }

  // Bit l: `condition` of lane l.
  uint32_t ballot(bool condition) const {
    bool values[kWidth];
    gather(kBallot, condition, values);
    uint32_t bits = 0;
    for (int lane = 0; lane < kWidth; ++lane) bits |= static_cast<uint32_t>(values[lane]) << lane;
    return bits;
  }

  int count(bool condition) const { return __builtin_popcount(ballot(condition)); }

  uint64_t union_of(uint64_t bits) const {
    uint64_t values[kWidth];
    gather(kUnion, bits, values);
    uint64_t all = 0;
    for (const uint64_t value : values) all |= value;
    return all;
  }

  template <class T>
  T sum_through(T value) const {
    T values[kWidth];
    gather(kSum, value, values);
    T sum = 0;
    for (int lane = 0; lane <= rank(); ++lane) sum += values[lane];
    return sum;
  }

 private:
  enum Kind { kSync, kShuffle, kAddAcross, kBallot, kUnion, kSum };

  static constexpr int kLevel = __builtin_ctz(kWidth);

  lanes::Board& board() const { return lanes::self.warp->boards[kLevel][index()]; }

  // Returns when all lanes have come, each to the same collective.
  void meet(Kind kind) const { come(kind, board().shown()); }

  template <class T>
  void gather(Kind kind, T value, T (&values)[kWidth]) const {
    static_assert(sizeof(T) <= sizeof(lanes::Board::Shown::values[0]));
    lanes::Board::Shown& shown = board().shown();
    std::memcpy(shown.values[rank()], &value, sizeof(T));
    come(kind, shown);
    for (int lane = 0; lane < kWidth; ++lane) std::memcpy(&values[lane], shown.values[lane], sizeof(T));
  }

  void come(Kind kind, lanes::Board::Shown& shown) const {
    shown.kinds[rank()] = kind;
    board().meeting.arrive_and_wait(kWidth);
    for (int lane = 0; lane < kWidth; ++lane) {
      if (shown.kinds[lane] != kind) {
        std::fprintf(stderr, "lanes of a warp have come to different collectives\n");
        std::_Exit(driver::kTimedOut);
      }
    }
  }
};

using Warp = Lanes<32>;

template <int kCount>
PO_FN float tree_sum(const Warp& warp, float (&values)[kCount]) {
  static_assert(kCount == 1);
  for (int distance = 1; distance < 32; distance *= 2) values[0] = warp.add_across(values[0], distance);
  return values[0];
}

}  // namespace po
