// Loads, stores, flags and atomics. Order and scope stand in each primitive's name: `_sys` reaches other PEs and the
// host, `_gpu` only this PE. Flags are aligned 64-bit words.
#pragma once

#include "platform/describe.cuh"

#if !PO_ON_DEVICE
#include <sched.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#endif

namespace po {

template <int kBytes>
struct alignas(kBytes) Vector {
  uint32_t words[kBytes / 4];
};

template <>
struct alignas(2) Vector<2> {
  uint16_t half;
};

// ---- data ---------------------------------------------------------------------------------------------------------

// Reads data that is not written during the launch.
template <int kBytes>
PO_FN Vector<kBytes> load_vector(const void* source) {
  Vector<kBytes> value;
#if PO_ON_DEVICE
  if constexpr (kBytes == 16) {
    uint32_t* w = value.words;
    asm("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3]) : "l"(source));
  } else {
    value = *static_cast<const Vector<kBytes>*>(source);
  }
#else
  memcpy(&value, source, kBytes);
#endif
  return value;
}

// Reads data that other threads write during the launch, after the acquire that makes it visible.
template <int kBytes>
PO_FN Vector<kBytes> load_shared_vector(const void* source) {
#if PO_ON_DEVICE
  return *static_cast<const Vector<kBytes>*>(source);
#else
  Vector<kBytes> value;
  memcpy(&value, source, kBytes);
  return value;
#endif
}

template <int kBytes>
PO_FN void store_vector(void* target, const Vector<kBytes>& value) {
#if PO_ON_DEVICE
  if constexpr (kBytes == 16) {
    const uint32_t* w = value.words;
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(target), "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3])
                 : "memory");
  } else {
    *static_cast<Vector<kBytes>*>(target) = value;
  }
#else
  memcpy(target, &value, kBytes);
#endif
}

// Host: brings a row into the cache before its use. The GPU keeps loads in flight instead.
PO_FN void prefetch([[maybe_unused]] const uint8_t* row, [[maybe_unused]] int bytes) {
#if !PO_ON_DEVICE
  for (int line = 0; line < bytes; line += 64) __builtin_prefetch(row + line);
#endif
}

// Starts reading 16 bytes into shared memory. Only `bytes` of them are read, the others become zero. The copy is done
// after a later copy_async_wait of the same thread. Host: done at once.
PO_FN void copy_async(uint8_t* own, const uint8_t* source, int bytes) {
#if PO_ON_DEVICE
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(
                   static_cast<uint32_t>(__cvta_generic_to_shared(own))),
               "l"(source), "r"(bytes)
               : "memory");
#else
  memset(own, 0, 16);
  memcpy(own, source, static_cast<size_t>(bytes));
#endif
}

// The same for data that is not read again soon: it is the first to leave the L2 cache. Not for a kernel that traces:
// nvcc 13.0 loses the registers of this copy in a loop there, which becomes an illegal instruction
// (tests/gpu_kernels.py checks this).
PO_FN void copy_async_once(uint8_t* own, const uint8_t* source, int bytes) {
#if PO_ON_DEVICE
  if constexpr (kTraces<>) return copy_async(own, source, bytes);
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, %3;" ::"r"(
                   static_cast<uint32_t>(__cvta_generic_to_shared(own))),
               "l"(source), "r"(bytes), "l"(policy)
               : "memory");
#else
  copy_async(own, source, bytes);
#endif
}

