// What a WG does and when, for a timeline: spans of time, kept in a block of memory for each WG of each launch.
//
// A kernel that traces is compiled from a unit of its own, which says so before it includes anything (kTraces) and ends in
// PO_ENTRY_TRACED. In all others what stands here is empty and leaves no instruction behind.
//
// Nobody waits for room: what finds none is counted and dropped. Times are ticks of the multiprocessor's clock on the GPU, of
// which a block says where they stand in nanoseconds, and nanoseconds on the host.
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
  uint64_t index;  // of a wait, as in a report; of a signal, where in the heap
  uint32_t kind;
  uint32_t phase;  // of a wait; 0: for another WG of this PE
  uint32_t peer;
  uint32_t warp;
};
PO_DESCRIBE(TraceSpan, begin, end, index, kind, phase, peer, warp)

// [0] is for this PE, [1] for others.
struct TraceTasks {
  uint64_t count[2];
  uint64_t first_begin[2];
  uint64_t last_end[2];
  uint64_t total[2];  // ticks, of all warps, without those that they waited in between
};
PO_DESCRIBE(TraceTasks, count, first_begin, last_end, total)

// What a WG leaves of a launch.
struct TraceBlock {
  int64_t operator_id;  // the contract's first word; 0: the WG has not ended
  int64_t team;         // the contract's second word
  uint64_t epoch;
  uint64_t wg;
  uint64_t num_wgs;
  uint64_t num_warps;
  uint64_t begin;  // these two in ticks
  uint64_t end;
  uint64_t last;       // when the head was written
  uint64_t begin_ns;   // at `begin`
  uint64_t last_ns;    // at `last`
  uint64_t waited;     // ticks, of all warps
  uint64_t num_spans;  // that were met; those above kTraceSpans are lost
  TraceTasks tasks;
  TraceSpan spans[kTraceSpans];
};
PO_DESCRIBE(TraceBlock, operator_id, team, epoch, wg, num_wgs, num_warps, begin, end, last, begin_ns, last_ns, waited,
            num_spans, tasks, spans)

// Where they leave it: an argument of the launch.
struct TraceSink {
  TraceBlock* blocks;
  uint64_t num_blocks;
  uint64_t* used;  // counts on where there is no room
};
PO_DESCRIBE(TraceSink, blocks, num_blocks, used)

inline constexpr int kMostWarps = PO_ON_DEVICE ? 32 : 64;  // of a WG

// Ticks that a warp has not waited, of which differences count: two seconds of work on a GPU, where this memory is scarce.
#if PO_ON_DEVICE
using TraceMark = uint32_t;
#else
using TraceMark = uint64_t;
#endif

// A WG's own memory while it runs.
struct TraceState {
  TraceBlock* block;  // null: no room
  uint64_t begin;
  uint64_t begin_ns;
  uint64_t end;
  uint64_t num_spans;
  uint64_t warps_done;
  TraceTasks tasks;
  uint64_t waited[kMostWarps];  // ticks; of a warp whose lanes wait for several peers at once, of each
  TraceMark task_begin[kMostWarps];
};

// ---- of one WG ------------------------------------------------------------------------------------------------------

#if PO_ON_DEVICE

PO_FN TraceState& trace_state() {
  __shared__ TraceState state;
  return state;
}

PO_FN uint64_t trace_ticks() { return static_cast<uint64_t>(clock64()); }

// One of the threads of a warp that are here with the same key.
PO_FN bool leads_here(uint64_t key) {
  const unsigned same = __match_any_sync(__activemask(), static_cast<unsigned long long>(key));
  return __ffs(static_cast<int>(same)) - 1 == static_cast<int>(threadIdx.x % kWarpSize);
}
PO_FN bool leads_warp() { return threadIdx.x % kWarpSize == 0; }

// Between what the warps of a WG have counted and who looks at it.
PO_FN void trace_fence() { __threadfence_block(); }

PO_FN uint32_t trace_warp() { return threadIdx.x / kWarpSize; }

PO_FN uint64_t trace_add(uint64_t* word, uint64_t value) {
  return atomicAdd(reinterpret_cast<unsigned long long*>(word), static_cast<unsigned long long>(value));
}
PO_FN void trace_min(uint64_t* word, uint64_t value) {
  atomicMin(reinterpret_cast<unsigned long long*>(word), static_cast<unsigned long long>(value));
}
PO_FN void trace_max(uint64_t* word, uint64_t value) {
  atomicMax(reinterpret_cast<unsigned long long*>(word), static_cast<unsigned long long>(value));
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
inline void trace_fence() {}  // counts are released and acquired here
inline uint32_t trace_warp() { return trace_thread.warp; }
inline uint64_t trace_add(uint64_t* word, uint64_t value) { return __atomic_fetch_add(word, value, __ATOMIC_ACQ_REL); }
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
  const uint64_t number = trace_add(&state.num_spans, 1);
  if (number >= kTraceSpans) return;
  state.block->spans[number] = {begin, end, index, kind, phase, static_cast<uint32_t>(peer), trace_warp()};
}

