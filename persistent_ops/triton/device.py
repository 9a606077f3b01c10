"""Device functions of Triton kernels that communicate: the protocol of cuda/comm/launch.cuh.

All threads of a work-group come to every function here, and see the same results. Order between a kernel's threads and
its peers is what Triton does not give by itself. docs/triton.md has the rules, and
tests/triton_operators/test_ptx.py reads each of them in the compiled code.

A scalar load is made by each thread, so it may give each thread another value of a word that changes. What decides a
branch comes from `_look`, which one thread loads for all.

No function is `noinline`. Triton gives a called function shared memory that its caller uses (until 3.9, triton PR
11267), and puts no barrier in front of what it does there first (triton issue 11326).
"""

from __future__ import annotations

import os
import time
from typing import NamedTuple

import triton
import triton.language as tl

from .structs import constant, offset_of as _at, size_of

__all__ = [
    "Launch",
    "await_all_credits",
    "await_credit",
    "begin",
    "get_block",
    "is_aborted",
    "leave",
    "offset_of",
    "peer_ptr",
    "put_block",
    "signal",
    "wait",
]

_INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
_LOOKS = tl.constexpr(1 if os.environ.get("TRITON_INTERPRET") == "1" else 64)  # of a wait, until it sees to the clock

_RANK, _SIZE, _HEAP = _at("Team", "rank"), _at("Team", "size"), _at("Team", "heap")
_PEER_HEAPS, _LOCAL, _HOST_SAYS = _at("Team", "peer_heaps"), _at("Team", "local"), _at("Team", "host_says")
_GRANTS, _READY, _ABORTS = _at("Team", "grants_offset"), _at("Team", "ready_offset"), _at("Team", "abort_offset")
_READY_STRIDE, _TIMEOUT = _at("Team", "ready_stride"), _at("Team", "timeout_ns")
_HASH, _CONTRACT = _at("Team", "contract_hash"), _at("Team", "contract")
_ERROR, _INPUT_ERROR = _at("Team", "error"), _at("Team", "input_error")
_EPOCH, _TICKET, _DEPARTED = _at("LocalState", "epoch"), _at("LocalState", "ticket"), _at("LocalState", "departed")
_ABORT, _ERROR_CLAIMED = _at("LocalState", "abort"), _at("LocalState", "error_claimed")
_INPUT_CLAIMED = _at("LocalState", "input_error_claimed")
_GRANT_BYTES, _GRANT_FLAG, _GRANT_OUTPUT = size_of("Grant"), _at("Grant", "flag"), _at("Grant", "output_offset")
_GRANT_CONTRACT, _WORDS = _at("Grant", "contract"), constant("kContractWords")
_COPIES = constant("kGrantCopies")
_SHIFT, _BLAME_SHIFT = constant("kEpochShift"), constant("kBlameKindShift")
_LOW_BITS, _PE_BITS, _CODE = (
    tl.constexpr((1 << constant(name).value) - 1) for name in ("kEpochShift", "kBlameKindShift", "kCodeBits")
)
_EPOCHS = tl.constexpr((1 << 64 - _SHIFT.value) - 1)
_TIMED_OUT, _MISMATCH = constant("kTimeout"), constant("kContractMismatch")
_PEER_LOST, _REPORTED = constant("kPeerLost"), constant("kReportedByPeer")
_SAID_LOST, _SAID_PREPARING, _CREDIT = constant("kLost"), constant("kPreparing"), constant("kPhaseCredit")
NO_SUCH_WORD = tl.constexpr(1)  # kind of an InputErrorRecord: an index that no signal has


class Launch(NamedTuple):
    """A running launch, as `begin` returns it.

    Attributes:
        team: pointer to this PE's Team; to 32-bit words where the launch leaves a timeline, else to 64-bit words.
        rank, size: this PE, and the number of PEs; int32.
        epoch: number of the launch; int64.
        output: place of this PE's output in its heap, in bytes; int64.
        trace: address of this work-group's TraceBlock; 0 where there is none.
    """

    team: tl.tensor
    rank: tl.tensor
    size: tl.tensor
    epoch: tl.tensor
    output: tl.tensor
    trace: tl.tensor