// Closes a batch of this thread's copies.
PO_FN void copy_async_commit() {
#if PO_ON_DEVICE
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Returns when all but this thread's last `kPending` batches are complete.
template <int kPending>
PO_FN void copy_async_wait() {
#if PO_ON_DEVICE
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
#endif
}

// ---- packets ------------------------------------------------------------------------------------------------------

// Data with its own flag. On the GPU both travel in one access of 16 bytes, which is single-copy atomic. So a reader
// that sees the flag has the data, and nothing is ordered: the compiler, too, may move other accesses across. The host
// writes the flag last and reads it first.
struct alignas(16) Packet {
  uint32_t data[2];
  uint64_t flag;
};
PO_CONSTANT(sizeof(Packet))

PO_FN void packet_store_sys(Packet* place, const Packet& packet) {
#if PO_ON_DEVICE
  uint64_t data;
  __builtin_memcpy(&data, packet.data, sizeof(data));
  asm volatile("{ .reg .b128 p; mov.b128 p, {%1, %2}; st.relaxed.sys.global.b128 [%0], p; }" ::"l"(place), "l"(data),
               "l"(packet.flag));
#else
  memcpy(place->data, packet.data, sizeof(packet.data));
  __atomic_store_n(&place->flag, packet.flag, __ATOMIC_RELEASE);  // @packet-release
#endif
}

// Returns the packet at a place; its data may be used only if the flag is the expected one.
PO_FN Packet packet_load_sys(const Packet* place, [[maybe_unused]] uint64_t expected) {
  Packet packet{};
#if PO_ON_DEVICE
  uint64_t data;
  asm volatile("{ .reg .b128 p; ld.relaxed.sys.global.b128 p, [%2]; mov.b128 {%0, %1}, p; }"
               : "=l"(data), "=l"(packet.flag)
               : "l"(place));
  __builtin_memcpy(packet.data, &data, sizeof(data));
#else
  packet.flag = __atomic_load_n(&place->flag, __ATOMIC_ACQUIRE);  // @packet-acquire
  if (packet.flag == expected) memcpy(packet.data, place->data, sizeof(packet.data));
#endif
  return packet;
}

// 16 bytes of data without a flag. A place without a packet has all bits set. Each half is one access, and has arrived
// or not, so nothing is ordered here either.
struct alignas(16) BarePacket {
  uint64_t halves[2];

  static constexpr uint64_t kEmpty = ~0ull;
  static PO_FN BarePacket empty() { return {{kEmpty, kEmpty}}; }
  PO_FN bool is_there() const { return halves[0] != kEmpty && halves[1] != kEmpty; }
};

PO_FN void bare_packet_store_sys(BarePacket* place, const BarePacket& packet) {
#if PO_ON_DEVICE
  asm volatile("st.relaxed.sys.global.v2.b64 [%0], {%1, %2};" ::"l"(place), "l"(packet.halves[0]),
               "l"(packet.halves[1]));
#else
  for (int i = 0; i < 2; ++i) __atomic_store_n(&place->halves[i], packet.halves[i], __ATOMIC_RELEASE);
#endif
}

PO_FN BarePacket bare_packet_load_sys(const BarePacket* place) {
  BarePacket packet;
#if PO_ON_DEVICE
  asm volatile("ld.relaxed.sys.global.v2.b64 {%0, %1}, [%2];"
               : "=l"(packet.halves[0]), "=l"(packet.halves[1])
               : "l"(place));
#else
  for (int i = 0; i < 2; ++i) packet.halves[i] = __atomic_load_n(&place->halves[i], __ATOMIC_ACQUIRE);
#endif
  return packet;
}

// Empties the place for the next packet; called by the thread that has read this one. The next packet comes to an empty
// place. On the host this is a plain store, so that ThreadSanitizer finds a missing order of the two.
PO_FN void bare_packet_empty_sys(BarePacket* place) {
#if PO_ON_DEVICE
  bare_packet_store_sys(place, BarePacket::empty());
#else
  *place = BarePacket::empty();
#endif
}

// Returns the pointer. Addresses that a loop derives from it are not kept in registers from one round to the next.
PO_FN const uint8_t* derived_anew(const uint8_t* pointer) {
#if PO_ON_DEVICE
  asm volatile("" : "+l"(pointer));
#endif
  return pointer;
}

// ---- flags and atomics --------------------------------------------------------------------------------------------

PO_FN uint64_t flag_load_acquire_sys(const uint64_t* flag) {
#if PO_ON_DEVICE
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(flag) : "memory");
  return value;
#else
  return __atomic_load_n(flag, __ATOMIC_ACQUIRE);  // @flag-acquire
#endif
}

PO_FN uint64_t flag_load_relaxed_sys(const uint64_t* flag) {
#if PO_ON_DEVICE
  uint64_t value;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(flag) : "memory");
  return value;
#else
  return __atomic_load_n(flag, __ATOMIC_RELAXED);
#endif
}

PO_FN void flag_store_release_sys(uint64_t* flag, uint64_t value) {
#if PO_ON_DEVICE
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(flag), "l"(value) : "memory");
#else
  __atomic_store_n(flag, value, __ATOMIC_RELEASE);  // @flag-release
#endif
}

// Between WGs of one PE. A release covers what the thread has written and what it has acquired from other PEs. It does
// not wait for the thread's stores to the host or to other PEs.
PO_FN uint64_t flag_load_acquire_gpu(const uint64_t* flag) {
#if PO_ON_DEVICE
  uint64_t value;
  asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(flag) : "memory");
  return value;
#else
  return flag_load_acquire_sys(flag);
#endif
}

PO_FN void flag_store_release_gpu(uint64_t* flag, uint64_t value) {
#if PO_ON_DEVICE
  asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(flag), "l"(value) : "memory");
#else
  flag_store_release_sys(flag, value);
#endif
}

PO_FN void flag_store_relaxed_sys(uint64_t* flag, uint64_t value) {
#if PO_ON_DEVICE
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(flag), "l"(value) : "memory");
#else
  __atomic_store_n(flag, value, __ATOMIC_RELAXED);
#endif
}

