// The one place that knows which backend compiles the kernels: nvcc for the GPU, the C++ compiler for the host.
//
// A kernel above this folder never names threadIdx, PTX or a communication library; it is written over groups
// (groups.cuh) and memory primitives (memory.cuh) that exist for both.
#pragma once

#include <stdint.h>

#if defined(__CUDACC__)
#define PO_ON_DEVICE 1
#define PO_FN __device__ __forceinline__
#define PO_NOINLINE __device__ __noinline__
#define PO_UNROLL _Pragma("unroll")
#define PO_NO_UNROLL _Pragma("unroll 1")
#else
#define PO_ON_DEVICE 0
#define PO_FN inline
#define PO_NOINLINE
#define PO_UNROLL
#define PO_NO_UNROLL
#endif

namespace po {

// Properties with which a kernel is compiled. A unit that needs others specializes them before it includes anything
// else (`KernelRequest` in runtime/backend.py).

// Whether the kernel records a timeline (trace.cuh).
template <class = void>
inline constexpr bool kTraces = false;
// Alignment of a WG's arena (groups.cuh), in bytes.
template <class = void>
inline constexpr int kArenaAlignment = 128;
// WGs of a cluster (cluster.cuh).
template <class = void>
inline constexpr int kClusterSize = 1;

template <class T>
PO_FN constexpr T min_of(T a, T b) {
  return a < b ? a : b;
}

template <class T>
PO_FN constexpr T max_of(T a, T b) {
  return a > b ? a : b;
}

template <class T>
PO_FN constexpr T ceil_div(T a, T b) {
  return (a + b - 1) / b;
}

}  // namespace po
