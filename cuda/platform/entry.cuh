// PO_ENTRY(name, Kernel): the launchable symbol of a kernel, on both backends.
//
// Every launch takes one plan pointer and kCallWords 64-bit words, which become the kernel's `Call`. A kernel gives
// `Plan`, `Call`, `Shared` (a WG's own memory, which begins with its copy of the plan), `kThreads`, `kBlocksPerSm` and
// `run(wg, shared, call)`. One with a `begin(wg, call)` starts there what needs no plan, while the plan is still on its
// way, and gets the result as a fourth argument of `run`. `kHostArenaBytes` is what `wg.arena()` has on the host; on the
// GPU the launch says.
#pragma once

#include "platform/groups.cuh"

#if !PO_ON_DEVICE
#include <memory>
#include <new>
#include <thread>
#include <vector>
#endif

namespace po {

inline constexpr int kCallWords = 5;

template <class Call>
PO_FN Call make_call(const uint64_t (&words)[kCallWords]) {
  static_assert(sizeof(Call) <= sizeof(words), "a Call has at most kCallWords fields of 8 bytes");
  Call call;
  __builtin_memcpy(&call, words, sizeof(Call));
  return call;
}

template <class Kernel>
concept BeginsEarly = requires(const WorkGroup& wg, const typename Kernel::Call& call) { Kernel::begin(wg, call); };

// The plan is read all through the launch, so each WG keeps a copy in its own memory.
template <class Kernel>
PO_FN void run_kernel(const WorkGroup& wg, typename Kernel::Shared& shared, const typename Kernel::Plan* plan,
                      const uint64_t (&words)[kCallWords]) {
  constexpr int kPlanWords = sizeof(typename Kernel::Plan) / sizeof(uint64_t);
  static_assert(sizeof(typename Kernel::Plan) % sizeof(uint64_t) == 0, "the plan is copied in 64-bit words");
  const auto* source = reinterpret_cast<const uint64_t*>(plan);
  auto* target = reinterpret_cast<uint64_t*>(&shared.plan);
  const auto call = make_call<typename Kernel::Call>(words);
  if constexpr (BeginsEarly<Kernel>) {
    const uint64_t first = wg.rank() < kPlanWords ? source[wg.rank()] : 0;  // on its way while the kernel begins
    auto begun = Kernel::begin(wg, call);
    if (wg.rank() < kPlanWords) target[wg.rank()] = first;
    for (int i = wg.rank() + wg.size(); i < kPlanWords; i += wg.size()) target[i] = source[i];
    wg.sync();
    Kernel::run(wg, shared, call, begun);
  } else {
    for (int i = wg.rank(); i < kPlanWords; i += wg.size()) target[i] = source[i];
    wg.sync();
    Kernel::run(wg, shared, call);
  }
}

}  // namespace po

#ifdef PO_PLAN_BYTES
#define PO_CHECK_PLAN(Kernel) \
  static_assert(sizeof(Kernel::Plan) == PO_PLAN_BYTES, "the Python mirror of Plan differs from the kernel's");
#else
#define PO_CHECK_PLAN(Kernel)
#endif

#if PO_ON_DEVICE

#define PO_ENTRY(name, Kernel)                                                                          \
  PO_CHECK_PLAN(Kernel)                                                                                 \
  extern "C" __global__ void __launch_bounds__(Kernel::kThreads, Kernel::kBlocksPerSm)                  \
      name(const Kernel::Plan* plan, uint64_t w0, uint64_t w1, uint64_t w2, uint64_t w3, uint64_t w4) { \
    __shared__ Kernel::Shared shared;                                                                   \
    const po::WorkGroup wg;                                                                             \
    const uint64_t words[po::kCallWords] = {w0, w1, w2, w3, w4};                                        \
    po::run_kernel<Kernel>(wg, shared, plan, words);                                                    \
  }

#else

namespace po {

template <class Kernel>
constexpr size_t host_arena_bytes() {
  if constexpr (requires { Kernel::kHostArenaBytes; }) return Kernel::kHostArenaBytes;
  return 0;
}

// Runs `num_wgs` WGs of `wg_size` threads to completion; the calling thread is one of them.
template <class Kernel>
void run_on_host(const typename Kernel::Plan* plan, const uint64_t (&words)[kCallWords], int num_wgs, int wg_size) {
  struct alignas(128) Line {
    uint8_t bytes[128];
  };
  struct WgState {
    typename Kernel::Shared shared{};
    pthread_barrier_t barrier;
    std::vector<Line> arena{host_arena_bytes<Kernel>() / sizeof(Line)};
  };
  std::vector<std::unique_ptr<WgState>> states;
  for (int i = 0; i < num_wgs; ++i) {
    states.push_back(std::make_unique<WgState>());
    pthread_barrier_init(&states.back()->barrier, nullptr, static_cast<unsigned>(wg_size));
  }
  auto body = [&](int wg_index, int rank) {
    WgState& state = *states[static_cast<size_t>(wg_index)];
    const WorkGroup wg{rank,    wg_size,        wg_index,
                       num_wgs, &state.barrier, reinterpret_cast<uint8_t*>(state.arena.data())};
    run_kernel<Kernel>(wg, state.shared, plan, words);
  };
  std::vector<std::thread> threads;
  for (int i = 1; i < num_wgs * wg_size; ++i) threads.emplace_back(body, i / wg_size, i % wg_size);
  body(0, 0);
  for (std::thread& thread : threads) thread.join();
  for (auto& state : states) pthread_barrier_destroy(&state->barrier);
}

}  // namespace po

#define PO_ENTRY(name, Kernel)                                                                                         \
  PO_CHECK_PLAN(Kernel)                                                                                                \
  extern "C" __attribute__((visibility("default"))) void name(const void* plan, uint64_t w0, uint64_t w1, uint64_t w2, \
                                                              uint64_t w3, uint64_t w4, int num_wgs, int wg_size) {    \
    const uint64_t words[po::kCallWords] = {w0, w1, w2, w3, w4};                                                       \
    po::run_on_host<Kernel>(static_cast<const Kernel::Plan*>(plan), words, num_wgs, wg_size);                          \
  }

#endif
