"""An operator as torch sees it: schema, implementation for every device, fake kernel, and the steps of a call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from .plain_call import PlainCalls, is_watched, require_plain, require_plain_list
from .program_order import ARGUMENT as ORDER, order_of, order_of_graph, ordered_by
from .torch_private import autograd_kernel, is_for_compiled_cuda_graph, never_recomputed, tracing_context

__all__ = ["TorchOperator"]

_OVERLOADS = {f"results_{n}": f"({', '.join(['Tensor'] * n)})" if n > 1 else "Tensor" for n in range(1, 9)}
_NONE: Mapping[str, Any] = {}
_library = torch.library.Library("persistent_ops", "FRAGMENT")
_Run = Callable[..., Any]


class TorchOperator:
    """torch.ops.persistent_ops.`name`, which returns its results, and `name`_out, which writes them.

    A plain eager call goes directly to `run`, which saves most of the host time. Any other
    call is checked, completed, and goes through torch's dispatcher, which calls `run` in the end. `run` finds or makes
    the plan, checks what may change from call to call, and launches.

    Args:
        name: of the operator.
        arguments: what comes before the outputs in torch's schema language: "Tensor x, Tensor[] ys, str algorithm".
        run: what it does, whatever the device: run(*arguments, **outputs), with None for outputs that are not given.
        check: the same for what torch would refuse in words of its own; that tensors are plain ones is seen before.
        complete: called with the arguments, returns them for the dispatcher: the schema wants what callers may omit.
        results: in the same language: "Tensor", "(Tensor, Tensor)", "(Tensor?, Tensor[])". "()": the operator has no
            result, its outputs must be given, and `name` itself writes them.
        counts: with lists or optional tensors among the results, how many tensors each result is:
            counts(*arguments). Compilers take no such results of an operator that changes an argument, as collectives
            do. So the dispatcher sees an overload for each number of tensors, up to 8: `name`.results_3 returns 3.
        fake: the same as `run` for fake tensors; None where the result's shape depends on data.
        outputs: names of the tensors that may be given to be written: the results. Where some of these are given,
            `fake` makes the others.
        setup_context, backward: as `torch.library.register_autograd` takes them. A backward pass that calls
            collectives calls the public functions.
        no_gradient: what a backward pass raises where there is no `backward`.
        is_collective: whether peers take part, so that compilers may neither drop a call nor merge or move any
            (program_order.py).
        result_in_heap: whether the result lies in the symmetric heap. CUDA graphs of torch.compile take only results
            from a pool of their own, so there a copy is returned.
        layout: of its tensors.

    Attributes:
        is_plain: whether a call may go to `run` at once: `PlainCalls.has`.
    """

    def __init__(
        self,
        name: str,
        arguments: str,
        run: _Run,
        check: _Run | None = None,
        *,
        results: str = "Tensor",
        counts: Callable[..., tuple[int, ...]] | None = None,
        complete: Callable[..., tuple[Any, ...]] | None = None,
        fake: _Run | None = None,
        outputs: Sequence[str] = (),
        setup_context: Callable[..., None] | None = None,
        backward: _Run | None = None,
        no_gradient: str = "",
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
        self.is_plain: Callable[..., bool | None] = PlainCalls(layout).has
        self._has_results = results != "()"
        derivative = _Derivative(
            no_gradient or f"{name} is forward only: it has no derivative", setup_context, backward
        )
        self._no_gradient = f"Let {name} return its results" if backward else derivative.refusal
        self._writing_name = f"{name}_out" if self._has_results else name
        by_name = [ORDER] if is_collective else []
        self._results = None if counts is None else _Results(results, counts)
        if self._results is not None:
            run, fake, derivative = self._results.flattened(run, fake, derivative)
        if is_collective:
            run, fake = _without_order(run, copies=result_in_heap), fake and _ordered(name, fake)
        if self._has_results:
            signature = f"({', '.join([arguments, '*', *by_name] if by_name else [arguments])}) -> "
            overloads = {name: results}
            if self._results is not None:
                overloads = {f"{name}.{each}": flat for each, flat in _OVERLOADS.items()}
            for overload, returned in overloads.items():
                self._tensors = _define(overload, signature + returned, run, fake, derivative, layout)
        if outputs:
            # Aliases by letters; arguments that change have those from the end of the alphabet.
            by_name += [f"Tensor({chr(ord('a') + i)}!) {output}" for i, output in enumerate(outputs)]
            signature = f"({', '.join([arguments, '*', *by_name])}) -> ()"
            run, fake = _without_result(run), fake and _without_result(fake)
            self._tensors = _define(self._writing_name, signature, run, fake, _Derivative(self._no_gradient), layout)

    def __call__(
        self,
        arguments: tuple[Any, ...],
        outputs: Mapping[str, torch.Tensor | None],
        required: tuple[torch.Tensor, ...],
        optional: tuple[torch.Tensor | None, ...] = (),
    ) -> Any:
        """Call it.

        Args:
            arguments: all that come before the outputs.
            outputs: by name, None for those that are not given.
            required, optional: all tensors among both, as `PlainCalls.has` takes them.
        """
        is_plain = not torch.compiler.is_compiling() and self.is_plain(required, optional)
        if is_plain:
            return self._run(*arguments, **outputs)
        return self.dispatch(arguments, outputs, (*required, *optional), is_plain=is_plain)

    def dispatch(
        self,
        arguments: tuple[Any, ...],
        outputs: Mapping[str, torch.Tensor | None],
        tensors: tuple[torch.Tensor | None, ...],
        tables: Sequence[torch.Tensor] = (),
        *,
        is_plain: bool | None,
    ) -> Any:
        """Make a call that is not for the kernel alone.

        Args:
            arguments, outputs: see above.
            tensors: all single ones among both.
            tables: those in lists.
            is_plain: what `is_plain` has said of it; False where torch.compile traces it.
        """
        order: dict[str, torch.Tensor | None] = {}
        if torch.compiler.is_compiling():
            if self._is_collective:
                assert tensors[0] is not None
                order = {"order": order_of(tensors[0])}
        else:
            if is_plain is not None:
                self._tensors.require_plain(arguments, outputs, may_lack_outputs=self._has_results)
            if self._check is not None:
                self._check(*arguments, **outputs)
            if self._is_collective and (of_graph := order_of_graph()) is not None:
                order = {"order": of_graph}
        if self._complete is not None:
            arguments = self._complete(*arguments)
        operators = torch.ops.persistent_ops
        given = [name for name, output in outputs.items() if output is not None]
        if not given and self._results is not None:
            counts = self._results.counts(*arguments)
            overload = getattr(getattr(operators, self._name), f"results_{sum(counts)}")
            return self._results.nested(overload(*arguments, **order), counts)
        if not given:
            return getattr(operators, self._name)(*arguments, **order)
        records = self._has_results and torch.is_grad_enabled()
        if records and any(tensor is not None and tensor.requires_grad for tensor in (*tensors, *tables)):
            raise NotImplementedError(f"{given[0]}: cannot be given where gradients are recorded. {self._no_gradient}")
        if len(given) < len(outputs):
            assert self._fake is not None
            made = zip(outputs.items(), self._fake(*arguments, **outputs), strict=True)
            outputs = {name: new if output is None else output for (name, output), new in made}
        getattr(operators, self._writing_name)(*arguments, **order, **outputs)
        return tuple(outputs.values()) if len(outputs) > 1 else outputs[given[0]]


class _Derivative(NamedTuple):
    """What autograd records of a call, and what a backward pass does: see TorchOperator."""

    refusal: str
    setup_context: Callable[..., None] | None = None
    backward: _Run | None = None

    def kernel(self, operator: Any) -> Callable[..., Any]:
        """Return the operator's kernel for tensors that require a gradient."""
        setup, backward = self.setup_context, self.backward

        def set_up(ctx: Any, inputs: Any, output: Any, keyword_only_inputs: Mapping[str, Any] = _NONE) -> None:
            ctx.order = keyword_only_inputs.get("order")
            if setup is not None:
                setup(ctx, inputs, output)

        def differentiate(ctx: Any, *gradients: Any) -> Any:
            if backward is None:
                raise NotImplementedError(self.refusal)
            with ordered_by(ctx.order):
                return backward(ctx, *gradients)

        functions = SimpleNamespace(_backward_fn=differentiate, _setup_context_fn=set_up)
        return autograd_kernel(operator, functions)