PO_FN uint64_t atomic_add_fetch_acq_rel_gpu(uint64_t* word, uint64_t value) {
#if PO_ON_DEVICE
  uint64_t old;
  asm volatile("atom.acq_rel.gpu.global.add.u64 %0, [%1], %2;" : "=l"(old) : "l"(word), "l"(value) : "memory");
  return old + value;
#else
  return __atomic_add_fetch(word, value, __ATOMIC_ACQ_REL);  // @add-acq-rel
#endif
}

PO_FN uint64_t atomic_fetch_add_relaxed_gpu(uint64_t* word, uint64_t value) {
#if PO_ON_DEVICE
  uint64_t old;
  asm volatile("atom.relaxed.gpu.global.add.u64 %0, [%1], %2;" : "=l"(old) : "l"(word), "l"(value) : "memory");
  return old;
#else
  return __atomic_fetch_add(word, value, __ATOMIC_RELAXED);
#endif
}

PO_FN uint64_t atomic_or_fetch_acq_rel_gpu(uint64_t* word, uint64_t bits) {
#if PO_ON_DEVICE
  uint64_t old;
  asm volatile("atom.acq_rel.gpu.global.or.b64 %0, [%1], %2;" : "=l"(old) : "l"(word), "l"(bits) : "memory");
  return old | bits;
#else
  return __atomic_or_fetch(word, bits, __ATOMIC_ACQ_REL);  // @or-acq-rel
#endif
}

PO_FN uint64_t atomic_exchange_acq_rel_gpu(uint64_t* word, uint64_t value) {
#if PO_ON_DEVICE
  uint64_t old;
  asm volatile("atom.acq_rel.gpu.global.exch.b64 %0, [%1], %2;" : "=l"(old) : "l"(word), "l"(value) : "memory");
  return old;
#else
  return __atomic_exchange_n(word, value, __ATOMIC_ACQ_REL);
#endif
}

// A word of shared memory that several threads of the WG may write.
PO_FN void flag_store_relaxed_wg(uint64_t* flag, uint64_t value) {
#if PO_ON_DEVICE
  *static_cast<volatile uint64_t*>(flag) = value;
#else
  __atomic_store_n(flag, value, __ATOMIC_RELAXED);
#endif
}

PO_FN uint64_t flag_load_relaxed_wg(const uint64_t* flag) {
#if PO_ON_DEVICE
  return *static_cast<const volatile uint64_t*>(flag);
#else
  return __atomic_load_n(flag, __ATOMIC_RELAXED);
#endif
}

PO_FN void atomic_or_relaxed_wg(uint64_t* word, uint64_t bits) {
#if PO_ON_DEVICE
  atomicOr(reinterpret_cast<unsigned long long*>(word), static_cast<unsigned long long>(bits));
#else
  __atomic_fetch_or(word, bits, __ATOMIC_RELAXED);
#endif
}

// Orders everything that this thread has written or observed before whatever it publishes next, for every PE.
PO_FN void fence_acq_rel_sys() {
#if PO_ON_DEVICE
  asm volatile("fence.acq_rel.sys;" ::: "memory");
#endif
  // On the host every publication is itself a release operation, and ThreadSanitizer does not understand fences.
}

// ---- the previous kernel and the next one ---------------------------------------------------------------------------

// If this kernel was started before its predecessor on the stream had ended (a programmatic dependent launch): waits
// for that end, and sees what the predecessor wrote. Otherwise does nothing.
PO_FN void await_predecessor() {
#if PO_ON_DEVICE && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Once all WGs have called this, a successor with a programmatic dependent launch may take multiprocessors that this
// kernel leaves.
PO_FN void release_successor() {
#if PO_ON_DEVICE && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// ---- time -----------------------------------------------------------------------------------------------------------

PO_FN uint64_t clock_ns() {
#if PO_ON_DEVICE
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
#else
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1000000000ull + static_cast<uint64_t>(now.tv_nsec);
#endif
}

// Cycles of this multiprocessor, modulo 2^32; the host counts none.
PO_FN uint32_t clock_cycles() {
#if PO_ON_DEVICE
  return static_cast<uint32_t>(clock());
#else
  return 0;
#endif
}

// Returns when so many cycles have gone by since `begin`; fewer than 2^31.
PO_FN void await_cycles([[maybe_unused]] uint32_t begin, [[maybe_unused]] uint32_t cycles) {
#if PO_ON_DEVICE
  while (clock_cycles() - begin < cycles) __nanosleep(100);
#endif
}

// Whether a poll loop looks at the clock and the abort words in this round. On the host in every round: on a busy
// machine a thread that yields may be away for long.
PO_FN bool looks_up(uint32_t spins) { return !PO_ON_DEVICE || spins % 64 == 0; }

// Yields inside a poll loop. PEs of the host backend share few cores: a spinning PE must let the others run.
PO_FN void spin_pause([[maybe_unused]] uint32_t spins) {
#if !PO_ON_DEVICE
  if (spins < 16) {
    sched_yield();
  } else {
    usleep(spins < 272 ? 50 : 500);
  }
#endif
}

}  // namespace po
