// The life of one launch, the same for every operator: begin, grant credit, await, signal, leave.
//
// Flags carry the epoch and are never reset. A wait passes at `epoch >= expected` and is bounded. On time-out, the
// first WG that meets it writes one record, raises the abort word and signals the peers; then all WGs leave.
// cuda/DESIGN.md lists every release with the acquire that pairs with it. The page beside a kernel lists the operator's
// own.
#pragma once

#include "comm/put.cuh"

namespace po {

// Gives this WG's copy of the team the epoch of this launch. Stream order makes the previous launch's epoch visible. It
// is advanced only after all WGs of this launch have read it (close_epoch), or are done (leave_launch). `group`: the
// WG, or the warp of it that works with the epoch until the WG's next sync.
template <class Group>
PO_FN void begin_launch(Team& team, const Group& group) {
  if (group.rank() == 0) team.epoch = flag_load_relaxed_sys(&team.local->epoch) + 1;
  group.sync();
}

PO_FN uint64_t launch_flag(const Team& team) { return flag_value(team.epoch, team.contract_hash); }

PO_FN bool is_aborted(const Team& team) { return flag_load_relaxed_sys(&team.local->abort) != 0; }

// The host's word on a PE: kLost, kPreparing.
PO_FN uint64_t host_says(const Team& team, int pe) { return flag_load_relaxed_sys(team.host_says + pe); }

// ---- errors ---------------------------------------------------------------------------------------------------------

// Reports an error in this PE's own input: the first one that a launch finds, unless the host has not yet taken an
// earlier one. The launch continues.
PO_NOINLINE inline void report_input_error(const Team& team, uint64_t kind, int64_t outer, int64_t inner, int64_t value,
                                           int64_t limit) {
  if (atomic_exchange_acq_rel_gpu(&team.local->input_error_claimed, team.epoch) == team.epoch) return;
  InputErrorRecord& record = *team.input_error;
  if (flag_load_acquire_sys(&record.state) != 0) return;
  record.kind = kind;
  record.operator_id = team.contract[0];
  record.outer = outer;
  record.inner = inner;
  record.value = value;
  record.limit = limit;
  flag_store_release_sys(&record.state, 1);  // the host reads `state` first (Workspace.raise_pending)
}

PO_FN const Grant* grant_of(const Team& team, int peer) {
  return reinterpret_cast<const Grant*>(team.heap + grant_offset(team, peer));
}

// Called when one PE blames another and this PE gets the report. Returns the PE whose contract this PE reports beside
// its own: one that differs from it, since this PE may agree with either.
PO_NOINLINE inline int side_to_tell(const Team& team, int blamed, int accuser) {
  if (blamed == team.rank) return accuser;
  const uint64_t flag = flag_load_acquire_sys(&grant_of(team, blamed)->flag);
  return accuser != team.rank && flag == launch_flag(team) ? accuser : blamed;
}

PO_NOINLINE inline void raise_abort(const Team& team, ErrorKind kind, Phase phase, int peer, uint64_t index,
                                    uint64_t seen, uint64_t waited_ns) {
  if (atomic_exchange_acq_rel_gpu(&team.local->error_claimed, 1) == 0) {
    // The host interrupts this PE, no matter which peer was waited for.
    if (kind == kPeerLost && (host_says(team, peer) & kLost) == 0) peer = team.rank;
    ErrorRecord& record = *team.error;
    record.kind = kind;
    record.phase = phase & ((1u << kCodeBits) - 1);
    record.peer = static_cast<uint64_t>(peer);
    record.index = index;
    record.epoch = team.epoch;
    record.seen = seen;
    record.waited_ns = waited_ns;
    const int other_side = kind == kReportedByPeer ? side_to_tell(team, peer, static_cast<int>(index)) : peer;
    const Grant* grant = grant_of(team, other_side);
    const bool is_here = epoch_of(flag_load_acquire_sys(&grant->flag)) >= team.epoch;  // else it is still on its way
    record.other_side = static_cast<uint64_t>(other_side);
    for (int i = 0; i < kContractWords; ++i) {
      record.own_contract[i] = team.contract[i];
      record.peer_contract[i] = is_here ? grant->contract[i] : 0;
    }
    flag_store_release_sys(&record.state, 1);  // the host reads `state` first (Workspace.raise_pending)
    // The peers need not wait for their own time-out: they leave at their next look at these words.
    const bool is_passed_on = kind == kReportedByPeer;
    const int accuser = is_passed_on ? static_cast<int>(index) : team.rank;  // @abort-place
    const uint64_t blame = kind << kBlameKindShift | static_cast<uint64_t>(peer);
    const uint64_t report = is_passed_on ? seen : flag_value(team.epoch, blame);  // @abort-report
    for (int other = 0; other < team.size; ++other) {
      if (other == team.rank) continue;  // @abort-tells-peers
      signal(team, other, abort_word_offset(team, accuser), report);
    }
  }
  if (!is_aborted(team)) flag_store_relaxed_sys(&team.local->abort, team.epoch);
}

// If a peer gave up this epoch (or an earlier one), gives up as well, and passes on which PE it blames.
PO_NOINLINE inline bool peer_gave_up(const Team& team) {
  for (int accuser = 0; accuser < team.size; ++accuser) {
    const uint64_t word = flag_load_acquire_sys(local_word(team, abort_word_offset(team, accuser)));
    if (word != 0 && epoch_of(word) <= team.epoch) {
      const auto blamed = static_cast<int>(word & ((1u << kBlameKindShift) - 1));
      raise_abort(team, kReportedByPeer, kPhaseCredit, blamed, static_cast<uint64_t>(accuser), word, 0);
      return true;
    }
  }
  return false;
}

// ---- waiting --------------------------------------------------------------------------------------------------------

// Calls `look(&seen)`, which reads flags that `peer` writes, until it returns true. Returns false if the launch was
// given up instead. A look at several flags sets `peer` to the PE whose flag is missing, and `index` to the flag;
// `peer` is this PE if only its own flags are missing. Those are awaited without a bound, as in await_own. The host's
// word on the peer counts too: time in which the peer prepares a launch is not counted, and a peer that has ended is
// not waited for. `has_given_up`: one look is enough.
template <class Look>
PO_FN bool await(const Team& team, Phase phase, const int& peer, const uint64_t& index, const Look& look,
                 bool has_given_up = false) {
  uint64_t started = 0;
  bool was_over = false;
  WaitTrace trace(phase);
  for (uint32_t spins = 1;; ++spins) {
    uint64_t seen;
    if (look(&seen)) return trace.came();
    if (has_given_up) return false;
    trace.looked_in_vain(peer, index);
    if (looks_up(spins)) {
      if (is_aborted(team) || peer_gave_up(team)) return false;  // @wait-sees-abort
      const uint32_t eighths = phase >> kCodeBits;  // computed here: before the loop it would fill registers
      const uint64_t bound_ns = eighths == 8 ? team.timeout_ns : team.timeout_ns / 8 * eighths;
      const uint64_t now = clock_ns();
      const uint64_t said = host_says(team, peer);
      if (started == 0 || (said & kPreparing) != 0) started = now;
      const bool is_lost = ((said | host_says(team, team.rank)) & kLost) != 0;
      const bool is_over = is_lost || (now - started > bound_ns && peer != team.rank);  // @wait-bound
      if (is_over && was_over) {  // at first it looks again: this thread may not have run since its last look
        raise_abort(team, is_lost ? kPeerLost : kTimeout, phase, peer, index, seen, now - started);
        return false;
      }
      was_over = is_over;
    }
    spin_pause(spins);
  }
}

// The same for flags that another WG of this PE writes. The wait has no bound of its own: that WG waits only for peers,
// with a bound, and this PE is not to be blamed for a late peer.
template <class Look>
PO_FN bool await_own(const Team& team, const Look& look) {
  WaitTrace trace(0);
  for (uint32_t spins = 1; !look(); ++spins) {
    trace.looked_in_vain(team.rank, 0);
    if (looks_up(spins) && is_aborted(team)) return false;
    spin_pause(spins);
  }
  return true;
}

// Returns true when `flag`, which `peer` writes, has reached this epoch. Everything that `peer` released before is then
// visible to this thread.
PO_FN bool await_epoch(const Team& team, const uint64_t* flag, Phase phase, int peer, uint64_t index,
                       bool has_given_up = false) {
  const auto look = [&](uint64_t* seen) {
    *seen = flag_load_acquire_sys(flag);   // @wait-acquire
    return epoch_of(*seen) >= team.epoch;  // @wait-passes
  };
  const bool is_there = await(team, phase, peer, index, look, has_given_up);
  if (is_there && !is_reachable(team, peer)) put_acquire(flag, flag_value(team.epoch, 0));
  return is_there;
}

// The same for a word that counts steps below the epoch: returns true when it has reached `step` of this epoch.
PO_FN bool await_step(const Team& team, const uint64_t* word, uint64_t step, Phase phase, int peer, uint64_t index) {
  const uint64_t expected = flag_value(team.epoch, step);  // @step-expected
  const auto look = [&](uint64_t* seen) {
    *seen = flag_load_acquire_sys(word);  // @step-acquire
    return *seen >= expected;
  };
  const bool is_there = await(team, phase, peer, index, look);
  if (is_there && !is_reachable(team, peer)) put_acquire(word, expected);
  return is_there;
}

// ---- credit ---------------------------------------------------------------------------------------------------------

// A launch after an aborted one takes part in nothing. Its credit would hide the aborted launch's contract from peers
// that have not compared it yet, and let those still in that epoch write into the output of this launch. `aborted`:
// LocalState's.
PO_FN bool takes_part(const Team& team, uint64_t aborted) {
  return aborted == 0 || aborted >= team.epoch;  // @takes-part
}

// Grants every peer credit: this PE's output may be written, under this contract. Threads of one group (a WG, or a warp
// of it) share the peers. `landing_offset`: where peers put that are not reachable.
template <class Group>
PO_FN void grant_credit(const Team& team, const Group& group, uint64_t output_offset, uint64_t landing_offset) {
  if (!takes_part(team, flag_load_relaxed_sys(&team.local->abort))) return;  // @grant-takes-part
  auto fill = [&](Grant* grant) {
    grant->output_offset = output_offset;  // @grant-output
    for (int i = 0; i < kContractWords; ++i) grant->contract[i] = team.contract[i];
  };
  for (int peer = group.rank(); peer < team.size; peer += group.size()) {
    if (peer == team.rank || !is_reachable(team, peer)) continue;
    fill(reinterpret_cast<Grant*>(peer_address(team, peer, grant_offset(team, team.rank))));
    signal(team, peer, grant_offset(team, team.rank), launch_flag(team));  // @grant-signal
  }
  if (group.rank() == 0) {
    // Two copies alternate. The last epoch's put has been performed before its copy is filled again: a peer's credit of
    // this epoch, awaited before the next one, proves that the peer has taken the last epoch's grant.
    const int copy = team.size + static_cast<int>(team.epoch % kGrantCopies);  // @grant-copies
    auto* staged = reinterpret_cast<Grant*>(team.heap + grant_place(team, copy));
    fill(staged);
    if constexpr (kPuts) staged->output_offset = landing_offset;
    for (int peer = 0; peer < team.size; ++peer) {
      if (is_reachable(team, peer)) continue;
      const uint64_t offset = grant_offset(team, team.rank);
      put_signal(team, peer, offset + sizeof(uint64_t), &staged->output_offset, sizeof(Grant) - sizeof(uint64_t),
                 offset, launch_flag(team));
    }
  }
}

template <class Group>
PO_FN void grant_credit(const Team& team, const Group& group, uint64_t output_offset) {
  grant_credit(team, group, output_offset, output_offset);
}

// Returns true when `receiver` has granted credit for this epoch under the same contract.
PO_FN bool await_credit(const Team& team, int receiver) {
  const uint64_t* flag = local_word(team, grant_offset(team, receiver));
  if (!await_epoch(team, flag, kPhaseCredit, receiver, 0)) return false;
  const uint64_t seen = flag_load_relaxed_sys(flag);
  // A receiver that is already one launch ahead has compared this launch's contracts itself.
  if (epoch_of(seen) == team.epoch && low_bits_of(seen) != team.contract_hash) {  // @contracts-compared
    raise_abort(team, kContractMismatch, kPhaseCredit, receiver, 0, seen, 0);
    return false;
  }
  return true;
}

// Offset of this epoch's output, or of where puts land, in the heap of a receiver that granted credit. Stable until
// this WG has signalled the receiver.
PO_FN uint64_t granted_output(const Team& team, int receiver) {
  return flag_load_relaxed_sys(local_word(team, grant_offset(team, receiver)) + 1);
}

// Awaits every peer's credit, so that each PE compares its contract with every other's, even without data between the
// two. Threads of one group share the peers.
template <class Group>
PO_FN void await_all_credits(const Team& team, const Group& group) {
  for (int peer = group.rank(); peer < team.size; peer += group.size()) {
    if (peer != team.rank) await_credit(team, peer);
  }
}

// ---- leaving --------------------------------------------------------------------------------------------------------

// Fills the output of a launch that was given up with ones: NaN in fp32, fp16 and bf16.
template <class Word>
PO_FN void poison(const WorkGroup& wg, Word* words, int64_t count) {
  for (int64_t i = wg.rank(); i < count; i += wg.size()) words[i] = static_cast<Word>(~Word{0});
}

// Counts this WG out. The last one completes the launch's puts, so that their sources may be written again and no word
// of a later launch overtakes theirs. It poisons the output if the launch was aborted, and closes the epoch.
PO_FN void leave_launch(const Team& team, const WorkGroup& wg, uint64_t* last_flag, uint64_t output_offset,
                        uint64_t output_bytes) {
  // @depart-sync
  wg.sync();  // orders all of this WG's waits and stores before its departure
  if (wg.rank() == 0) {
    const auto count = static_cast<uint64_t>(wg.count());
    *last_flag = atomic_add_fetch_acq_rel_gpu(&team.local->departed, 1) == count;
  }
  wg.sync();  // @last-wg-known
  if (*last_flag == 0) return;
  if (has_far_peers(team) && wg.rank() == 0) put_quiet(team);  // @last-quiet
  if (is_aborted(team)) {                                      // @poison
    poison(wg, reinterpret_cast<uint16_t*>(team.heap + output_offset), static_cast<int64_t>(output_bytes / 2));
  }
  if (wg.rank() == 0) {
    team.local->ticket = 0;                                  // @ticket-reset
    team.local->departed = 0;                                // @departed-reset
    flag_store_relaxed_sys(&team.local->epoch, team.epoch);  // @epoch-advance
  }
}

// Replaces leave_launch if each WG poisons its own part of an aborted output. Counts this WG as one that knows its
// epoch. The last WG closes the epoch for the next launch while all are still at work, so no WG counts itself out at
// the end. One thread, anywhere after begin_launch.
PO_FN void close_epoch(const Team& team, const WorkGroup& wg) {
  const auto count = static_cast<uint64_t>(wg.count());
  if (atomic_add_fetch_acq_rel_gpu(&team.local->departed, 1) != count) return;
  team.local->ticket = 0;
  team.local->departed = 0;
  flag_store_relaxed_sys(&team.local->epoch, team.epoch);
}

}  // namespace po
