"""What Triton makes of the device functions: who loads, who stores, and in which order. Needs no GPU.

Each rule is read in the code that is compiled for an H100: most of it runs on the CPU (ptx_work_group.py), kernels with
tensor cores are only read. A mutation of device.py breaks each rule that device.py sees to.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import triton
import triton.language as tl
from device_mutations import SOURCE, TAG, mutated
from ptx import Instruction, compiled, ptxas_report, read
from ptx_launch import EPOCH, FLAG, PEER, RANK, SIZE, Launch, flag_of
from ptx_work_group import Event, answers
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from persistent_ops.triton import device
from persistent_ops.triton.compiled import problem_of

RELEASE = tuple(map(int, triton.__version__.split(".")[:2]))
INDEX = 3  # of the word that is signaled
LATE = flag_of(EPOCH - 1)


@pytest.fixture(scope="module", autouse=True)
def _an_h100(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let Triton believe that it has a GPU; its cache does not see that."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        target = GPUTarget("cuda", 90, 32)
        patch.setattr(type(driver), "active", SimpleNamespace(get_current_target=lambda: target))
        yield


# ---- kernels ---------------------------------------------------------------------------------------------------------

TYPES = {"team": "*i64", "out": "*bf16", "x": "*bf16", "came": "*i64", "rows": "i32", "stride": "i32"}


@functools.cache
def kernels(pot: ModuleType) -> SimpleNamespace:
    """Return kernels that use the device functions of a module."""

    @triton.jit
    def exchange(team, out, x, came, rows, stride):
        """Send a block to the next PE, wait for one and get one."""
        launch = pot.begin(team, out)
        peer = (launch.rank + 1) % launch.size
        row, col = tl.arange(0, 16), tl.arange(0, 64)
        mask = tl.broadcast_to((row < rows)[:, None], (16, 64))
        at = pot.await_credit(launch, peer)
        if at >= 0:
            value = tl.load(x + row[:, None] * 64 + col[None, :])
            pot.put_block(launch, peer, at, row, col, stride, value, mask)
            pot.signal(launch, peer, 3)
        arrived = pot.wait(launch, peer, 3, 16)
        tl.store(came, arrived.to(tl.int64))
        if arrived:
            block = pot.get_block(launch, peer, pot.offset_of(launch, x), row, col, stride, tl.bfloat16, mask)
            tl.store(out + row[:, None] * 64 + col[None, :], block)
        pot.await_all_credits(launch)
        pot.leave(launch, out, 2048)

    @triton.jit
    def misdirect(team, out):
        """Signal with an index that no word has."""
        launch = pot.begin(team, out)
        pot.signal(launch, 2, 99)

    @triton.jit
    def fill(team, out):
        """Store something at the end."""
        launch = pot.begin(team, out)
        tl.debug_barrier()  # what follows reuses shared memory without another one
        tl.store(out + tl.arange(0, 128), tl.full([128], 1, tl.bfloat16))
        pot.leave(launch, out, 256)

    @triton.jit
    def copy(team, out, stride):
        """Get a block from a PE, and put it to another one."""
        launch = pot.begin(team, out)
        row, col = tl.arange(0, 16), tl.arange(0, 64)
        mask = tl.broadcast_to((row < launch.size)[:, None], (16, 64))
        block = pot.get_block(launch, 0, 0, row, col, stride, tl.bfloat16, mask)
        pot.put_block(launch, 2, 0, row, col, stride, block, mask)

    @triton.jit
    def product(team, out, a, b, K, TMA: tl.constexpr):
        """Wait for `a` and `b`, multiply them, send the product."""
        launch = pot.begin(team, out)
        row, col, at = tl.arange(0, 128), tl.arange(0, 128), tl.arange(0, 64)
        acc = tl.zeros([128, 128], tl.float32)
        if pot.wait(launch, 2, 0, 16):
            for k in range(0, K, 64):
                if TMA:
                    acc = tl.dot(a.load([0, k]), b.load([0, k]).T, acc)
                else:
                    x = tl.load(a + row[:, None] * K + (k + at)[None, :])
                    acc = tl.dot(x, tl.load(b + col[None, :] * K + (k + at)[:, None]), acc)
        mask = tl.full([128, 128], 1, tl.int1)
        pot.put_block(launch, 2, launch.output, row, col, 128, acc.to(tl.bfloat16), mask)
        pot.signal(launch, 2, 0)

    @triton.jit
    def gemm_all_to_all(team, out, a, b, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
        launch = pot.begin(team, out)
        rows = M // launch.size
        across = tl.cdiv(N, BN)
        tiles = tl.cdiv(rows, BM) * across  # for one PE
        for i in range(tl.program_id(0), launch.size * tiles, tl.num_programs(0)):
            pe = (launch.rank + 1 + i // tiles) % launch.size
            row, col = i % tiles // across * BM, i % tiles % across * BN
            acc = tl.zeros([BM, BN], tl.float32)
            for k in range(0, K, BK):
                acc = tl.dot(a.load([pe * rows + row, k]), b.load([col, k]).T, acc)
            at = pot.await_credit(launch, pe)
            if at >= 0:
                r, c = row + tl.arange(0, BM), col + tl.arange(0, BN)
                mask = (r < rows)[:, None] & (c < N)[None, :]
                pot.put_block(launch, pe, at, launch.rank * rows + r, c, N, acc.to(out.dtype.element_ty), mask)
                pot.signal(launch, pe, i % tiles)
        for i in range(tl.program_id(0), (launch.size - 1) * tiles, tl.num_programs(0)):
            pot.wait(launch, (launch.rank + launch.size - 1 - i // tiles) % launch.size, i % tiles, 16)
        pot.await_all_credits(launch)
        pot.leave(launch, out, M * N * 2)

    return SimpleNamespace(
        **{kernel.fn.__name__: kernel for kernel in (exchange, misdirect, fill, copy, product, gemm_all_to_all)}
    )


@functools.cache
def exchange_of(pot: ModuleType, warps: int = 4, *, is_traced: bool = False) -> Any:
    types = {**TYPES, "team": "*i32" if is_traced else "*i64"}
    return compiled(kernels(pot).exchange, types, unaligned="stride", num_warps=warps)


def exchanged(pot: ModuleType, launch: Launch | None = None, warps: int = 4, *, is_traced: bool = False) -> Launch:
    """Run the kernel `exchange`."""
    launch = launch or Launch()
    arguments = {"x": launch.x, "came": launch.came, "rows": 16, "stride": 64}
    launch.run(exchange_of(pot, warps, is_traced=is_traced), arguments, is_traced=is_traced)
    return launch


def too_late() -> Launch:
    launch = Launch()
    launch.set(launch.ready(RANK, PEER, INDEX), LATE)
    return launch


def launched(kernel: Any) -> Launch:
    """Run a kernel without other arguments."""
    launch = Launch()
    launch.run(compiled(kernel, {"team": "*i64", "out": "*bf16"}), {})
    return launch


# ---- what the threads have done --------------------------------------------------------------------------------------


def has(event: Event | Instruction, *suffixes: str) -> bool:
    return {*suffixes} <= {*event.op.split(".")}


def places_of(events: list[Event], addresses: range | int, op: str) -> list[int]:
    """Return which events access a word, or anything in a range."""
    found = range(addresses, addresses + 1) if isinstance(addresses, int) else addresses
    return [
        number
        for number, event in enumerate(events)
        if event.op.startswith(op) and any(address in found for address in event.addresses)
    ]


def widths(pot: ModuleType, op: str) -> set[int]:
    """Return how many bytes a thread accesses at once, in the kernel `copy`."""
    types = {"team": "*i64", "out": "*bf16", "stride": "i32"}
    code = read(compiled(kernels(pot).copy, types, unaligned="stride").asm["ptx"])
    found = [re.search(r"(?:\.v(\d))?\.\w(\d+)$", each.op) for each in code.instructions if has(each, op, "global")]
    return {int(each.group(1) or 1) * int(each.group(2)) // 8 for each in found if each}


def follows_barrier(events: list[Event], place: int) -> bool:
    """Return whether a barrier is between an event and all stores before it."""
    before = [
        event for event in events[:place] if has(event, "bar") or (has(event, "st") and not has(event, "release"))
    ]
    return bool(before) and has(before[-1], "bar")


# ---- rules of device.py: each takes the module, and raises AssertionError --------------------------------------------


def check_a_look_is_an_acquire_by_one_thread_and_a_barrier(pot: ModuleType) -> None:
    launch = Launch()
    word = launch.ready(RANK, PEER, INDEX)
    launch.memory.answers[word] = answers(LATE, FLAG, after=3)
    events = exchanged(pot, launch).events
    looks = [number for number, event in enumerate(events) if has(event, "acquire", "sys")]
    assert len([number for number in looks if word in events[number].addresses]) == 4
    assert len(places_of(events, word, "ld")) == 4
    for number in looks:
        assert events[number].threads == (0,) and has(events[number + 1], "bar")


def check_every_word_is_looked_at(pot: ModuleType) -> None:
    launch = exchanged(pot, too_late())
    seen = {event.addresses[0] for event in launch.events if has(event, "acquire", "sys")}
    others = [pe for pe in range(SIZE) if pe != RANK]
    assert seen >= {
        launch.ready(RANK, PEER, INDEX),
        launch.local("abort"),
        launch.host_says(PEER),
        launch.host_says(RANK),
        *(launch.grant(RANK, pe) for pe in others),
        *(launch.abort(RANK, pe) for pe in range(SIZE)),
    }
    launch = launched(kernels(pot).misdirect)
    assert places_of(launch.events, launch.input_error(), "ld")


def check_a_wait_ends(pot: ModuleType) -> None:
    for warps in (1, 4, 8):
        for is_traced in (False, True):
            launch = exchanged(pot, too_late(), warps, is_traced=is_traced)
            assert launch.memory.word(launch.came) == 0 and launch.kind_of_error() == "kTimeout"
            assert launch.memory.word(launch.local("abort")) == EPOCH


def check_threads_agree_on_what_others_write(pot: ModuleType) -> None:
    """Each access finds another value; the emulator raises where threads part."""
    launch = too_late()
    launch.memory.answers[launch.abort(RANK, 0)] = answers(0, flag_of(EPOCH, 1 << 14 | PEER), after=3)
    assert exchanged(pot, launch).kind_of_error() == "kReportedByPeer"
    launch = too_late()
    launch.memory.answers[launch.host_says(PEER)] = answers(0, 1, after=3)
    assert exchanged(pot, launch).kind_of_error() == "kPeerLost"
    launch = Launch()
    launch.memory.answers[launch.grant(RANK, PEER)] = answers(LATE, flag_of(EPOCH, 0x4321), after=67)
    assert exchanged(pot, launch).kind_of_error() == "kContractMismatch"


def check_a_release_is_behind_a_barrier(pot: ModuleType) -> None:
    for launch in (exchanged(pot), exchanged(pot, too_late()), launched(kernels(pot).misdirect)):
        releases = [number for number, event in enumerate(launch.events) if has(event, "st", "release")]
        assert releases and all(follows_barrier(launch.events, number) for number in releases)


def check_a_release_is_a_store_of_one_thread(pot: ModuleType) -> None:
    launch = exchanged(pot, too_late())
    words = [launch.ready(PEER, RANK, INDEX), launch.local("abort"), launch.error]
    words += [word(pe, RANK) for pe in range(SIZE) if pe != RANK for word in (launch.grant, launch.abort)]
    for word in words:
        (place,) = places_of(launch.events, word, "st")
        assert has(launch.events[place], "release", "sys") and launch.events[place].threads == (0,)


def check_nothing_is_signaled_after_an_abort(pot: ModuleType) -> None:
    for aborted, signaled in ((0, FLAG), (EPOCH, 0)):
        launch = Launch()
        launch.set(launch.local("abort"), aborted)
        exchanged(pot, launch)
        assert launch.memory.word(launch.ready(PEER, RANK, INDEX)) == signaled


def check_a_put_stores_16_bytes(pot: ModuleType) -> None:
    assert widths(pot, "st") == {8, 16}  # 8: of the protocol


def check_a_get_loads_16_bytes(pot: ModuleType) -> None:
    assert widths(pot, "ld") == {8, 16}


def check_a_put_is_between_credit_and_signal_and_a_get_behind_the_wait(pot: ModuleType) -> None:
    launch = Launch()
    launch.memory.answers[launch.grant(RANK, PEER)] = answers(LATE, FLAG, after=67)
    launch.memory.answers[launch.ready(RANK, PEER, INDEX)] = answers(LATE, FLAG, after=67)
    events = exchanged(pot, launch).events
    puts = places_of(events, launch.output_of(PEER), "st")
    assert places_of(events, launch.grant(RANK, PEER), "ld")[67] < puts[0]
    assert puts[-1] < places_of(events, launch.ready(PEER, RANK, INDEX), "st")[0]
    assert places_of(events, launch.ready(RANK, PEER, INDEX), "ld")[-1] < places_of(events, launch.x_of(PEER), "ld")[0]


def check_a_wait_is_ordered_with_loads_by_tensor_descriptors(pot: ModuleType) -> None:
    launch = exchanged(pot)
    look = places_of(launch.events, launch.ready(RANK, PEER, INDEX), "ld")[-1]
    assert [(event.op, len(event.threads)) for event in launch.events[look + 1 : look + 3]] == [
        ("bar.sync", 128),
        ("fence.proxy.async.global", 128),
    ]


def check_a_work_group_departs_behind_a_barrier(pot: ModuleType) -> None:
    launch = launched(kernels(pot).fill)
    (place,) = places_of(launch.events, launch.local("departed"), "atom")
    assert follows_barrier(launch.events, place)


def check_a_departure_is_an_acquire_and_a_release(pot: ModuleType) -> None:
    launch = launched(kernels(pot).fill)
    (place,) = places_of(launch.events, launch.local("departed"), "atom")
    assert has(launch.events[place], "acq_rel", "gpu") and launch.events[place].threads == (0,)


def check_nothing_is_called(pot: ModuleType) -> None:
    assert ".func" not in exchange_of(pot).asm["ptx"]


CHECKS = [value for name, value in list(globals().items()) if name.startswith("check_")]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_device_functions(check: Callable[[ModuleType], None]) -> None:
    check(device)


# By tag: what becomes what, and the rule that it breaks.
A_CLOCK_OF_EACH_THREAD = (
    'return tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)'
)
MUTATIONS: Mapping[str, tuple[str, str, Callable[[ModuleType], None]]] = {
    "look-acquire": (
        'tl.atomic_add(_words(address), tl.full([], 0, tl.int64), sem="acquire", scope="sys")',
        "tl.load(_words(address))",
        check_threads_agree_on_what_others_write,
    ),
    "release-barrier": ("tl.debug_barrier()", "pass", check_a_release_is_behind_a_barrier),
    "release-one-thread": ("@q st", "st", check_a_release_is_a_store_of_one_thread),
    "release-order": ("st.release.sys", "st.relaxed.sys", check_a_release_is_a_store_of_one_thread),
    "one-clock": ("return tl.max(times, 0)", A_CLOCK_OF_EACH_THREAD, check_a_wait_ends),
    "inlined": ("@triton.jit", "@triton.jit(noinline=True)", check_nothing_is_called),
    "wait-bound": ("> _field(launch, _TIMEOUT)", "< 0", check_a_wait_ends),
    "wait-proxy": ("_see_in_tile_copies()", "pass", check_a_wait_is_ordered_with_loads_by_tensor_descriptors),
    "put-width": ("tl.multiple_of(pointers, (1, 16))", "pointers", check_a_put_stores_16_bytes),
    "get-width": ("tl.multiple_of(pointers, (1, 16))", "pointers", check_a_get_loads_16_bytes),
    "signal-unless-aborted": (
        "_local(launch, _ABORT)",
        "_always(launch)",
        check_nothing_is_signaled_after_an_abort,
    ),
    "depart-barrier": ("tl.debug_barrier()", "pass", check_a_work_group_departs_behind_a_barrier),
    "depart-order": ("acq_rel", "relaxed", check_a_departure_is_an_acquire_and_a_release),
}
MENDED = {"depart-barrier": (3, 9)}  # from which release on Triton does it by itself (PR 10816)


def test_each_tag_has_a_mutation() -> None:
    assert sorted(TAG.findall(SOURCE)) == sorted(MUTATIONS)


@pytest.mark.parametrize("tag", MUTATIONS)
def test_a_mutation_is_noticed(tag: str, tmp_path: Path) -> None:
    old, new, check = MUTATIONS[tag]
    mutant = mutated(tmp_path, tag, old, new)
    if tag in MENDED and MENDED[tag] <= RELEASE:
        check(mutant)
    else:
        with pytest.raises(AssertionError):
            check(mutant)


# ---- kernels with tensor cores ---------------------------------------------------------------------------------------


def descriptor(rows: int, columns: int) -> str:
    return f"tensordesc<bf16[{rows}, {columns}]>"


def is_release(each: Instruction) -> bool:
    return has(each, "st", "release")


@pytest.mark.parametrize(("kind", "load"), [("*bf16", "cp.async.cg"), (descriptor(128, 64), "cp.async.bulk.tensor")])
def test_a_product_is_between_its_wait_and_its_signal(kind: str, load: str) -> None:
    types = {"team": "*i64", "out": "*bf16", "a": kind, "b": kind, "K": "i32"}
    code = read(compiled(kernels(device).product, types, TMA="desc" in kind, num_stages=3).asm["ptx"])
    loads = code.places(lambda each: each.op.startswith(load))
    assert loads and not loads & code.reached(0, lambda each: each.op == "fence.proxy.async.global")  # of `wait`
    puts = code.places(lambda each: has(each, "st", "global", "v4"))
    signals = code.places(is_release) & set().union(*map(code.reached, puts))
    assert signals and not puts & set().union(*map(code.reached, signals))


def test_a_gemm_has_no_spills_and_no_serialized_products() -> None:
    types = {"a": descriptor(128, 64), "b": descriptor(256, 64), "M": "i32", "N": "i32", "K": "i32"}
    kernel = compiled(
        kernels(device).gemm_all_to_all,
        {"team": "*i64", "out": "*bf16", **types},
        BM=128,
        BN=256,
        BK=64,
        num_warps=8,
        num_stages=3,
    )
    report = ptxas_report(kernel.asm["ptx"])
    assert "0 bytes spill stores, 0 bytes spill loads" in report and "arning" not in report, report


# ---- what Triton does by itself, which is why device.py has these rules ----------------------------------------------


@triton.jit
def look_in_vain(team, out):
    device._look(team)


@triton.jit
def release_by_an_atomic(team, out):
    tl.store(out + tl.arange(0, 128), tl.full([128], 1, tl.bfloat16))
    tl.atomic_xchg(team, tl.full([], 1, tl.int64), sem="release", scope="sys")


@triton.jit
def count(team, out):
    code: tl.constexpr = "red.relaxed.gpu.global.add.u64 [$1], 1; mov.u32 $0, 0;"
    tl.inline_asm_elementwise(code, "=r,l", [team.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def look_in_a_loop(team, out, a, K):
    place = tl.arange(0, 64)
    acc = tl.zeros([64, 64], tl.float32)
    for k in range(0, K, 64):
        seen = device._look(team + k)
        x = tl.load(a + place[:, None] * K + (k + place)[None, :])
        acc = tl.dot(x + seen.to(tl.bfloat16), x.T, acc)
    tl.store(out + place[:, None] * 64 + place[None, :], acc.to(tl.bfloat16))


@triton.jit
def store_in_bulk(team, out, x, K, IN_LOOP: tl.constexpr):
    place = tl.arange(0, 64)
    block = out + place[:, None] * 64 + place[None, :]
    if IN_LOOP:
        for k in range(0, K):
            x.store([k * 64, 0], tl.load(block + k * 4096))
            device._release(team, tl.full([], 1, tl.int64), team)
    else:
        x.store([0, 0], tl.load(block))
        device._release(team, tl.full([], 1, tl.int64), team)


def test_a_look_whose_result_is_not_used_vanishes() -> None:
    ptx = compiled(look_in_vain, {"team": "*i64", "out": "*bf16"}).asm["ptx"]
    assert ("acquire" in ptx) == (RELEASE >= (3, 8))


def test_an_atomic_release_has_no_barrier() -> None:
    events = launched(release_by_an_atomic).events
    (place,) = [number for number, event in enumerate(events) if has(event, "atom", "release")]
    assert follows_barrier(events, place) == (RELEASE >= (3, 9))


def test_every_thread_runs_scalar_inline_assembly() -> None:
    (event,) = launched(count).events
    assert has(event, "red") and len(event.threads) == 128


def test_loads_of_a_loop_go_before_the_looks_in_it() -> None:
    types = {"team": "*i64", "out": "*bf16", "a": "*bf16", "K": "i32"}
    code = read(compiled(look_in_a_loop, types, num_stages=3).asm["ptx"])
    loads = code.places(lambda each: each.op.startswith("cp.async.cg"))
    assert loads & code.reached(0, lambda each: has(each, "acquire"))


@pytest.mark.parametrize("is_in_loop", [False, True])
def test_a_bulk_store_that_no_full_wait_follows_is_refused(is_in_loop: bool) -> None:
    types = {"team": "*i64", "out": "*bf16", "x": descriptor(64, 64), "K": "i32"}
    kernel = compiled(store_in_bulk, types, IN_LOOP=is_in_loop, num_stages=3)
    code = read(kernel.asm["ptx"])
    stores = code.places(lambda each: each.op.startswith("cp.async.bulk.tensor"))
    unwaited = set().union(
        *(code.reached(store, lambda each: each.op == "cp.async.bulk.wait_group") for store in stores)
    )
    is_covered = not unwaited & code.places(is_release)
    assert stores and is_covered == (RELEASE >= (3, 8) and not is_in_loop)
    assert is_covered == (problem_of(kernel.asm, kernel.metadata) == "")
