"""An operator as torch sees it: schema, implementation for every device, fake kernel, and what a call goes through."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from .plain_call import PlainCalls, is_watched, require_plain, require_plain_list
from .program_order import ARGUMENT as ORDER, order_of
from .torch_private import autograd_kernel, is_for_compiled_cuda_graph, never_recomputed, tracing_context

__all__ = ["TorchOperator"]

_library = torch.library.Library("persistent_ops", "FRAGMENT")
_Run = Callable[..., Any]


class TorchOperator:
    """torch.ops.persistent_ops.`name`, which returns its results, and `name`_out, which writes them; forward only.

    A call that nobody but the kernel wants to see goes to `run` at once; it saves most of the host's share. Any other
    one is checked, completed, and goes through torch's dispatcher, behind which `run` comes too. `run` finds or makes
    the plan, checks what may change from call to call, and launches.

    Args:
        name: of the operator.
        arguments: what comes before the outputs in torch's schema language: "Tensor x, Tensor(z!) changed".
        run: what it does, whatever the device: run(*arguments, **outputs), with None for outputs that are not given.
        check: the same for what torch would refuse in words of its own; that tensors are plain ones is seen before.
        complete: called with the arguments, returns them for the dispatcher: the schema wants what callers may omit.
        fake: the same for fake tensors; None where the result's shape depends on data.
        outputs: names of the tensors that may be given to be written: the results, where there are several. Where some
            of these are given, `fake` makes the others.
        no_gradient: what a backward pass through the result raises; None: the operator has no result, its outputs must
            be given, and `name` itself writes them.
        is_collective: whether peers take part, so that compilers may neither drop a call nor merge or move any
            (program_order.py).
        result_in_heap: whether the result lies in the symmetric heap. CUDA graphs of torch.compile take only results
            from a pool of their own, so there a copy is returned.
        layout: of its tensors.
    """

    def __init__(
        self,
        name: str,
        arguments: str,
        run: _Run,
        check: _Run | None = None,
        *,
        complete: Callable[..., tuple[Any, ...]] | None = None,
        fake: _Run | None = None,
        outputs: Sequence[str] = (),
        no_gradient: str | None = None,
        is_collective: bool = True,
        result_in_heap: bool = False,
        layout: torch.layout = torch.strided,
    ) -> None:
        self._name = name
        self._is_collective = is_collective
        self._run = run
        self._check = check
        self._fake = fake
        self._complete = complete
        self._plain_calls = PlainCalls(layout)
        self._no_gradient = no_gradient
        self._writing_name = name if no_gradient is None else f"{name}_out"
        by_name = [ORDER] if is_collective else []
        if is_collective:
            run, fake = _without_order(run, copies=result_in_heap), fake and _ordered(name, fake)
        if no_gradient is not None:
            results = "Tensor" if len(outputs) < 2 else f"({', '.join(['Tensor'] * len(outputs))})"
            signature = f"({', '.join([arguments, '*', *by_name] if by_name else [arguments])}) -> {results}"
            self._tensors = _define(name, signature, run, fake, no_gradient, layout)
        if outputs:
            # Aliases by letters; arguments that change have those from the end of the alphabet.
            by_name += [f"Tensor({chr(ord('a') + i)}!) {output}" for i, output in enumerate(outputs)]
            signature = f"({', '.join([arguments, '*', *by_name])}) -> ()"
            refusal = no_gradient or f"{name} is forward only: it has no derivative"
            run, fake = _without_result(run), fake and _without_result(fake)
            self._tensors = _define(self._writing_name, signature, run, fake, refusal, layout)

    def is_plain(self, required: tuple[Any, ...], optional: tuple[Any, ...] = ()) -> bool:
        """Return whether a call may go to `run` at once, if none of the tables that it has requires a gradient."""
        return bool(self._plain_calls.has(required, optional))

    def __call__(
        self,
        arguments: tuple[Any, ...],
        outputs: Mapping[str, torch.Tensor | None],
        required: tuple[torch.Tensor, ...],
        optional: tuple[torch.Tensor | None, ...] = (),
        tables: Sequence[torch.Tensor] = (),
    ) -> Any:
        """Call it.

        Args:
            arguments: all that come before the outputs.
            outputs: by name, None for those that are not given.
            required, optional, tables: all tensors among both, as `PlainCalls.has` takes them.
        """
        order: dict[str, torch.Tensor | None] = {}
        if torch.compiler.is_compiling():
            if self._is_collective:
                order = {"order": order_of(required[0])}
        else:
            is_plain = self._plain_calls.has(required, optional, tables)
            if is_plain:
                return self._run(*arguments, **outputs)
            if is_plain is not None:
                self._tensors.require_plain(arguments, outputs, may_lack_outputs=self._no_gradient is not None)
            if self._check is not None:
                self._check(*arguments, **outputs)
        if self._complete is not None:
            arguments = self._complete(*arguments)
        operators = torch.ops.persistent_ops
        given = [name for name, output in outputs.items() if output is not None]
        if not given:
            return getattr(operators, self._name)(*arguments, **order)
        records = self._no_gradient is not None and torch.is_grad_enabled()
        if records and any(tensor is not None and tensor.requires_grad for tensor in (*required, *optional, *tables)):
            raise NotImplementedError(f"{given[0]}: cannot be given where gradients are recorded. {self._no_gradient}")
        if len(given) < len(outputs):
            assert self._fake is not None
            made = zip(outputs.items(), self._fake(*arguments, **outputs), strict=True)
            outputs = {name: new if output is None else output for (name, output), new in made}
        getattr(operators, self._writing_name)(*arguments, **order, **outputs)
        return tuple(outputs.values()) if len(outputs) > 1 else outputs[given[0]]


class _Tensors:
    """The tensors among an operator's arguments, by its schema."""

    def __init__(self, schema: Any, layout: torch.layout) -> None:
        self._layout = layout
        kinds = [(i, each.name, str(each.type)) for i, each in enumerate(schema.arguments) if not each.kwarg_only]
        self._lists = [(i, name) for i, name, kind in kinds if kind == "List[Tensor]"]
        self._single = [
            (i, name, kind != "Tensor") for i, name, kind in kinds if kind in ("Tensor", "Optional[Tensor]")
        ]

    def require_plain(
        self, arguments: Sequence[Any], outputs: Mapping[str, Any], *, may_lack_outputs: bool = True
    ) -> None:
        """Raise TypeError where one is not plain."""
        for i, name in self._lists:
            require_plain_list(name, arguments[i], may_be_fake=True)
        given = {name: arguments[i] for i, name, may_lack in self._single if not (may_lack and arguments[i] is None)}
        for name, output in outputs.items():
            if output is not None or not may_lack_outputs:
                given[name] = output
        require_plain(given, layout=self._layout, may_be_fake=True)