class _Results:
    """Results that are not single tensors alone: nested as `run` returns them, flat as the dispatcher has them."""

    def __init__(self, schema: str, counts: Callable[..., tuple[int, ...]]) -> None:
        self._are_lists = [kind.strip().endswith("[]") for kind in schema.strip("()").split(",")]
        self.counts = counts

    def flat(self, nested: Sequence[Any]) -> Any:
        """Return all tensors: one by itself, several as a tuple."""
        flat: list[torch.Tensor] = []
        for value, is_list in zip(nested, self._are_lists, strict=True):
            flat += value if is_list else [] if value is None else [value]
        return flat[0] if len(flat) == 1 else tuple(flat)

    def nested(self, flat: Any, counts: Sequence[int]) -> tuple[Any, ...]:
        """Return them as `run` does: for each result a list, or a tensor or None."""
        rest = list(flat) if isinstance(flat, (list, tuple)) else [flat]
        nested: list[Any] = []
        for count, is_list in zip(counts, self._are_lists, strict=True):
            own, rest = rest[:count], rest[count:]
            nested.append(own if is_list else own[0] if own else None)
        return tuple(nested)

    def flattened(self, run: _Run, fake: _Run | None, derivative: _Derivative) -> tuple[_Run, _Run | None, _Derivative]:
        """Return the same with flat results and gradients."""
        refusal, setup, backward = derivative

        def set_up(context: Any, inputs: tuple[Any, ...], output: Any) -> None:
            context.counts = self.counts(*inputs)
            if setup is not None:
                setup(context, inputs, self.nested(output, context.counts))

        def differentiate(context: Any, *gradients: Any) -> Any:
            assert backward is not None
            return backward(context, *self.nested(gradients, context.counts))

        derivative = _Derivative(refusal, set_up, backward and differentiate)
        return self._flat_of(run), fake and self._flat_of(fake), derivative

    def _flat_of(self, function: _Run) -> _Run:
        return lambda *arguments, **by_name: self.flat(function(*arguments, **by_name))


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
    name: str, signature: str, run: _Run, fake: _Run | None, derivative: _Derivative, layout: torch.layout
) -> _Tensors:
    _library.define(f"{name}{signature}")
    _library.impl(name, run, "CompositeExplicitAutograd")
    if fake is not None:
        torch.library.register_fake(f"persistent_ops::{name}", fake, lib=_library)
    packet, _, overload = name.partition(".")
    operator = getattr(getattr(torch.ops.persistent_ops, packet), overload or "default")
    recorded = derivative.kernel(operator)
    tensors = _Tensors(operator._schema, layout)

    def differentiate(keyset: object, *arguments: Any, **outputs: torch.Tensor) -> Any:
        if is_watched():  # through torch.ops
            tensors.require_plain(arguments, outputs)
        with never_recomputed():
            return recorded(keyset, *arguments, **outputs)

    _library.impl(name, differentiate, "Autograd", with_keyset=True)
    return tensors


def _without_order(run: _Run, *, copies: bool) -> _Run:
    """Return a kernel without the argument that orders calls; `copies`: whether a result lies in the heap."""

    def call(*arguments: Any, order: torch.Tensor | None = None, **outputs: torch.Tensor) -> Any:
        result = run(*arguments, **outputs)
        if copies and not outputs and order is not None and is_for_compiled_cuda_graph(order.device):
            return result.clone() if isinstance(result, torch.Tensor) else tuple(each.clone() for each in result)
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
