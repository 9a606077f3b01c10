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
from ptx_kernels import kernels_of
from ptx_launch import EPOCH, FLAG, PEER, RANK, SIZE, Launch, flag_of
from ptx_work_group import Event, answers
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from persistent_ops.triton import device
from persistent_ops.triton.compiled import Compiled, problem_of

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
def exchange_of(pot: ModuleType, warps: int = 4, *, is_traced: bool = False) -> Any:
    types = {**TYPES, "team": "*i32" if is_traced else "*i64"}
    return compiled(kernels_of(pot).exchange, types, unaligned="stride", num_warps=warps)


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
    code = read(compiled(kernels_of(pot).copy, types, unaligned="stride").asm["ptx"])
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
    launch = launched(kernels_of(pot).misdirect)
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
    for launch in (exchanged(pot), exchanged(pot, too_late()), launched(kernels_of(pot).misdirect)):
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
    launch = launched(kernels_of(pot).fill)
    (place,) = places_of(launch.events, launch.local("departed"), "atom")
    assert follows_barrier(launch.events, place)


def check_a_departure_is_an_acquire_and_a_release(pot: ModuleType) -> None:
    launch = launched(kernels_of(pot).fill)
    (place,) = places_of(launch.events, launch.local("departed"), "atom")
    assert has(launch.events[place], "acq_rel", "gpu") and launch.events[place].threads == (0,)


def check_nothing_is_called(pot: ModuleType) -> None:
    kernel = exchange_of(pot)
    assert problem_of(kernel.asm, kernel.metadata) == ""


CHECKS = [value for name, value in list(globals().items()) if name.startswith("check_")]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_device_functions(check: Callable[[ModuleType], None]) -> None:
    check(device)


# By tag: what becomes what, and the rule that it breaks.
A_CLOCK_OF_EACH_THREAD = (
    'return tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)'
)
CHANGES: Mapping[str, tuple[str, str, Callable[[ModuleType], None]]] = {
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
    tags, tests = TAG.findall(SOURCE), "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    assert len(tags) == len({*tags}) and {*CHANGES} <= {*tags}
    assert not [tag for tag in tags if f'"{tag}"' not in tests]


@pytest.mark.parametrize("tag", CHANGES)
def test_a_mutation_is_noticed(tag: str, tmp_path: Path) -> None:
    old, new, check = CHANGES[tag]
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
    kernel = compiled(kernels_of(device).product, types, TMA="desc" in kind, num_stages=3)
    Compiled(kernel)  # it takes its parameters as they are passed
    code = read(kernel.asm["ptx"])
    loads = code.places(lambda each: each.op.startswith(load))
    assert loads and not loads & code.reached(0, lambda each: each.op == "fence.proxy.async.global")  # of `wait`
    puts = code.places(lambda each: has(each, "st", "global", "v4"))
    signals = code.places(is_release) & set().union(*map(code.reached, puts))
    assert signals and not puts & set().union(*map(code.reached, signals))


def test_a_gemm_has_no_spills_and_no_serialized_products() -> None:
    types = {"a": descriptor(128, 64), "b": descriptor(256, 64), "M": "i32", "N": "i32", "K": "i32"}
    kernel = compiled(
        kernels_of(device).gemm_all_to_all,
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


@triton.jit
def describe(team, out):
    place = tl.arange(0, 64)
    block = tl.make_tensor_descriptor(out, [64, 64], [64, 1], [64, 64]).load([0, 0])
    tl.store(out + place[:, None] * 64 + place[None, :], block)


@pytest.mark.parametrize(
    ("kernel", "options", "says"),
    [(describe, {}, "scratch memory"), (release_by_an_atomic, {"num_ctas": 2}, "num_ctas")],
)
def test_what_has_another_order_is_refused(kernel: Any, options: Mapping[str, Any], says: str) -> None:
    with pytest.raises(NotImplementedError, match=says):
        Compiled(compiled(kernel, {"team": "*i64", "out": "*bf16"}, **options))


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
