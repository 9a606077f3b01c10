// PO_ENTRY(name, Kernel): the launchable symbol of a kernel, on both backends. The unit that compiles a kernel has this
// line after the kernel's header, with the kernel's configuration as a template argument.
//
// Every launch takes a pointer to a plan and, by value, the kernel's `Call`: a struct of any size. A kernel defines
// `Plan`, `Call`, `Shared` (a WG's shared memory, which begins with its copy of the plan), `kThreads`, `kBlocksPerSm`
// and `run(wg, shared, call)`. A kernel with a `begin(wg, call)` starts there what needs no plan, while the plan is
// being loaded, and gets the result as the fourth argument of `run`. `kHostArenaBytes` is the size of `wg.arena()` on
// the host; on the GPU the launch gives it.
//
// On the GPU a `Call` stays in the constant bank, where the launch puts it, so its address can be taken. With
// PO_ENTRY_HOLDING_CALL each thread has a copy in registers: for a kernel so short that loading a word twice costs
// time.
//
// PO_ENTRY_TRACED and PO_ENTRY_HOLDING_CALL_TRACED are for kernels that record a timeline: their launches also take a
// TraceSink.
#pragma once

#include "platform/groups.cuh"
#include "platform/trace.cuh"

#if !PO_ON_DEVICE
#include "platform/host_threads.h"
#endif

namespace po {

template <class Kernel>
concept BeginsEarly = requires(const WorkGroup& wg, const typename Kernel::Call& call) { Kernel::begin(wg, call); };

// The plan is read during the whole launch, so each WG keeps a copy in shared memory.
template <class Kernel, class Trace = NoLaunchTrace>
PO_FN void run_kernel(const WorkGroup& wg, typename Kernel::Shared& shared, const typename Kernel::Plan* plan,
                      const typename Kernel::Call& call, const Trace& trace = {}) {
  constexpr int kPlanWords = sizeof(typename Kernel::Plan) / sizeof(uint64_t);
  static_assert(sizeof(typename Kernel::Plan) % sizeof(uint64_t) == 0, "the plan is copied in 64-bit words");
  const auto* source = reinterpret_cast<const uint64_t*>(plan);
  auto* target = reinterpret_cast<uint64_t*>(&shared.plan);
  if constexpr (BeginsEarly<Kernel>) {
    const uint64_t first = wg.rank() < kPlanWords ? source[wg.rank()] : 0;  // loaded while the kernel begins
    auto begun = Kernel::begin(wg, call);
    if (wg.rank() < kPlanWords) target[wg.rank()] = first;
    for (int i = wg.rank() + wg.size(); i < kPlanWords; i += wg.size()) target[i] = source[i];
    trace.place();
    wg.sync();
    Kernel::run(wg, shared, call, begun);
  } else {
    for (int i = wg.rank(); i < kPlanWords; i += wg.size()) target[i] = source[i];
    trace.place();
    wg.sync();
    Kernel::run(wg, shared, call);
  }
}

template <class Kernel>
PO_FN void run_traced(const WorkGroup& wg, typename Kernel::Shared& shared, const typename Kernel::Plan* plan,
                      const typename Kernel::Call& call, const TraceSink& sink) {
  const LaunchTrace trace(wg, sink);
  run_kernel<Kernel>(wg, shared, plan, call, trace);
  trace.end(shared.plan.team);
}

}  // namespace po

#if PO_ON_DEVICE

#define PO_ENTRY_TRACED_WITH(name, Kernel, attribute)                                                                 \
  extern "C" __global__ void __launch_bounds__(Kernel::kThreads, Kernel::kBlocksPerSm)                                \
      name(const Kernel::Plan* plan, const attribute Kernel::Call call, const __grid_constant__ po::TraceSink sink) { \
    __shared__ Kernel::Shared shared;                                                                                 \
    const po::WorkGroup wg;                                                                                           \
    po::run_traced<Kernel>(wg, shared, plan, call, sink);                                                             \
  }
