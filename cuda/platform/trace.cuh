// Records what a WG does and when, for a timeline: spans of time, in a block of memory for each WG of each launch.
//
// A kernel that traces is compiled from a unit of its own, which specializes kTraces before it includes anything and
// ends in PO_ENTRY_TRACED. In all other units this file is empty and adds no instruction.
//
// No WG waits for room: spans without room are counted and dropped. Times are ticks of the multiprocessor's clock on
// the GPU, and nanoseconds on the host. A block has the time in nanoseconds at its begin and end, to convert its ticks.
#pragma once

#include "platform/describe.cuh"
#include "platform/groups.cuh"
#include "platform/memory.cuh"

namespace po {

enum TraceKind : uint32_t { kTraceWait = 1, kTraceSend = 2 };
PO_CONSTANT(kTraceWait)
PO_CONSTANT(kTraceSend)

inline constexpr int kTraceSpans = 48;  // of a WG in a launch
PO_CONSTANT(kTraceSpans)

struct TraceSpan {
  uint64_t begin;
  uint64_t end;
  uint64_t index;  // of a wait, as in an error report; of a signal, the place in the heap
  uint32_t kind;
  uint32_t phase;  // of a wait; 0: a wait for another WG of this PE
  uint32_t peer;
  uint32_t warp;
};
PO_DESCRIBE(TraceSpan, begin, end, index, kind, phase, peer, warp)

// What a WG counts from its begin on. [0] is for this PE, [1] for others.
struct TraceTotals {
  uint64_t wg;
  uint64_t num_wgs;
  uint64_t num_warps;
  uint64_t unit;      // of `first_begin` and `last_end`, in ticks; these count from `begin`
  uint64_t begin;     // ticks
  uint64_t begin_ns;  // the same time
  uint64_t first_begin[2];
  uint64_t last_end[2];
  uint64_t tasks[2];
  uint64_t worked[2];  // ticks, of all warps, without their waits in between
  uint64_t waited;     // ticks, of all warps
  uint64_t num_spans;  // all spans; those above kTraceSpans are lost
};
PO_DESCRIBE(TraceTotals, wg, num_wgs, num_warps, unit, begin, begin_ns, first_begin, last_end, tasks, worked, waited,
            num_spans)

// A WG's record of a launch.
struct TraceBlock {
  int64_t operator_id;  // the contract's first word; 0: the WG has not ended
  int64_t team;         // the contract's second word
  uint64_t epoch;
  uint64_t end;     // ticks
  uint64_t end_ns;  // the same time
  TraceTotals totals;
  TraceSpan spans[kTraceSpans];
};
PO_DESCRIBE(TraceBlock, operator_id, team, epoch, end, end_ns, totals, spans)

// The memory for blocks: an argument of the launch.
struct TraceSink {
  TraceBlock* blocks;
  uint64_t num_blocks;
  uint64_t* used;  // keeps counting when there is no room
};
PO_DESCRIBE(TraceSink, blocks, num_blocks, used)

// In shared memory, which is scarce, a GPU adds to and compares only words of 32 bits without a loop. There a TraceMark
// is the lower half of a word of TraceTotals, with times in units of 16 ticks, which lasts half a minute. Or it is a
// number of ticks of which differences count, up to one second of work.
#if PO_ON_DEVICE
using TraceMark = uint32_t;
inline constexpr int kUnitShift = 4;
#else
using TraceMark = uint64_t;
inline constexpr int kUnitShift = 0;
#endif
inline constexpr auto kMostMark = static_cast<TraceMark>(-1);

// Of a WG, in shared memory while it runs.
struct TraceState {
  TraceBlock* block;  // null: no room
  TraceTotals totals;
  TraceMark waited[kMaxWarps];      // ticks; if a warp's lanes wait for several peers at once, of each peer
  TraceMark task_begin[kMaxWarps];  // ticks in which the warp had not waited
};

// ---- of one WG ------------------------------------------------------------------------------------------------------

// The lower half of a word on a GPU, the whole word on the host.
PO_FN TraceMark* low_half(uint64_t* word) { return reinterpret_cast<TraceMark*>(word); }

#if PO_ON_DEVICE

PO_FN TraceState& trace_state() {
  __shared__ TraceState state;
  return state;
}

PO_FN uint64_t trace_ticks() { return static_cast<uint64_t>(clock64()); }

// Whether this thread is the one chosen among the warp's threads that are here with the same key.
PO_FN bool leads_here(uint64_t key) {
  const unsigned same = __match_any_sync(__activemask(), static_cast<unsigned long long>(key));
  return __ffs(static_cast<int>(same)) - 1 == static_cast<int>(threadIdx.x % kWarpSize);
}
PO_FN bool leads_warp() { return threadIdx.x % kWarpSize == 0; }

PO_FN uint32_t trace_warp() { return threadIdx.x / kWarpSize; }

PO_FN uint32_t trace_add(uint32_t* word, uint32_t value) { return atomicAdd(word, value); }
PO_FN void trace_min(uint32_t* word, uint32_t value) { atomicMin(word, value); }
PO_FN void trace_max(uint32_t* word, uint32_t value) { atomicMax(word, value); }

// Adds to a whole word: the carry of the lower half goes to the upper half.
PO_FN void trace_add(uint64_t* word, uint64_t value) {
  const auto low = static_cast<uint32_t>(value);
  const uint32_t carry = trace_add(low_half(word), low) > ~low ? 1 : 0;
  const uint32_t high = static_cast<uint32_t>(value >> 32) + carry;
  if (high != 0) atomicAdd(low_half(word) + 1, high);
}

#else

struct TraceThread {
  TraceState* state = nullptr;
  uint32_t warp = 0;
};
inline thread_local TraceThread trace_thread;

inline TraceState& trace_state() { return *trace_thread.state; }
inline uint64_t trace_ticks() { return clock_ns(); }
inline bool leads_here(uint64_t) { return true; }
inline bool leads_warp() { return true; }
inline uint32_t trace_warp() { return trace_thread.warp; }
inline uint64_t trace_add(uint64_t* word, uint64_t value) { return __atomic_fetch_add(word, value, __ATOMIC_RELAXED); }
inline void trace_min(uint64_t* word, uint64_t value) {
  uint64_t old = __atomic_load_n(word, __ATOMIC_RELAXED);
  while (value < old && !__atomic_compare_exchange_n(word, &old, value, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
}
inline void trace_max(uint64_t* word, uint64_t value) {
  uint64_t old = __atomic_load_n(word, __ATOMIC_RELAXED);
  while (value > old && !__atomic_compare_exchange_n(word, &old, value, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
}

#endif

// ---- what kernels say -----------------------------------------------------------------------------------------------

PO_FN void trace_span(TraceKind kind, uint32_t phase, int peer, uint64_t index, uint64_t begin, uint64_t end) {
  TraceState& state = trace_state();
  if (state.block == nullptr) return;
  const TraceMark number = trace_add(low_half(&state.totals.num_spans), 1);
  if (number >= kTraceSpans) return;
  state.block->spans[number] = {begin, end, index, kind, phase, static_cast<uint32_t>(peer), trace_warp()};
}

// Waits and signals are out of line: a kernel has few registers, and a wait that comes to this is over. Tasks are
// inline: in a short launch, fetching a function's instructions takes longer than running them.

// Counts one of the lanes that waited for the same peer. `end` 0: now.
PO_NOINLINE inline void trace_wait(uint32_t phase, int peer, uint64_t index, uint64_t begin, uint64_t end) {
  if (!leads_here(static_cast<uint64_t>(peer) << 48 | index)) return;
  if (end == 0) end = trace_ticks();
  TraceState& state = trace_state();
  trace_add(&state.waited[trace_warp()], static_cast<TraceMark>(end - begin));
  trace_add(&state.totals.waited, end - begin);
  trace_span(kTraceWait, phase, peer, index, begin, end);
}

PO_NOINLINE inline void trace_signal(int peer, uint64_t offset) {
  const uint64_t now = trace_ticks();
  if (leads_here(static_cast<uint64_t>(peer) << 48 | offset)) trace_span(kTraceSend, 0, peer, offset, now, now);
}

PO_FN TraceMark trace_units(const TraceState& state, uint64_t now) {
  return static_cast<TraceMark>(min_of((now - state.totals.begin) >> kUnitShift, uint64_t{kMostMark}));
}

PO_FN void trace_task_begin(bool is_for_others) {
  TraceState& state = trace_state();
  const uint64_t now = trace_ticks();
  state.task_begin[trace_warp()] = static_cast<TraceMark>(now) - state.waited[trace_warp()];
  trace_min(low_half(&state.totals.first_begin[is_for_others]), trace_units(state, now));
}

PO_FN void trace_task_end(bool is_for_others) {
  TraceState& state = trace_state();
  const uint64_t now = trace_ticks();
  const TraceMark ticks = static_cast<TraceMark>(now) - state.waited[trace_warp()] - state.task_begin[trace_warp()];
  const bool is_negative = ticks > kMostMark / 2;  // lanes waited for several peers side by side
  trace_add(&state.totals.worked[is_for_others], uint64_t{is_negative ? 0 : ticks});
  trace_max(low_half(&state.totals.last_end[is_for_others]), trace_units(state, now));
  trace_add(low_half(&state.totals.tasks[is_for_others]), 1);
}

template <bool kDoes>
struct Traces {
  static PO_FN void send(int, uint64_t) {}

  struct Wait {
    PO_FN explicit Wait(uint32_t) {}
    PO_FN void looked_in_vain(int, uint64_t) {}
    PO_FN bool came() { return true; }
  };

  struct Task {
    PO_FN explicit Task(bool) {}
  };
};

template <>
struct Traces<true> {
  static PO_FN void send(int peer, uint64_t offset) { trace_signal(peer, offset); }

  class Wait {
   public:
    PO_FN explicit Wait(uint32_t phase) : phase_(phase) {}
    PO_FN ~Wait() {
      if (begin_ != 0) trace_wait(phase_, peer_, index_, begin_, end_);
    }

    // Called after a look that found a flag missing; the last call counts.
    PO_FN void looked_in_vain(int peer, uint64_t index) {
      if (begin_ == 0) begin_ = trace_ticks();
      peer_ = peer;
      index_ = index;
    }

    PO_FN bool came() {
      end_ = trace_ticks();
      return true;
    }

   private:
    uint64_t begin_ = 0;
    uint64_t end_ = 0;
    int peer_ = 0;
    uint64_t index_ = 0;
    const uint32_t phase_;
  };

  class Task {
   public:
    PO_FN explicit Task(bool is_for_others) : is_for_others_(is_for_others) {
      if (leads_warp()) trace_task_begin(is_for_others);
    }
    PO_FN ~Task() {
      if (leads_warp()) trace_task_end(is_for_others_);
    }

   private:
    const bool is_for_others_;
  };
};

PO_FN void trace_send(int peer, uint64_t offset) { Traces<kTraces<>>::send(peer, offset); }

// A wait, from its first failed look until the missing flag came, or until the end of this object's life. It counts for
// the peer that was missing in the last look. The lane that sees the flag records it: its warp meets again when its
// last lane does.
using WaitTrace = Traces<kTraces<>>::Wait;

// A warp's work on a piece of the result, during this object's life.
using TaskTrace = Traces<kTraces<>>::Task;

// ---- the launch -----------------------------------------------------------------------------------------------------

// From a WG's first instruction to its last one; all its threads have such an object.
class LaunchTrace {
 public:
  // Starts loading where the timeline goes; `place` makes it known.
  PO_FN LaunchTrace(const WorkGroup& wg, const TraceSink& sink) : wg_(wg), sink_(sink) {
    TraceState& state = trace_state();
    uint64_t* counts = words_of(state.totals) + kFirstCount;
    constexpr int kCounts = kTotals - kFirstCount;
    for (int i = wg.rank(); i < kCounts; i += wg.size()) counts[i] = i < kFirstBegins ? kMostMark : 0;
    for (int i = wg.rank(); i < kMaxWarps; i += wg.size()) state.waited[i] = 0;
    if (wg.rank() != 0) return;
    number_ = atomic_fetch_add_relaxed_gpu(sink.used, 1);
    state.totals.wg = static_cast<uint64_t>(wg.index());
    state.totals.num_wgs = static_cast<uint64_t>(wg.count());
    state.totals.num_warps = static_cast<uint64_t>(wg.num_warps());
    state.totals.unit = 1u << kUnitShift;
    state.totals.begin_ns = clock_ns();
    state.totals.begin = trace_ticks();
  }

  // Called before a sync of the WG.
  PO_FN void place() const {
    if (wg_.rank() == 0) trace_state().block = number_ < sink_.num_blocks ? sink_.blocks + number_ : nullptr;
  }

  template <class Team>
  PO_FN void end(const Team& team) const {
    wg_.sync();  // all warps have counted
    TraceState& state = trace_state();
    if (state.block == nullptr) return;
    TraceBlock& block = *state.block;
    if (wg_.rank() == 0) {
      block.end = trace_ticks();
      block.end_ns = clock_ns();
      block.epoch = team.epoch;
      block.team = team.contract[1];
      block.operator_id = team.contract[0];
    }
    for (int i = wg_.rank(); i < kTotals; i += wg_.size()) words_of(block.totals)[i] = words_of(state.totals)[i];
  }

 private:
  static constexpr int kTotals = sizeof(TraceTotals) / sizeof(uint64_t);
  static constexpr int kFirstCount = offsetof(TraceTotals, first_begin) / sizeof(uint64_t);
  static constexpr int kFirstBegins = sizeof(TraceTotals::first_begin) / sizeof(uint64_t);

  static PO_FN uint64_t* words_of(TraceTotals& totals) { return reinterpret_cast<uint64_t*>(&totals); }

  const WorkGroup& wg_;
  const TraceSink& sink_;
  uint64_t number_ = 0;
};

// For a launch without a timeline.
struct NoLaunchTrace {
  PO_FN void place() const {}
};

}  // namespace po
