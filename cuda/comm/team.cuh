// A kernel's view of its world: the PEs' heaps, the flags in them, and where errors go.
//
// Offsets are bytes from the heap's base and the same on every PE. The host fills these structs from their descriptions
// (platform/describe.cuh).
#pragma once

#include "platform/describe.cuh"

#ifndef PO_WITH_NVSHMEM
#define PO_WITH_NVSHMEM 0
#endif

namespace po {

// Whether this code can reach PEs whose heaps are not mapped. On GPUs only code that is linked with NVSHMEM can.
inline constexpr bool kPuts = !PO_ON_DEVICE || PO_WITH_NVSHMEM != 0;

inline constexpr int kContractWords = 14;  // fills a Grant up to its 128 bytes
inline constexpr int kEpochShift = 16;     // a flag is the epoch above a 16-bit hash of the launch contract
PO_CONSTANT(kContractWords)
PO_CONSTANT(kEpochShift)

// A kernel that keeps state per PE in registers or shared memory is compiled with room for a multiple of kPeStep PEs,
// as many as its team needs. With more than kMostPes PEs, the state of the most demanding kernel would exceed a WG's
// shared memory.
inline constexpr int kPeStep = 64;
inline constexpr int kMostPes = 1024;
PO_CONSTANT(kPeStep)
PO_CONSTANT(kMostPes)

// A receiver's permission to write this epoch's output: where it is in the receiver's heap, and the receiver's launch
// contract. Lives in the sender's heap, one per receiver, written by that receiver alone; `flag` is set last.
struct alignas(128) Grant {
  uint64_t flag;
  uint64_t output_offset;
  int64_t contract[kContractWords];
};
PO_DESCRIBE(Grant, flag, output_offset, contract)

// Private to a PE, in device memory. Words that many WGs update have cache lines of their own.
struct LocalState {
  alignas(128) uint64_t epoch;     // of the last launch that ended, or that closed its epoch; advanced by the last WG
  alignas(128) uint64_t ticket;    // next position of the task order
  alignas(128) uint64_t departed;  // WGs that no longer need this launch's epoch
  alignas(128) uint64_t abort;     // the epoch that was given up, or 0; not 0: leave without further waits
  uint64_t error_claimed;          // the first WG to meet an error sets it and writes the record
  uint64_t input_error_claimed;    // the last epoch in which a WG met bad input
};
PO_DESCRIBE(LocalState, epoch, ticket, departed, abort, error_claimed, input_error_claimed)

// The host's word on a PE, set while launches run.
inline constexpr uint64_t kLost = 1;  // the PE has ended, so no wait for it passes; of this PE: the host wants to leave
inline constexpr uint64_t kPreparing =
    2;  // makes ready for a launch (compiles a kernel), which is no time waited for it
PO_CONSTANT(kLost)
PO_CONSTANT(kPreparing)

enum ErrorKind : uint64_t { kNoError = 0, kTimeout = 1, kContractMismatch = 2, kPeerLost = 3, kReportedByPeer = 4 };
// An abort word is the epoch above the ErrorKind (below kReportedByPeer) and the blamed PE. The word's place names the
// PE that met the error first. A PE that passes a report on keeps place and word.
inline constexpr int kBlameKindShift = 14;
static_assert(kMostPes <= 1 << kBlameKindShift && kReportedByPeer <= 1 << (kEpochShift - kBlameKindShift),
              "a kind and the number of a PE share the bits below the epoch");
PO_CONSTANT(kTimeout)
PO_CONSTANT(kContractMismatch)
PO_CONSTANT(kPeerLost)
PO_CONSTANT(kReportedByPeer)
PO_CONSTANT(kBlameKindShift)

// The purpose of a wait: a code, and above it the wait's bound in eighths of the time-out. Operators have codes of
// their own, from kFirstPhase on. The operator's Python module has their meaning, and the meaning of the kinds of bad
// input.
using Phase = uint32_t;
inline constexpr int kCodeBits = 16;
PO_CONSTANT(kCodeBits)
constexpr Phase make_phase(uint32_t code, uint32_t eighths = 8) { return eighths << kCodeBits | code; }
inline constexpr Phase kPhaseCredit = make_phase(1);
PO_CONSTANT(kPhaseCredit)
inline constexpr uint32_t kFirstPhase = 16;

// Host-visible memory. `state` is released last and makes the other fields valid.
struct ErrorRecord {
  uint64_t state;
  uint64_t kind;
  uint64_t phase;
  uint64_t peer;
  uint64_t index;
  uint64_t epoch;
  uint64_t seen;
  uint64_t waited_ns;
  uint64_t other_side;  // the PE whose contract `peer_contract` is
  int64_t own_contract[kContractWords];
  int64_t peer_contract[kContractWords];
};
PO_DESCRIBE(ErrorRecord, state, kind, phase, peer, index, epoch, seen, waited_ns, other_side, own_contract,
            peer_contract)

// The operator defines kind, place and value of the error; `operator_id` is its contract's first word.
struct InputErrorRecord {
  uint64_t state;
  uint64_t kind;
  int64_t operator_id;
  int64_t outer;
  int64_t inner;
  int64_t value;
  int64_t limit;
};
PO_DESCRIBE(InputErrorRecord, state, kind, operator_id, outer, inner, value, limit)

class Network;  // host backend only

inline constexpr int kGrantCopies = 2;  // sources of the grants' puts, alternating; two are enough: see grant_credit
PO_CONSTANT(kGrantCopies)
PO_FN constexpr int64_t num_grants(int64_t size) { return 2 * size + kGrantCopies; }
PO_QUERY(num_grants, (int64_t size), num_grants(size))

struct Team {
  int32_t rank;
  int32_t size;
  uint8_t* heap;               // base of this PE's symmetric heap
  const uint64_t* peer_heaps;  // [size] base of each PE's heap as mapped here; 0: not load/store reachable
  uint64_t grants_offset;  // Grant[num_grants(size)]: by receiver, copies of this PE's own, by receiver in odd epochs
  uint64_t ready_offset;   // uint64_t[size][ready_stride], indexed by sender
  uint64_t abort_offset;   // uint64_t[size], indexed by the PE that gave up first: epoch, error, blamed PE
  uint64_t ready_stride;
  LocalState* local;
  const uint64_t* host_says;  // [size] kLost, kPreparing; in device memory
  ErrorRecord* error;
  InputErrorRecord* input_error;
  uint64_t timeout_ns;
  uint64_t contract_hash;
  int64_t contract[kContractWords];
  Network* network;
  uint64_t epoch;  // of this launch; begin_launch sets it in each WG's own copy
};
PO_DESCRIBE(Team, rank, size, heap, peer_heaps, grants_offset, ready_offset, abort_offset, ready_stride, local,
            host_says, error, input_error, timeout_ns, contract_hash, contract, network, epoch)

PO_FN bool is_reachable(const Team& team, int peer) { return team.peer_heaps[peer] != 0; }

PO_FN uint8_t* peer_address(const Team& team, int peer, uint64_t offset) {
  return reinterpret_cast<uint8_t*>(team.peer_heaps[peer]) + offset;
}

// Whether some peer is not reachable.
PO_FN bool has_far_peers([[maybe_unused]] const Team& team) {
#if PO_ON_DEVICE
  return kPuts;
#else
  return team.network != nullptr;
#endif
}

PO_FN uint64_t grant_place(const Team& team, int number) {
  return team.grants_offset + static_cast<uint64_t>(number) * sizeof(Grant);
}

// Where a receiver's grant of this epoch lies. Puts of two launches have no order. So where some are put, the grants of
// even and of odd epochs have different places.
PO_FN uint64_t grant_offset(const Team& team, int receiver) {
  if (has_far_peers(team) && team.epoch % 2 != 0) receiver += team.size + kGrantCopies;  // @grants-alternate
  return grant_place(team, receiver);
}

PO_FN uint64_t ready_word_offset(const Team& team, int sender, uint64_t index) {
  return team.ready_offset + (static_cast<uint64_t>(sender) * team.ready_stride + index) * sizeof(uint64_t);
}

PO_FN uint64_t abort_word_offset(const Team& team, int accuser) {
  return team.abort_offset + static_cast<uint64_t>(accuser) * sizeof(uint64_t);
}

PO_FN uint64_t* local_word(const Team& team, uint64_t offset) {
  return reinterpret_cast<uint64_t*>(team.heap + offset);
}

PO_FN uint64_t flag_value(uint64_t epoch, uint64_t low_bits) { return epoch << kEpochShift | low_bits; }
PO_FN uint64_t epoch_of(uint64_t flag) { return flag >> kEpochShift; }
PO_FN uint64_t low_bits_of(uint64_t flag) { return flag & ((1ull << kEpochShift) - 1); }

}  // namespace po