# ---- words ----------------------------------------------------------------------------------------------------------


def _host_clock() -> int:
    """Return the time in nanoseconds, and let other PEs run; the interpreter has no %globaltimer."""
    time.sleep(0.0002)
    return time.monotonic_ns()


_host_clock.__triton_builtin__ = True  # type: ignore[attr-defined]  # compiled code has no call of it


@triton.jit
def _words(address):
    """Return a pointer to 64-bit words."""
    return address.to(tl.int64, bitcast=False).to(tl.pointer_type(tl.int64))


@triton.jit
def _field(launch, offset: tl.constexpr):
    """Load a word of the Team, which does not change during a launch."""
    return tl.load(_words(launch.team.to(tl.int64) + offset))


@triton.jit
def _local(launch, offset: tl.constexpr):
    """Return the address of a word of the LocalState."""
    return _field(launch, _LOCAL) + offset


@triton.jit
def _look(address):
    """Load a word that others write, with acquire, by one thread for all."""
    seen = tl.atomic_add(_words(address), tl.full([], 0, tl.int64), sem="acquire", scope="sys")  # @look-acquire
    return seen


@triton.jit
def _release(address, value, unless):
    """Store a word with release, by one thread after all have come; not where the word at `unless` is not zero."""
    tl.debug_barrier()  # @release-barrier
    if _INTERPRETED:
        if tl.load(_words(unless)) == 0:
            tl.atomic_xchg(_words(address), value.to(tl.int64), sem="release", scope="sys")
    else:
        tl.inline_asm_elementwise(
            """{
            .reg .pred p, q; .reg .u32 t; .reg .u64 w;
            mov.u32 t, %tid.x; setp.eq.u32 p, t, 0; mov.u64 w, 1;
            @p ld.relaxed.sys.global.u64 w, [$3];
            setp.eq.and.u64 q, w, 0, p;
            @q st.release.sys.global.u64 [$1], $2;
            mov.u32 $0, 0;
            }""",  # @release-one-thread
            "=r,l,l,l",  # @release-order
            [address.to(tl.int64), value.to(tl.int64), unless.to(tl.int64)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def _clock():
    """Return the time in nanoseconds, the same for all threads."""
    if _INTERPRETED:
        return _host_clock()
    else:
        threads: tl.constexpr = tl.extra.cuda.num_threads()
        times = tl.inline_asm_elementwise(
            "mov.u64 $0, %globaltimer; // $1",
            "=l,r",
            [tl.arange(0, threads)],
            dtype=tl.int64,
            is_pure=False,
            pack=1,
        )
        return tl.max(times, 0)  # @one-clock


@triton.jit
def _ticks():
    """Return a timeline's time, in ticks of the multiprocessor's clock; nanoseconds in the interpreter."""
    if _INTERPRETED:
        return _host_clock()
    else:
        return tl.inline_asm_elementwise("mov.u64 $0, %clock64;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)


@triton.jit
def _flag(launch, low_bits):
    return (launch.epoch << _SHIFT) | low_bits


@triton.jit
def _epoch_of(flag):
    return (flag >> _SHIFT) & _EPOCHS  # @flag-epoch: words are signed here


@triton.jit
def _heap_of(launch, pe):
    """Return the address of a PE's heap."""
    return tl.load(_words(_field(launch, _PEER_HEAPS)) + pe)


@triton.jit
def _grant(launch, owner, receiver):
    """Return the address of the Grant that `receiver` writes into the heap of `owner`."""
    return _heap_of(launch, owner) + _field(launch, _GRANTS) + receiver.to(tl.int64) * _GRANT_BYTES


@triton.jit
def _ready_word(launch, receiver, sender, index):
    row = sender.to(tl.int64) * _field(launch, _READY_STRIDE) + index
    return _heap_of(launch, receiver) + _field(launch, _READY) + row * 8


@triton.jit
def _abort_word(launch, owner, accuser):
    return _heap_of(launch, owner) + _field(launch, _ABORTS) + accuser.to(tl.int64) * 8


@triton.jit
def _host_says(launch, pe):
    return _look(_field(launch, _HOST_SAYS) + pe.to(tl.int64) * 8)


@triton.jit
def is_aborted(launch):
    """Return whether this PE has given up the launch: whoever waited has left, and the output will be NaN."""
    return _look(_local(launch, _ABORT)) != 0


# ---- timelines: cuda/platform/trace.cuh -----------------------------------------------------------------------------

_TEAM_BYTES = size_of("Team")
_SINK = tl.constexpr(_TEAM_BYTES.value + 8)  # after the Team and a word of zero
_SINK_BLOCKS, _SINK_NUM, _SINK_USED = (
    _at("TraceSink", "blocks"),
    _at("TraceSink", "num_blocks"),
    _at("TraceSink", "used"),
)
_BLOCK_BYTES, _TOTALS, _SPANS = size_of("TraceBlock"), _at("TraceBlock", "totals"), _at("TraceBlock", "spans")
_BLOCK_ID, _BLOCK_TEAM, _BLOCK_EPOCH = (
    _at("TraceBlock", "operator_id"),
    _at("TraceBlock", "team"),
    _at("TraceBlock", "epoch"),
)
_BLOCK_END, _BLOCK_END_NS = _at("TraceBlock", "end"), _at("TraceBlock", "end_ns")
_TOTALS_WORDS = tl.constexpr(size_of("TraceTotals").value // 8)
_T_WG, _T_WGS, _T_WARPS = _at("TraceTotals", "wg"), _at("TraceTotals", "num_wgs"), _at("TraceTotals", "num_warps")
_T_UNIT, _T_BEGIN, _T_BEGIN_NS = _at("TraceTotals", "unit"), _at("TraceTotals", "begin"), _at("TraceTotals", "begin_ns")
_T_WAITED, _T_NUM = _at("TraceTotals", "waited"), _at("TraceTotals", "num_spans")
_SPAN_BYTES, _MOST_SPANS = size_of("TraceSpan"), constant("kTraceSpans")
_S_BEGIN, _S_END, _S_INDEX = _at("TraceSpan", "begin"), _at("TraceSpan", "end"), _at("TraceSpan", "index")
_S_KIND, _S_PEER = _at("TraceSpan", "kind"), _at("TraceSpan", "peer")
_TRACE_WAIT, _TRACE_SEND = constant("kTraceWait"), constant("kTraceSend")


@triton.jit
def _trace_begin(team):
    """Take a TraceBlock; return its address, 0 where there is no room."""
    sink = team.to(tl.int64) + _SINK
    used = tl.load(_words(sink + _SINK_USED))
    number = tl.atomic_add(_words(used), tl.full([], 1, tl.int64), sem="relaxed", scope="gpu")
    block = tl.full([], 0, tl.int64)
    if number < tl.load(_words(sink + _SINK_NUM)):
        block = tl.load(_words(sink + _SINK_BLOCKS)) + number * _BLOCK_BYTES
        totals = block + _TOTALS
        words = tl.arange(0, 32)
        tl.store(_words(totals) + words, tl.zeros([32], tl.int64), mask=words < _TOTALS_WORDS)
        tl.debug_barrier()
        tl.store(_words(totals + _T_WG), tl.program_id(0).to(tl.int64))
        tl.store(_words(totals + _T_WGS), tl.num_programs(0).to(tl.int64))
        if _INTERPRETED:
            tl.store(_words(totals + _T_WARPS), tl.full([], 1, tl.int64))
        else:
            tl.store(_words(totals + _T_WARPS), tl.full([], tl.extra.cuda.num_warps(), tl.int64))
        tl.store(_words(totals + _T_UNIT), tl.full([], 1, tl.int64))
        ns = _clock() + tl.full([], 0, tl.int64)
        tl.store(_words(totals + _T_BEGIN_NS), ns)
        ticks = _ticks() + tl.full([], 0, tl.int64)
        tl.store(_words(totals + _T_BEGIN), ticks)
        tl.debug_barrier()
    return block


@triton.jit
def _trace_span(launch, kind, phase, pe, index, begin, end):
    if launch.trace != 0:
        totals = launch.trace + _TOTALS
        number = tl.atomic_add(_words(totals + _T_NUM), tl.full([], 1, tl.int64), sem="relaxed", scope="gpu")
        tl.atomic_add(_words(totals + _T_WAITED), end - begin, sem="relaxed", scope="gpu")
        if number < _MOST_SPANS:
            span = launch.trace + _SPANS + number * _SPAN_BYTES
            tl.store(_words(span + _S_BEGIN), begin)
            tl.store(_words(span + _S_END), end)
            tl.store(_words(span + _S_INDEX), index + tl.full([], 0, tl.int64))
            tl.store(_words(span + _S_KIND), (phase + tl.full([], 0, tl.int64)) << 32 | kind)  # two 32-bit words
            tl.store(_words(span + _S_PEER), pe.to(tl.int64))  # of warp 0


@triton.jit
def _trace_end(launch):
    if launch.trace != 0:
        tl.debug_barrier()
        ticks = _ticks() + tl.full([], 0, tl.int64)
        tl.store(_words(launch.trace + _BLOCK_END), ticks)
        ns = _clock() + tl.full([], 0, tl.int64)
        tl.store(_words(launch.trace + _BLOCK_END_NS), ns)
        tl.store(_words(launch.trace + _BLOCK_EPOCH), launch.epoch)
        tl.store(_words(launch.trace + _BLOCK_TEAM), _field(launch, _CONTRACT + 8))
        tl.store(_words(launch.trace + _BLOCK_ID), _field(launch, _CONTRACT))


# ---- errors ---------------------------------------------------------------------------------------------------------

_R_STATE, _R_KIND, _R_PHASE = _at("ErrorRecord", "state"), _at("ErrorRecord", "kind"), _at("ErrorRecord", "phase")
_R_PEER, _R_INDEX, _R_EPOCH = _at("ErrorRecord", "peer"), _at("ErrorRecord", "index"), _at("ErrorRecord", "epoch")
_R_SEEN, _R_WAITED, _R_SIDE = (
    _at("ErrorRecord", "seen"),
    _at("ErrorRecord", "waited_ns"),
    _at("ErrorRecord", "other_side"),
)
_R_OWN, _R_THEIRS = _at("ErrorRecord", "own_contract"), _at("ErrorRecord", "peer_contract")
_I_STATE, _I_KIND, _I_OPERATOR = (_at("InputErrorRecord", each) for each in ("state", "kind", "operator_id"))
_I_OUTER, _I_INNER = _at("InputErrorRecord", "outer"), _at("InputErrorRecord", "inner")
_I_VALUE, _I_LIMIT = _at("InputErrorRecord", "value"), _at("InputErrorRecord", "limit")


@triton.jit
def _store(address, value):
    tl.store(_words(address), value + tl.full([], 0, tl.int64))


@triton.jit
def _always(launch):
    """Return the address of a word that is zero, which follows the Team."""
    return launch.team.to(tl.int64) + _TEAM_BYTES


@triton.jit
def _side_to_tell(launch, blamed, accuser):
    """Return the PE whose contract this PE reports beside its own: one that differs from it."""
    side = blamed
    if blamed == launch.rank:
        side = accuser
    else:
        flag = _look(_grant(launch, launch.rank, blamed) + _GRANT_FLAG)
        if (accuser != launch.rank) & (flag == _flag(launch, _field(launch, _HASH))):
            side = accuser
    return side


@triton.jit
def _raise_abort(launch, kind, phase, peer, index, seen, waited):
    """See raise_abort of cuda/comm/launch.cuh."""
    claimed = tl.atomic_xchg(
        _words(_local(launch, _ERROR_CLAIMED)), tl.full([], 1, tl.int64), sem="acq_rel", scope="gpu"
    )
    if claimed == 0:
        blamed = peer
        if (kind == _PEER_LOST) & ((_host_says(launch, peer) & _SAID_LOST) == 0):
            blamed = launch.rank  # the host interrupts this PE, no matter which peer was waited for
        record = _field(launch, _ERROR)
        _store(record + _R_KIND, kind)
        _store(record + _R_PHASE, phase & _CODE)
        _store(record + _R_PEER, blamed)
        _store(record + _R_INDEX, index)
        _store(record + _R_EPOCH, launch.epoch)
        _store(record + _R_SEEN, seen)
        _store(record + _R_WAITED, waited)
        accuser = launch.rank
        side = blamed
        blame = (tl.full([], 0, tl.int64) + kind) << _BLAME_SHIFT | blamed
        report = _flag(launch, blame)
        if kind == _REPORTED:
            accuser = index.to(tl.int32)
            side = _side_to_tell(launch, blamed, accuser)
            report = seen
        grant = _grant(launch, launch.rank, side)
        is_here = _epoch_of(_look(grant + _GRANT_FLAG)) >= launch.epoch  # else it is still on its way
        _store(record + _R_SIDE, side)
        words = tl.arange(0, 16)
        own = tl.load(_words(launch.team.to(tl.int64) + _CONTRACT) + words, mask=words < _WORDS, other=0)
        theirs = tl.load(_words(grant + _GRANT_CONTRACT) + words, mask=(words < _WORDS) & is_here, other=0)
        tl.store(_words(record + _R_OWN) + words, own, mask=words < _WORDS)
        tl.store(_words(record + _R_THEIRS) + words, theirs, mask=words < _WORDS)
        _release(record + _R_STATE, tl.full([], 1, tl.int64), _always(launch))
        for other in range(launch.size):
            if other != launch.rank:
                _release(_abort_word(launch, other, accuser), report, _always(launch))  # @abort-tells-peers
    _release(_local(launch, _ABORT), launch.epoch, _local(launch, _ABORT))  # the first epoch that was given up stays


@triton.jit
def _give_up(launch, kind: tl.constexpr, blamed, index, seen):
    """Give up for another reason than a wait that took too long."""
    zero = tl.full([], 0, tl.int64)
    _raise_abort(launch, tl.full([], kind, tl.int32), tl.full([], _CREDIT, tl.int32), blamed, index, seen, zero)


@triton.jit
def _peer_gave_up(launch):
    """If a peer gave up this epoch or an earlier one, give up as well, and pass on which PE it blames."""
    has = tl.full([], 0, tl.int1)
    accuser = tl.full([], 0, tl.int32)
    while accuser < launch.size:
        word = _look(_abort_word(launch, launch.rank, accuser))
        if (has == 0) & (word != 0) & (_epoch_of(word) <= launch.epoch):
            blamed = (word & _PE_BITS).to(tl.int32)
            _give_up(launch, _REPORTED, blamed, accuser.to(tl.int64), word)
            has = tl.full([], 1, tl.int1)
        accuser += 1
    return has


@triton.jit
def _has_word(launch, pe, index):
    """Return whether this PE and `pe` have a word of this index; report that they have none."""
    limit = _field(launch, _READY_STRIDE)
    has = (index >= 0) & (index < limit) & (pe >= 0) & (pe < launch.size)  # @word-in-range
    if has == 0:
        claimed = tl.atomic_xchg(_words(_local(launch, _INPUT_CLAIMED)), launch.epoch, sem="acq_rel", scope="gpu")
        record = _field(launch, _INPUT_ERROR)
        if (claimed != launch.epoch) & (_look(record + _I_STATE) == 0):
            _store(record + _I_KIND, NO_SUCH_WORD)
            _store(record + _I_OPERATOR, _field(launch, _CONTRACT))
            _store(record + _I_OUTER, pe)
            _store(record + _I_INNER, launch.size)
            _store(record + _I_VALUE, index)
            _store(record + _I_LIMIT, limit)
            _release(record + _I_STATE, tl.full([], 1, tl.int64), _always(launch))
    return has


# ---- waiting --------------------------------------------------------------------------------------------------------


@triton.jit
def _await_longer(launch, address, peer, phase, index):  # @inlined
    """Look again, until the word has reached this epoch or the launch is given up: `await` of cuda/comm/launch.cuh."""
    first = tl.full([], 0, tl.int64)
    if launch.team.dtype.element_ty == tl.int32:
        first = _ticks() + tl.full([], 0, tl.int64)
    seen = _look(address)
    started = tl.full([], 0, tl.int64)
    was_over = tl.full([], 0, tl.int1)
    goes_on = _epoch_of(seen) < launch.epoch
    looks = tl.full([], 0, tl.int32)
    while goes_on:
        looks += 1
        if looks % _LOOKS == 0:
            if is_aborted(launch) or _peer_gave_up(launch):  # @wait-gives-up
                goes_on = tl.full([], 0, tl.int1)
            else:
                now = _clock() + tl.full([], 0, tl.int64)
                said = _host_says(launch, peer)
                if (started == 0) | ((said & _SAID_PREPARING) != 0):  # @wait-preparing
                    started = now
                is_lost = ((said | _host_says(launch, launch.rank)) & _SAID_LOST) != 0  # @wait-lost
                waited = (now - started) // tl.where(peer == launch.rank, 2, 1)  # a PE is not to blame for a late peer
                is_late = waited > _field(launch, _TIMEOUT)  # @wait-bound
                is_over = is_lost | is_late
                if is_over & was_over:  # at first it looks again: it may not have run since its last look
                    kind = tl.where(is_lost, _PEER_LOST, _TIMED_OUT)
                    _raise_abort(launch, kind, phase, peer, index, seen, now - started)
                    goes_on = tl.full([], 0, tl.int1)
                was_over = is_over
        if goes_on:
            seen = _look(address)
            goes_on = _epoch_of(seen) < launch.epoch
    if launch.team.dtype.element_ty == tl.int32:
        last = _ticks() + tl.full([], 0, tl.int64)
        _trace_span(launch, _TRACE_WAIT, phase, peer, index, first, last)
    return seen


@triton.jit
def _await(launch, address, peer, phase, index):
    """Wait until the word at an address has reached this epoch; return what it was at the last look.

    Bounded, and given up where a PE gives up.
    """
    seen = _look(address)
    if _epoch_of(seen) < launch.epoch:
        seen = _await_longer(launch, address, peer, phase + tl.full([], 0, tl.int32), index)
    return seen


@triton.jit
def _see_in_tile_copies():
    """Let loads by tensor descriptors see what was acquired: they go through another proxy (PTX ISA, "Async proxy")."""
    if not _INTERPRETED and tl.target_info.cuda_capability_geq(9):
        tl.inline_asm_elementwise(
            "fence.proxy.async.global; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def wait(launch, pe, index, phase):
    """Wait for the word `index` that PE `pe` signals to this PE; see what it has put before.

    Args:
        launch: as `begin` returns it.
        pe: a peer.
        index: of the word; from 0.
        phase: what the wait is for, a key of the operator's `phases`; an error has its text.

    Returns:
        False where the launch was given up instead: a time-out, a peer that gave up or ended, another contract. What
        was put is not complete then.
    """
    pe = pe + tl.full([], 0, tl.int32)
    index = index + tl.full([], 0, tl.int64)
    came = _has_word(launch, pe, index)
    if came:
        seen = _await(launch, _ready_word(launch, launch.rank, pe, index), pe, phase, index)
        came = _epoch_of(seen) >= launch.epoch
        _see_in_tile_copies()  # @wait-proxy
    return came


# ---- the launch -----------------------------------------------------------------------------------------------------


@triton.jit
def begin(team, out):
    """Begin the launch, before anything else; the first work-group lets the peers write this PE's output.

    Args:
        team, out: the kernel's first two arguments, as they are.

    Returns:
        The launch, which all other functions take.
    """
    address = team.to(tl.int64)
    ranks = tl.load(_words(address + _RANK))  # rank and size: two 32-bit words
    epoch = tl.load(_words(tl.load(_words(address + _LOCAL)) + _EPOCH)) + 1
    trace = tl.full([], 0, tl.int64)
    if team.dtype.element_ty == tl.int32:
        trace = _trace_begin(team)
    heap = tl.load(_words(address + _HEAP))
    rank, size = (ranks & 0xFFFFFFFF).to(tl.int32), (ranks >> 32).to(tl.int32)
    launch = Launch(team, rank, size, epoch, out.to(tl.int64) - heap, trace)
    if tl.program_id(0) == 0:
        aborted = _look(_local(launch, _ABORT))
        # A launch after one that was given up takes part in nothing.
        if (aborted == 0) | (aborted >= epoch):  # @takes-part
            words = tl.arange(0, 16)
            contract = tl.load(_words(address + _CONTRACT) + words, mask=words < _WORDS, other=0)
            flag = _flag(launch, _field(launch, _HASH))
            for step in range(1, launch.size):
                grant = _grant(launch, (launch.rank + step) % launch.size, launch.rank)
                _store(grant + _GRANT_OUTPUT, launch.output)
                tl.store(_words(grant + _GRANT_CONTRACT) + words, contract, mask=words < _WORDS)
                _release(grant + _GRANT_FLAG, flag, _always(launch))
            # A copy is for this PE's host.
            own = _grant(launch, launch.rank, launch.size + launch.epoch % _COPIES)  # @own-contract
            tl.store(_words(own + _GRANT_CONTRACT) + words, contract, mask=words < _WORDS)
    return launch


@triton.jit
def await_credit(launch, pe):
    """Wait until a PE lets its output be written.

    Args:
        launch: as `begin` returns it.
        pe: a peer, or this PE.

    Returns:
        Where its output is, in bytes from the beginning of its heap (int64); -1 where the launch was given up.
    """
    pe = pe + tl.full([], 0, tl.int32)
    offset = launch.output
    if pe != launch.rank:
        grant = _grant(launch, launch.rank, pe)
        seen = _await(launch, grant + _GRANT_FLAG, pe, _CREDIT, tl.full([], 0, tl.int64))
        offset = tl.full([], -1, tl.int64)
        if _epoch_of(seen) >= launch.epoch:
            is_other = (seen & _LOW_BITS) != _field(launch, _HASH)
            # A PE that is already one launch ahead has compared this launch's contracts itself.
            if (_epoch_of(seen) == launch.epoch) & is_other:  # @contracts-compared
                _give_up(launch, _MISMATCH, pe, tl.full([], 0, tl.int64), seen)
            else:
                offset = tl.load(_words(grant + _GRANT_OUTPUT), volatile=True)  # @granted-output
    return offset


@triton.jit
def await_all_credits(launch):
    """Wait for all peers' credit, before `leave`: so each PE compares its contract with every other's."""
    for step in range(1, launch.size):
        await_credit(launch, (launch.rank + step) % launch.size)


@triton.jit
def offset_of(launch, pointer):
    """Return where a pointer into this PE's heap is, in bytes from the heap's beginning: the same on all PEs.

    For a tensor of `po.empty`, whose copies on the peers `get_block` reads.
    """
    return pointer.to(tl.int64) - _field(launch, _HEAP)


@triton.jit
def peer_ptr(launch, pe, offset, dtype: tl.constexpr):
    """Return a pointer into a PE's heap.

    Args:
        launch: as `begin` returns it.
        pe: any PE.
        offset: in bytes, a multiple of 16: from `await_credit`, or `offset_of`.
        dtype: of what it points to.
    """
    return tl.multiple_of((_heap_of(launch, pe) + offset).to(tl.pointer_type(dtype)), 16)


@triton.jit
def put_block(launch, pe, offset, rows, cols, stride, value, mask):
    """Store a block of a row-major matrix in a PE's heap, 16 bytes at a time.

    Args:
        launch: as `begin` returns it.
        pe: any PE, whose credit has come.
        offset: of the matrix, in bytes.
        rows, cols: `[R]` and `[C]`, of the elements. Columns come in whole runs: cols[0] is a multiple of 16 bytes.
        stride: elements from row to row; with 16-byte stores a multiple of 16 bytes.
        value: `[R, C]`.
        mask: `[R, C]`: what is stored.
    """
    pointers = peer_ptr(launch, pe, offset, value.dtype) + rows.to(tl.int64)[:, None] * stride + cols[None, :]
    tl.store(tl.multiple_of(pointers, (1, 16)), value, mask=mask)  # @put-width


@triton.jit
def get_block(launch, pe, offset, rows, cols, stride, dtype: tl.constexpr, mask):
    """Load a block of a row-major matrix from a PE's heap, 16 bytes at a time; 0 where it is masked.

    The PE has written it in front of this launch, and its credit has come (`await_credit`). It must not write it again
    before this PE has loaded it: signal to it after the load, and let it wait for that.

    Args:
        launch, pe, offset, rows, cols, stride, mask: as for `put_block`.
        dtype: of the matrix.
    """
    pointers = peer_ptr(launch, pe, offset, dtype) + rows.to(tl.int64)[:, None] * stride + cols[None, :]
    return tl.load(tl.multiple_of(pointers, (1, 16)), mask=mask, other=0.0)  # @get-width


@triton.jit
def signal(launch, pe, index):
    """Let a peer's `wait` pass: all that this work-group has stored before is there then.

    Nothing is signaled after the launch was given up.

    Args:
        launch: as `begin` returns it.
        pe: a peer.
        index: of the word that it waits for. Each of its words has one work-group that signals it, once a launch.
    """
    pe = pe + tl.full([], 0, tl.int32)
    index = index + tl.full([], 0, tl.int64)
    if _has_word(launch, pe, index):
        address = _ready_word(launch, pe, launch.rank, index)
        if launch.team.dtype.element_ty == tl.int32:
            now = _ticks() + tl.full([], 0, tl.int64)
            _trace_span(launch, _TRACE_SEND, 0, pe, address - _heap_of(launch, pe), now, now)
        _release(address, _flag(launch, _field(launch, _HASH)), _local(launch, _ABORT))  # @signal-unless-aborted


@triton.jit
def leave(launch, out, nbytes):
    """End the launch, after everything else; the last work-group fills the output with NaN if it was given up.

    Args:
        launch: as `begin` returns it.
        out: the kernel's second argument.
        nbytes: of the output.
    """
    tl.debug_barrier()  # @depart-barrier
    one = tl.full([], 1, tl.int64)
    departed = tl.atomic_add(_words(_local(launch, _DEPARTED)), one, sem="acq_rel", scope="gpu")  # @depart-order
    if departed + 1 == tl.num_programs(0):
        if is_aborted(launch):  # @poison
            halves = out.to(tl.int64).to(tl.pointer_type(tl.int16))
            for first in range(0, nbytes // 2, 1024):
                place = first + tl.arange(0, 1024)
                tl.store(halves + place, tl.full([1024], -1, tl.int16), mask=place < nbytes // 2)
        _store(_local(launch, _TICKET), 0)
        _store(_local(launch, _DEPARTED), 0)  # @departed-reset
        _store(_local(launch, _EPOCH), launch.epoch)  # @epoch-advance
    if launch.team.dtype.element_ty == tl.int32:
        _trace_end(launch)
