"""The world of this PE: its peers, their backend, and what they share."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import dataclasses
import functools
import logging
import os
import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from . import pe_threads
from .backend import Backend, Kernel, KernelRequest, LaunchShape
from .bootstrap.connection import Bootstrap
from .call_order import CallOrder
from .compile.description import COMM, describe
from .contract import Contract, LaunchKind
from .errors import BootstrapError, PersistentOpsError, to_raise
from .heap import OutputPool, SymmetricHeap
from .operator import Operator
from .program_order import keep_order_on
from .residency import Residency
from .site import Kept
from .stream_order import Collective, in_order
from .team import ALONE, WORLD, Team
from .torch_private import backward_pass
from .tracing import Tracer
from .workspace import Workspace

__all__ = ["SIDE_READY_WORDS", "World", "adopt", "current", "finalize", "for_call", "is_initialized"]

_log = logging.getLogger("persistent_ops")
_LONGEST_FAREWELL_S = {"cpu": 5.0, "cuda": 15.0}  # by device; on GPUs it costs NVSHMEM's end where a peer comes later
_PATIENCE_S = 30.0  # of who leaves or recovers, for launches that still wait for peers


class _OfThread(threading.local):
    """The state of which each thread has one."""

    world: World | None = None


class _Admission(threading.local):
    """The world whose operators a thread may call, by its token: the thread may outlive it, and must not keep it."""

    token: object = None


_process_world: World | None = None
_thread_worlds = _OfThread()
_admitted = _Admission()  # a thread's number is given out again
_open: set[World] = set()  # the worlds of this process and of the PEs that are threads of it
_was_forked = False  # whether this process was forked from one that had a world
_BARRIER = Operator("barrier", ())
_BESIDE = LaunchKind("agreement on launches side by side", (), has_kernel=False)
_EMPTY = LaunchKind("allocation in the symmetric heap (po.empty, po.to_symmetric)", (), has_kernel=False)
_FREE = LaunchKind("giving back memory of the symmetric heap (po.free)", (), has_kernel=False)
_SIDE = LaunchKind("opening of a workspace beside the world's own", (), has_kernel=False)
SIDE_READY_WORDS = 64
_compiling_ahead = threading.BoundedSemaphore(os.cpu_count() or 1)


class World:
    """Everything that one PE knows and owns; `po.init()` makes it, operators take it from `current()`."""

    def __init__(self, bootstrap: Bootstrap, backend: Backend, operator_timeout: float) -> None:
        self.bootstrap = bootstrap
        self.backend = backend
        self.rank = bootstrap.rank
        self.size = bootstrap.world_size
        self.heap = SymmetricHeap(backend, bootstrap)
        self.workspace = Workspace(backend, bootstrap, self.heap, operator_timeout)
        self._side_workspaces: dict[str, Workspace] = {}
        self.residency = Residency(backend.sm, backend.num_sms)
        self._runs_beside = False
        self._told: tuple[frozenset[int], frozenset[int]] = (frozenset(), frozenset())
        self.workspace.admit = self._admit
        backend.waits.interrupted = self._interrupted
        self.outputs = OutputPool(backend, self.heap, bootstrap)
        reachable = [int(base != 0) for base in backend.peer_heaps]
        matrix = bootstrap.exchange("reachable", bytes(reachable))
        for pe, (row, column) in enumerate(zip(matrix, zip(*matrix, strict=True), strict=True)):
            if row != bytes(column):
                peer = next(peer for peer in range(self.size) if row[peer] != column[peer])
                raise BootstrapError(
                    f"PE {pe} and PE {peer} disagree on whether they reach each other's memory directly: pass the same "
                    "transport on all PEs"
                )
        self.all_reachable = all(all(row) for row in matrix)
        step = describe(COMM).constants["kPeStep"]
        self.team = Team(self.rank, self.size, -(-self.size // step) * step, WORLD, self.all_reachable)
        self.alone = Team(0, 1, step, ALONE, True)
        keep_order_on(backend.device)
        self.tracer: Tracer | None = None
        """Where kernels leave timelines, while that is wanted (`persistent_ops.trace`)."""
        self.kept: dict[str, Kept] = {}
        """See `Site`."""
        self._captured: dict[int, object] = {}
        self._kernels: dict[tuple[KernelRequest, bool], Kernel] = {}  # and whether they link NVSHMEM
        self._barrier: tuple[Kernel, torch.Tensor, ctypes.Structure] | None = None
        self._caller: tuple[threading.Thread, int] | None = None  # and its number, which the system has given it
        self._token = object()
        self.num_recoveries = 0
        self._lost: BootstrapError | None = None
        self._is_closed = False
        self._watch = bootstrap.watch(self._peers_changed, CallOrder(self.rank, self._ordered_workspaces, backend.peek))
        bootstrap.timeout = operator_timeout  # from here on PEs meet only where operators make them
        self._compiling: list[threading.Thread] = []
        self.compile_ahead([_barrier_request])

    # ---- workspaces --------------------------------------------------------------------------------------------------

    @property
    def workspaces(self) -> tuple[Workspace, ...]:
        """All of them, the world's own first; in the same order on all PEs."""
        return (self.workspace, *self._side_workspaces.values())

    def _ordered_workspaces(self) -> list[Workspace]:
        """Return those whose launches have one order, the world's own first; on the host all have."""
        order = self.workspace.order
        return [each for each in self.workspaces if each.order is order or self.backend.name == "host"]

    def side_workspace(self, name: str) -> Workspace:
        """Return a workspace beside the world's own; collective the first time.

        Its launches and the world's own are put in the order of the calls, until the PEs agree to run them side by
        side. Errors are raised by calls on it, and by `check`.
        """
        side = self._side_workspaces.get(name)
        if side is None:
            self.meet(_SIDE.contract(self.team))
            main, words = self.workspace, SIDE_READY_WORDS
            side = Workspace(self.backend, self.bootstrap, self.heap, main.timeout, ready_words=words, main=main)
            side.admit = functools.partial(self._admit, name=name)
            side.run_beside(self.workspace, is_beside=self._runs_beside)
            self._side_workspaces[name] = side
            side.hints.peers_changed(*self._told)
        return side

    def agree_to_run_beside(self) -> bool:
        """Let launches of all workspaces run side by side, if those so far find room together on every PE; collective.

        One PE alone must not put them in order: the other PEs may have another order (cuda/DESIGN.md,
        "Launches side by side").
        """
        if self.workspace.is_capturing():
            raise RuntimeError("PEs cannot agree in a CUDA-graph capture on which launches run side by side")
        self.meet(_BESIDE.contract(self.team))
        self.backend.synchronize()
        for name, side in self._side_workspaces.items():
            if side.launches_beside is not None:
                launches = side.launches_beside()
                self.residency.replace(name, ((kernel.footprint(), grid) for kernel, grid in launches))
        fits = self.residency.fits()
        self._runs_beside = all(raw == b"1" for raw in self.bootstrap.exchange("beside", str(int(fits)).encode()))
        self.backend.runs_beside = self._runs_beside
        for side in self._side_workspaces.values():
            side.run_beside(self.workspace, is_beside=self._runs_beside)
        return self._runs_beside

    def in_order(self, start: Callable[[], Collective], group: object) -> Collective:
        """Start another library's collective in one order with all launches: see `stream_order.in_order`."""
        if self.backend.name != "cuda":  # a launch has ended when its call has
            return start()
        with contextlib.ExitStack() as stack:
            for workspace in self.workspaces:
                stack.enter_context(workspace.no_launch())
            orders = {id(workspace.order): workspace.order for workspace in self.workspaces}
            return in_order(orders.values(), self.backend.stream(), start, group)

    def _admit(self, workspace: Workspace, kernel: Kernel, grid: int, *, name: str = "") -> None:
        """Take note of a launch to come; raise where it leaves no room beside, and the PEs have agreed that it does."""
        self.residency.add(name, kernel.footprint(), grid)
        if not self.residency.leaves_room(is_beside=self._runs_beside):
            raise RuntimeError(
                "this launch leaves fewer SMs to other libraries' collectives than po.nn.leave_room() promised: "
                "call po.nn.leave_room() again, on all PEs, after every operator has been called once"
            )
        if self._runs_beside and not self.residency.fits():
            raise RuntimeError(
                "this launch leaves no room on the GPU for the launches that run beside it: call run_beside() "
                "again, on all PEs, after every operator has been called once"
            )

    def _peers_changed(self, lost: frozenset[int], preparing: frozenset[int]) -> None:
        self._told = lost, preparing
        for workspace in self.workspaces:
            workspace.hints.peers_changed(lost, preparing)

    @contextlib.contextmanager
    def _interrupted(self) -> Iterator[None]:
        """Let launches give up that wait while this context is open."""
        with contextlib.ExitStack() as stack:
            for workspace in self.workspaces:
                stack.enter_context(workspace.hints.interrupted())
            yield

    def load(self, request: KernelRequest, team: Team | None = None) -> Kernel:
        """Return a kernel, which may have to be compiled; peers that wait meanwhile do not count that time.

        Args:
            request: the kernel.
            team: whose PEs it reaches; the world's by default.

        Raises:
            NotImplementedError: it must put to some of them, and is not linked with NVSHMEM.
        """
        links_nvshmem = not (team or self.team).all_reachable
        if links_nvshmem and not request.shape.links_nvshmem:
            raise NotImplementedError(
                f"{request.name}: its kernel stores to peers directly, and some PEs do not reach each other's memory. "
                "Start PEs that do (GPUs of one host, transport='auto'), or choose another algorithm."
            )
        if self.tracer is not None:
            request = dataclasses.replace(request, traces=True)
        kernel = self._kernels.get((request, links_nvshmem))
        if kernel is None:
            with self.preparing():
                kernel = self.backend.load(request, links_nvshmem=links_nvshmem)
            self._kernels[request, links_nvshmem] = kernel
            if self.tracer is not None:
                self.tracer.adopt(kernel)
        return kernel

    def compile_ahead(self, requests: Sequence[Callable[[], KernelRequest | None]], team: Team | None = None) -> None:
        """Begin to compile kernels that calls will load, side by side; return at once.

        Args:
            requests: called in threads, since already a request may need a compiled description; None: that was all.
            team: whose PEs the kernels reach; the world's by default.

        Nothing is raised: what does not compile is reported by the call that loads it. A process that exits waits for
        what is being compiled.
        """
        links_nvshmem, traces = not (team or self.team).all_reachable, self.tracer is not None

        def compile_one(request_of: Callable[[], KernelRequest | None]) -> None:
            with _compiling_ahead, contextlib.suppress(Exception):
                request = None if self._is_closed else request_of()
                if request is None:
                    return
                request = dataclasses.replace(request, traces=traces)
                self.backend.compile(request, links_nvshmem=links_nvshmem and request.shape.links_nvshmem)

        self._compiling = [thread for thread in self._compiling if thread.is_alive()]
        for each in requests:
            # No daemon: one that logs while the interpreter exits would abort the process.
            thread = threading.Thread(target=compile_one, args=(each,), name="persistent_ops: compiler")
            thread.start()
            self._compiling.append(thread)

    def await_compilations(self) -> None:
        """Wait until everything has been compiled that `compile_ahead` was given."""
        for thread in self._compiling:
            thread.join()

    def set_tracer(self, tracer: Tracer | None) -> None:
        """Set where kernels leave timelines, or None; forget those that have traced. CUDA graphs keep theirs."""
        self.backend.synchronize()
        self.tracer = tracer
        for kept in self.kept.values():
            kept.drop_plans(only_traced=True)
        self._kernels = {key: kernel for key, kernel in self._kernels.items() if not key[0].traces}
        self._barrier = None

    @property
    def lost_peers(self) -> frozenset[int]:
        """PEs that are known to have ended."""
        return self._told[0]

    @property
    def preparing_peers(self) -> frozenset[int]:
        """PEs that make ready for a launch; see `preparing`."""
        return self._told[1]

    def plan_anew(self) -> None:
        """Have launches planned and admitted again; none may be in flight. CUDA graphs keep theirs."""
        for kept in self.kept.values():
            kept.drop_plans(only_traced=False)
        for kernel in self._kernels.values():
            kernel.admitted_grid = 0

    def preparing(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which this PE makes ready for a launch: peers that wait do not count that time."""
        return contextlib.nullcontext() if self._watch is None else self._watch.preparing()

    def admit_caller(self) -> None:
        """Raise where another thread than this one calls the operators of this world.

        What two threads launch has no order that all PEs could share: they would take each other's results.
        """
        if backward_pass() != -1:
            self.backend.use_in_this_thread()
            return  # in a backward pass torch's own threads call for the one that began it, which waits
        thread = threading.current_thread()
        if self._caller is not None and _is_another_alive(*self._caller):
            raise RuntimeError(
                f"this PE's operators are called by thread {self._caller[0].name!r}, and now by {thread.name!r}: calls "
                "of two threads have no order that all PEs share. Call operators from one thread; another thread may "
                "continue after that thread has ended."
            )
        self.backend.use_in_this_thread()
        self._caller = thread, threading.get_native_id()
        _admitted.token = self._token

    def enqueue_barrier(self) -> None:
        """Let the current stream wait until every PE has launched this barrier; on GPUs the host continues."""
        if self._barrier is None:
            self._barrier = self._barrier_of(_BARRIER.contract(self.team))
        kernel, plan, call = self._barrier
        self.workspace.launch(kernel, 1, plan.data_ptr(), call)

    def _barrier_of(
        self, contract: Contract, workspace: Workspace | None = None
    ) -> tuple[Kernel, torch.Tensor, ctypes.Structure]:
        """Return a barrier's kernel, plan and call under a contract."""
        description = _BARRIER.prepare(self)
        kernel = self.load(_barrier_request())
        plan = description.structs["Plan"](team=(workspace or self.workspace).team(contract))
        return kernel, upload(self.backend, plan), description.structs["Call"]()

    def meet(self, contract: Contract, workspace: Workspace | None = None) -> None:
        """Wait, on the host too, for every PE to come to a launch under the same contract, in the same workspace.

        What follows may be collective on the host, where PEs that do not match would wait for each other for ever.
        """
        self.admit_caller()
        workspace = workspace or self.workspace
        kernel, plan, call = self._barrier_of(contract, workspace)
        # A late PE finds at the first barrier the credit of PEs that have given up since. At the second barrier it
        # finds that they have given up.
        for _ in range(2):
            workspace.launch(kernel, 1, plan.data_ptr(), call, raises_input_errors=False)
        self.backend.synchronize()
        workspace.raise_failure()

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a new tensor of the symmetric heap; collective."""
        self._meet_for_heap(_EMPTY)
        return self.heap.empty(shape, dtype)

    def free(self, tensor: torch.Tensor) -> None:
        """Give a tensor of `empty` back; collective."""
        self.heap.free(tensor, functools.partial(self._meet_for_heap, _FREE))

    def _meet_for_heap(self, what: LaunchKind) -> None:
        if not self.workspace.is_capturing():  # a capture runs nothing that the host could wait for
            self.meet(what.contract(self.team))

    def barrier(self) -> None:
        """Wait, on the host too, until every PE has come here and this PE's launches before it have completed."""
        self.admit_caller()
        self.enqueue_barrier()
        self.check()

    def check(self) -> None:
        """Wait for this PE's launches and raise their errors."""
        self.backend.synchronize()
        for workspace in self.workspaces:
            workspace.raise_failure()
            workspace.changes.settle()
        for workspace in self.workspaces:
            workspace.raise_pending()

    def learn_of_failures(self) -> None:
        """Wait for this PE's launches, and note the inputs of launches that were given up; nothing is raised here."""
        if not self._is_closed:
            self.backend.synchronize()
            with contextlib.suppress(PersistentOpsError):
                self.workspace.raise_failure()

    def recover(self) -> None:
        """Start clean epochs after a failure; collective."""
        if self._lost is not None:
            raise to_raise(self._lost)
        if self._side_workspaces:  # a launch of one may wait for a PE that has come here for another one's
            self.backend.synchronize(_PATIENCE_S)
        self.backend.synchronize()  # an interrupt loses nothing up to here
        for workspace in self.workspaces:
            workspace.order.forget_collectives()  # some may have been aborted
        # A peer's launches in different workspaces are independent: they give up one after the other. The peer may not
        # have come to the first of them yet; that takes up to one time-out.
        patience = self.bootstrap.timeout * (len(self.workspaces) + 1)
        try:
            for workspace in self.workspaces:
                workspace.recover(patience)
        except BaseException as error:
            self._lose(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)
            raise
        self.num_recoveries += 1
        self._forget()

    def _lose(self, cause: str) -> None:
        """Refuse all calls after a failed recovery: PEs no longer agree on their launches."""
        self._lost = BootstrapError(f"the world is lost, since po.recover() has failed: {cause}. Start all PEs again")
        self.bootstrap.fail(f"its po.recover() has failed: {cause}")  # the peers need not wait for it
        for workspace in self.workspaces:
            workspace.refuse_launches(self._lost)

    def _forget(self) -> None:
        for kept in self.kept.values():
            kept.forget()

    def keep_captured(self, *used: object) -> None:
        """Keep what a CUDA graph that is being captured uses at every replay, until the world is closed."""
        self._captured.update((id(each), each) for each in used)

    def make_room(self, plans: dict[Any, Any], most: int) -> None:
        """Drop the older half of `plans` where there are `most`, when no launch that is queued reads them any more."""
        if len(plans) < most or self.workspace.is_capturing():
            return
        self.backend.synchronize()
        for key in list(plans)[: most // 2]:
            del plans[key]

    def close(self) -> None:
        """Release the world; collective where the peers are still there."""
        self._is_closed = True
        try:
            self.backend.synchronize(_PATIENCE_S)
        except RuntimeError:
            _log.warning("PE %d: the device reported an error while the world was closed", self.rank)
        is_alone = True
        try:
            is_alone = not self.bootstrap.meet_to_leave(_LONGEST_FAREWELL_S[self.backend.device.type])
            if is_alone:
                _log.info("PE %d: closing without its peers", self.rank)
        finally:  # also where Ctrl-C comes
            if self._watch is not None:
                self._watch.close()
            self._forget()  # handles that are held must not launch
            self.kept.clear()
            self._captured.clear()
            self._kernels.clear()
            self.backend.close(is_alone=is_alone)
            self.bootstrap.close()


def _barrier_request() -> KernelRequest:
    return KernelRequest("barrier", None, LaunchShape(_BARRIER.description.constants["kThreads"]))


def heaps_of(backend: Backend, team: Team) -> bytes:
    """Return what follows a plan that has its team's heaps: their addresses here, with the room that kernels have."""
    heaps = backend.peer_heaps if team.number == WORLD else (backend.heap_base,)
    return array("Q", heaps).tobytes().ljust(8 * team.room, b"\0")


def upload(backend: Backend, *parts: ctypes.Structure | array[int] | bytes) -> torch.Tensor:
    """Return private memory of the backend's device, a word at least, with structs or arrays side by side."""
    data = b"".join(map(bytes, parts))
    words = backend.private_words(max(1, (len(data) + 7) // 8))
    padded = bytearray(data.ljust(words.numel() * 8, b"\0"))
    words.copy_(torch.frombuffer(padded, dtype=torch.int64))
    return words


def _is_another_alive(thread: threading.Thread, number: int) -> bool:
    """Return whether a thread is not this one, and runs.

    Of those that it has not started Python does not learn the end, and may take the next one for the same.
    """
    if isinstance(thread, threading._DummyThread):
        return number != threading.get_native_id() and os.path.exists(f"/proc/self/task/{number}")
    return thread is not threading.current_thread() and thread.is_alive()


def is_initialized() -> bool:
    """Return whether `po.init()` has been called in this process (or this PE's thread) and not undone."""
    return _thread_worlds.world is not None or _process_world is not None


def _refuse_fork() -> None:
    """Raise RuntimeError in a process that was forked from a PE: threads of torch's are missing there, for one."""
    if _was_forked:
        raise RuntimeError(
            "this process was forked after persistent_ops.init() and is no PE: call operators in the process that "
            "called init(), and start PEs with a launcher or persistent_ops.launch()"
        )


def current() -> World:
    """Return this PE's world; raise RuntimeError if there is none."""
    world = _thread_worlds.world or _process_world
    if world is None:
        _refuse_fork()
        raise RuntimeError("persistent_ops is not initialized in this process: call persistent_ops.init() first")
    return world


def for_call() -> World:
    """Return this PE's world to an operator that is called; see `World.admit_caller`."""
    world = _thread_worlds.world or _process_world
    if world is None or world._token is not _admitted.token:
        world = current()
        world.admit_caller()
    return world


def refuse_second() -> None:
    """Raise where this process, or this PE's thread, has a world or may have none."""
    if is_initialized():
        raise RuntimeError("persistent_ops is already initialized here: call persistent_ops.finalize() first")
    _refuse_fork()


def adopt(world: World, *, of_thread: bool) -> None:
    """Make a world the world of this process, or of the PE that this thread is, until `finalize`."""
    global _process_world
    _open.add(world)
    if of_thread:
        _thread_worlds.world = world
        pe_threads.when_pe_ends(_leave_thread_world)
    else:
        _process_world = world
        atexit.register(finalize)


def finalize() -> None:
    """Leave the world; collective. Tensors from the heap must not be used afterwards. Harmless without a world."""
    global _process_world
    if _thread_worlds.world is not None:
        _leave_thread_world()
        return
    world, _process_world = _process_world, None
    if world is not None:
        _close(world)


def _leave_thread_world() -> None:
    """Leave the world of the PE that this thread is, where it has one."""
    world, _thread_worlds.world = _thread_worlds.world, None
    if world is not None:
        _close(world)


def _close(world: World) -> None:
    world.close()
    _open.discard(world)


def _never_release_open_worlds() -> None:
    """Keep what open worlds hold until the process is gone: at exit, threads may still run in them."""
    for world in _open:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(world))


def _leave_worlds_to_parent() -> None:
    """Have no world in a child that was forked: threads, connections and peers are the parent's alone.

    Nothing of it is released either, not even at exit: what would release it waits for threads that the child lacks.
    """
    global _process_world, _thread_worlds, _was_forked
    _never_release_open_worlds()
    _was_forked = _was_forked or bool(_open)
    _open.clear()
    _process_world, _thread_worlds = None, _OfThread()


atexit.register(_never_release_open_worlds)  # first, and so called after every finalize
os.register_at_fork(after_in_child=_leave_worlds_to_parent)