#define PO_ENTRY_TRACED(name, ...)      \
  using po_kernel_##name = __VA_ARGS__; \
  PO_ENTRY_TRACED_WITH(name, po_kernel_##name, __grid_constant__)
#define PO_ENTRY_HOLDING_CALL_TRACED(name, ...) \
  using po_kernel_##name = __VA_ARGS__;         \
  PO_ENTRY_TRACED_WITH(name, po_kernel_##name, )

#define PO_ENTRY_WITH(name, Kernel, attribute)                                         \
  extern "C" __global__ void __launch_bounds__(Kernel::kThreads, Kernel::kBlocksPerSm) \
      name(const Kernel::Plan* plan, const attribute Kernel::Call call) {              \
    __shared__ Kernel::Shared shared;                                                  \
    const po::WorkGroup wg;                                                            \
    po::run_kernel<Kernel>(wg, shared, plan, call);                                    \
  }
#define PO_ENTRY(name, ...)             \
  using po_kernel_##name = __VA_ARGS__; \
  PO_ENTRY_WITH(name, po_kernel_##name, __grid_constant__)
#define PO_ENTRY_HOLDING_CALL(name, ...) \
  using po_kernel_##name = __VA_ARGS__;  \
  PO_ENTRY_WITH(name, po_kernel_##name, )

#else

namespace po {

template <class Kernel>
constexpr size_t host_arena_bytes() {
  if constexpr (requires { Kernel::kHostArenaBytes; }) return Kernel::kHostArenaBytes;
  return 0;
}

// Copies a Call from Python's memory, which is less aligned than a tensor map needs.
template <class Call>
Call call_at(const void* bytes) {
  Call call;
  __builtin_memcpy(&call, bytes, sizeof(Call));
  return call;
}

// Runs `num_wgs` WGs of `wg_size` threads to completion; the calling thread is one of them. `sink`: null without a
// timeline. Returns false, without a run, if the system has no room for the threads.
template <class Kernel>
[[nodiscard]] bool run_on_host(const typename Kernel::Plan* plan, const typename Kernel::Call& call, int num_wgs,
                               int wg_size, const TraceSink* sink = nullptr) {
  struct WgState {
    typename Kernel::Shared shared{};
    TraceState trace{};
    pthread_barrier_t barrier;
    pthread_barrier_t cluster_barrier;  // used by the first WG of a cluster
    alignas(kArenaAlignment<>) uint8_t arena[max_of(host_arena_bytes<Kernel>(), size_t{1})]{};
  };
  auto* states = new WgState[static_cast<size_t>(num_wgs)];
  for (int i = 0; i < num_wgs; ++i) {
    pthread_barrier_init(&states[i].barrier, nullptr, static_cast<unsigned>(wg_size));
    pthread_barrier_init(&states[i].cluster_barrier, nullptr, static_cast<unsigned>(kClusterSize<> * wg_size));
  }
  const bool has_run = run_threads(num_wgs * wg_size, [&](int thread) {
    const int wg_index = thread / wg_size, rank = thread % wg_size;
    WgState& state = states[wg_index];
    pthread_barrier_t* cluster_barrier = &states[wg_index - wg_index % kClusterSize<>].cluster_barrier;
    const WorkGroup wg{rank, wg_size, wg_index, num_wgs, &state.barrier, state.arena, cluster_barrier, sizeof(WgState)};
    if constexpr (kTraces<>) {
      trace_thread = {&state.trace, static_cast<uint32_t>(rank)};
      run_traced<Kernel>(wg, state.shared, plan, call, *sink);
    } else {
      run_kernel<Kernel>(wg, state.shared, plan, call);
    }
  });
  for (int i = 0; i < num_wgs; ++i) {
    pthread_barrier_destroy(&states[i].barrier);
    pthread_barrier_destroy(&states[i].cluster_barrier);
  }
  delete[] states;
  return has_run;
}

}  // namespace po

#define PO_ENTRY(name, ...)                                                                                         \
  using po_kernel_##name = __VA_ARGS__;                                                                             \
  extern "C" __attribute__((visibility("default"))) bool name(const po_kernel_##name::Plan* plan, const void* call, \
                                                              int num_wgs, int wg_size) {                           \
    return po::run_on_host<po_kernel_##name>(plan, po::call_at<po_kernel_##name::Call>(call), num_wgs, wg_size);    \
  }
#define PO_ENTRY_HOLDING_CALL PO_ENTRY

#define PO_ENTRY_TRACED(name, ...)                                                                                     \
  using po_kernel_##name = __VA_ARGS__;                                                                                \
  extern "C" __attribute__((visibility("default"))) bool name(const po_kernel_##name::Plan* plan, const void* call,    \
                                                              int num_wgs, int wg_size, const po::TraceSink* sink) {   \
    return po::run_on_host<po_kernel_##name>(plan, po::call_at<po_kernel_##name::Call>(call), num_wgs, wg_size, sink); \
  }
#define PO_ENTRY_HOLDING_CALL_TRACED PO_ENTRY_TRACED

#endif
