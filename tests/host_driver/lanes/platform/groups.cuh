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

#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "exits.h"

namespace po {

inline constexpr int kWarpSize = 32;

namespace lanes {

// Where so many lanes of a warp meet.
class Meeting {
 public:
  // Returns when all have come, and fails where they do not.
  void arrive_and_wait(int count) {
    std::unique_lock lock(mutex_);
    const uint32_t round = round_;
    if (++arrived_ == count) {
      arrived_ = 0;
      ++round_;
      all_here_.notify_all();
    } else if (!all_here_.wait_for(lock, kPatience, [&] { return round_ != round; })) {
      std::fprintf(stderr, "a lane waits for others that do not come to its collective\n");
      std::_Exit(driver::kTimedOut);
    }
  }

 private:
  static constexpr std::chrono::seconds kPatience{20};

  std::mutex mutex_;
  std::condition_variable all_here_;
  int arrived_ = 0;
  uint32_t round_ = 0;
};

// What the lanes of a tile, or of a whole warp, show one another.
struct Board {
  Meeting meeting;
  uint8_t values[kWarpSize][16];
  int kinds[kWarpSize];
};

struct WarpState {
  Board boards[6][kWarpSize];  // by the logarithm of the number of lanes, and by which of the warp's tiles they are
};

struct Self {
  WarpState* warp = nullptr;
  int lane = 0;
};
inline thread_local Self self;

// The state of a warp of a WG, which is known by its barrier.
inline WarpState* state_of(const void* wg, int warp) {
  static std::mutex mutex;
  static std::map<std::pair<const void*, int>, std::unique_ptr<WarpState>> states;
  const std::lock_guard lock(mutex);
  auto& state = states[{wg, warp}];
  if (!state) state = std::make_unique<WarpState>();
  return state.get();
}

}  // namespace lanes

struct WorkGroup : WorkGroupOfLanes {
  WorkGroup(int rank, int size, int index, int count, pthread_barrier_t* barrier, uint8_t* arena)
      : WorkGroupOfLanes{rank, size, index, count, barrier, arena} {
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

  uint64_t sum_through(uint64_t value) const {
    uint64_t values[kWidth];
    gather(kSum, value, values);
    uint64_t sum = 0;
    for (int lane = 0; lane <= rank(); ++lane) sum += values[lane];
    return sum;
  }

 private:
  enum Kind { kSync, kShuffle, kAddAcross, kBallot, kUnion, kSum };

  static constexpr int kLevel = __builtin_ctz(kWidth);

  lanes::Board& board() const { return lanes::self.warp->boards[kLevel][index()]; }

  // Returns when all lanes have come, each to the same collective.
  void meet(Kind kind) const {
    lanes::Board& own = board();
    own.kinds[rank()] = kind;
    own.meeting.arrive_and_wait(kWidth);
    for (int lane = 0; lane < kWidth; ++lane) {
      if (own.kinds[lane] != kind) {
        std::fprintf(stderr, "lanes of a warp have come to different collectives\n");
        std::_Exit(driver::kTimedOut);
      }
    }
    own.meeting.arrive_and_wait(kWidth);  // all have looked
  }

  template <class T>
  void gather(Kind kind, T value, T (&values)[kWidth]) const {
    static_assert(sizeof(T) <= sizeof(lanes::Board::values[0]));
    lanes::Board& own = board();
    std::memcpy(own.values[rank()], &value, sizeof(T));
    own.kinds[rank()] = kind;
    own.meeting.arrive_and_wait(kWidth);
    for (int lane = 0; lane < kWidth; ++lane) {
      std::memcpy(&values[lane], own.values[lane], sizeof(T));
      if (own.kinds[lane] != kind) {
        std::fprintf(stderr, "lanes of a warp have come to different collectives\n");
        std::_Exit(driver::kTimedOut);
      }
    }
    own.meeting.arrive_and_wait(kWidth);  // all have looked
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