def _define(
    name: str, signature: str, run: _Run, fake: _Run | None, no_gradient: str, layout: torch.layout
) -> _Tensors:
    _library.define(f"{name}{signature}")
    _library.impl(name, run, "CompositeExplicitAutograd")
    if fake is not None:
        torch.library.register_fake(f"persistent_ops::{name}", fake, lib=_library)

    def refuse(context: object, *gradients: torch.Tensor) -> None:
        raise NotImplementedError(no_gradient)

    operator = getattr(torch.ops.persistent_ops, name).default
    recorded = autograd_kernel(operator, SimpleNamespace(_backward_fn=refuse, _setup_context_fn=None))

    tensors = _Tensors(operator._schema, layout)

    def differentiate(keyset: object, *arguments: Any, **outputs: torch.Tensor) -> Any:
        if is_watched():  # through torch.ops
            tensors.require_plain(arguments, outputs)
        with never_recomputed():
            return recorded(keyset, *arguments, **outputs)

    _library.impl(name, differentiate, "Autograd", with_keyset=True)
    return tensors


def _without_order(run: _Run, *, copies: bool) -> _Run:
    """Return a kernel without the argument that orders calls; `copies`: whether the result lies in the heap."""

    def call(*arguments: Any, order: torch.Tensor | None = None, **outputs: torch.Tensor) -> Any:
        result = run(*arguments, **outputs)
        if copies and not outputs and order is not None and is_for_compiled_cuda_graph(order.device):
            return result.clone()
        return result

    return call


def _ordered(name: str, fake: _Run) -> _Run:
    """Return a fake kernel without that argument. In a compiled graph it refuses a call without an order."""

    def call(*arguments: Any, order: torch.Tensor | None = None, **outputs: torch.Tensor) -> Any:
        if order is None and tracing_context() is not None:
            raise NotImplementedError(
                f"{name}: torch.compile may drop, merge or move this call. Call persistent_ops.{name} in place of "
                f"torch.ops, after persistent_ops.init() and with tensors on its device."
            )
        return fake(*arguments, **outputs)

    return call


def _without_result(run: _Run) -> _Run:
    def write(*arguments: Any, **outputs: torch.Tensor) -> None:
        run(*arguments, **outputs)

    return write