// Out of line what follows: a kernel's registers are few, and a wait is over when it comes to this.

// Of lanes that waited for the same, one counts. `end` 0: now.
PO_NOINLINE inline void trace_wait(uint32_t phase, int peer, uint64_t index, uint64_t begin, uint64_t end) {
  if (!leads_here(static_cast<uint64_t>(peer) << 48 | index)) return;
  if (end == 0) end = trace_ticks();
  trace_add(&trace_state().waited[trace_warp()], end - begin);
  trace_span(kTraceWait, phase, peer, index, begin, end);
}

PO_NOINLINE inline void trace_signal(int peer, uint64_t offset) {
  const uint64_t now = trace_ticks();
  if (leads_here(static_cast<uint64_t>(peer) << 48 | offset)) trace_span(kTraceSend, 0, peer, offset, now, now);
}

PO_NOINLINE inline void trace_task_begin(bool is_for_others) {
  TraceState& state = trace_state();
  const uint64_t now = trace_ticks();
  trace_min(&state.tasks.first_begin[is_for_others], now);
  state.task_begin[trace_warp()] = static_cast<TraceMark>(now - state.waited[trace_warp()]);
}

PO_NOINLINE inline void trace_task_end(bool is_for_others) {
  TraceState& state = trace_state();
  const uint64_t now = trace_ticks();
  trace_add(&state.tasks.count[is_for_others], 1);
  trace_max(&state.tasks.last_end[is_for_others], now);
  const auto worked = static_cast<TraceMark>(now - state.waited[trace_warp()]) - state.task_begin[trace_warp()];
  const bool is_negative = worked > static_cast<TraceMark>(-1) / 2;  // lanes waited for several peers side by side
  trace_add(&state.tasks.total[is_for_others], is_negative ? 0 : worked);
}

template <bool kDoes>
struct Traces {
  static PO_FN void send(int, uint64_t) {}

  struct Wait {
    PO_FN Wait(uint32_t, uint64_t) {}
    PO_FN void looked_in_vain(int) {}
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
    PO_FN Wait(uint32_t phase, uint64_t index) : phase_(phase), index_(index) {}
    PO_FN ~Wait() {
      if (begin_ != 0) trace_wait(phase_, peer_, index_, begin_, end_);
    }

    PO_FN void looked_in_vain(int peer) {
      if (begin_ == 0) begin_ = trace_ticks();
      peer_ = peer;
    }

    PO_FN bool came() {
      end_ = trace_ticks();
      return true;
    }

   private:
    uint64_t begin_ = 0;
    uint64_t end_ = 0;
    int peer_ = 0;
    const uint32_t phase_;
    const uint64_t index_;
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

// A wait, from its first look in vain until what was missing came, or else to the end of this object's life, for the peer that
// was missing in the last look. The lane that sees it says so: its warp meets again when the last of its lanes does.
using WaitTrace = Traces<kTraces<>>::Wait;

// A warp's work on a piece of the result, as long as this object lives.
using TaskTrace = Traces<kTraces<>>::Task;

// ---- the launch -----------------------------------------------------------------------------------------------------

// One thread, before a sync of the WG.
PO_FN void trace_begin(const TraceSink& sink) {
  const uint64_t number = atomic_fetch_add_relaxed_gpu(sink.used, 1);
  TraceState& state = trace_state();
  state.begin_ns = clock_ns();
  state.begin = trace_ticks();
  state.end = state.num_spans = state.warps_done = 0;
  for (int i = 0; i < 2; ++i) {
    state.tasks.count[i] = state.tasks.last_end[i] = state.tasks.total[i] = 0;
    state.tasks.first_begin[i] = ~0ull;
  }
  for (uint64_t& waited : state.waited) waited = 0;
  state.block = number < sink.num_blocks ? sink.blocks + number : nullptr;
}

// A thread of each warp, when that has ended.
template <class Team>
PO_FN void trace_end(const WorkGroup& wg, const Team& team) {
  TraceState& state = trace_state();
  trace_max(&state.end, trace_ticks());
  trace_fence();
  if (trace_add(&state.warps_done, 1) + 1 != static_cast<uint64_t>(wg.num_warps()) || state.block == nullptr) return;
  trace_fence();
  TraceBlock& block = *state.block;
  block.team = team.contract[1];
  block.epoch = team.epoch;
  block.wg = static_cast<uint64_t>(wg.index());
  block.num_wgs = static_cast<uint64_t>(wg.count());
  block.num_warps = static_cast<uint64_t>(wg.num_warps());
  block.begin = state.begin;
  block.begin_ns = state.begin_ns;
  block.end = state.end;
  block.last = trace_ticks();
  block.last_ns = clock_ns();
  block.waited = 0;
  for (const uint64_t waited : state.waited) block.waited += waited;
  block.num_spans = state.num_spans;
  block.tasks = state.tasks;
  block.operator_id = team.contract[0];
}

}  // namespace po
