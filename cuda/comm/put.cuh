// Moves bytes and flags to another PE, by stores or through the network. The only file that may include NVSHMEM.
//
// Reachable peer: plain stores, then a releasing flag store. Other peers: one non-blocking put with its signal. Two of
// them have no order. `quiet` comes before their sources may be overwritten, unless the receivers have shown in another
// way that they have come.
#pragma once

#include "comm/team.cuh"
#include "platform/groups.cuh"
#include "platform/memory.cuh"
#include "platform/trace.cuh"

#if PO_ON_DEVICE && PO_WITH_NVSHMEM
#include <nvshmem.h>
#include <nvshmemx.h>
#elif !PO_ON_DEVICE
#include "platform/network.h"
#endif

namespace po {

// Copies `bytes` from `offset` in the heap of a peer that is not reachable; returns when they have arrived. One thread.
PO_FN void get([[maybe_unused]] const Team& team, [[maybe_unused]] int peer, [[maybe_unused]] uint64_t offset,
               [[maybe_unused]] void* target, [[maybe_unused]] uint64_t bytes) {
#if !PO_ON_DEVICE
  team.network->get(peer, offset, target, bytes);
#elif PO_WITH_NVSHMEM
  nvshmem_getmem(target, team.heap + offset, bytes, peer);
  fence_acq_rel_sys();  // the network's write bypassed this multiprocessor
#endif
}

// Returns when all puts and signals of this PE, by any of its threads that this one has synchronized with, have been
// performed. One thread.
PO_FN void put_quiet([[maybe_unused]] const Team& team) {
#if !PO_ON_DEVICE
  team.network->quiet();
#elif PO_WITH_NVSHMEM
  nvshmem_quiet();
#endif
}

// Makes the puts before a signal visible to this thread, after a poll on its flag has seen `value` or more from a peer
// that is not reachable. A load alone does not, if the network delivers data and signals to the GPU by different paths.
PO_FN void put_acquire([[maybe_unused]] const uint64_t* flag, [[maybe_unused]] uint64_t value) {
#if PO_ON_DEVICE && PO_WITH_NVSHMEM
  nvshmem_uint64_test(const_cast<uint64_t*>(flag), NVSHMEM_CMP_GE, value);
#endif
}

// Sets the flag at `offset` in a peer's heap. For a reachable peer this is a release: it covers everything that this
// thread has written or, through a sync or an acquire, observed. For others it has no order.
PO_FN void signal(const Team& team, int peer, uint64_t offset, uint64_t value) {
  trace_send(peer, offset);
  if (is_reachable(team, peer)) {
    flag_store_release_sys(reinterpret_cast<uint64_t*>(peer_address(team, peer, offset)), value);  // @signal-release
    return;
  }
#if !PO_ON_DEVICE
  team.network->signal(peer, offset, value);
#elif PO_WITH_NVSHMEM
  nvshmemx_signal_op(reinterpret_cast<uint64_t*>(team.heap + offset), value, NVSHMEM_SIGNAL_SET, peer);
#endif
}

// Sets the flag at `flag_offset` in a peer's heap once `bytes` from `source`, in this PE's heap, have come to `offset`
// there. For a reachable peer, to which the bytes have been stored, it is `signal`. One thread.
PO_FN void put_signal(const Team& team, int peer, [[maybe_unused]] uint64_t offset, [[maybe_unused]] const void* source,
                      [[maybe_unused]] uint64_t bytes, uint64_t flag_offset, uint64_t value) {
  if constexpr (kPuts) {
    if (bytes != 0 && !is_reachable(team, peer)) {
      trace_send(peer, flag_offset);
#if !PO_ON_DEVICE
      team.network->put_signal(peer, offset, source, bytes, flag_offset, value);  // @signal-after-put
#elif PO_WITH_NVSHMEM
      nvshmem_putmem_signal_nbi(team.heap + offset, source, bytes, reinterpret_cast<uint64_t*>(team.heap + flag_offset),
                                value, NVSHMEM_SIGNAL_SET, peer);
#endif
      return;
    }
  }
  signal(team, peer, flag_offset, value);
}

}  // namespace po
