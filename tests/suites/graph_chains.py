"""Tests of every operator in CUDA graphs whose launches begin before the previous launch has ended; see `graphs`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from bits import difference
from checks import Checks
from gpu_turns import gpus_alone
from graphs import NUM_INPUTS, Graph, GraphSuite, num_replays, world_size

import persistent_ops as po

__all__ = ["Chain", "ChainSuite", "ChainTest"]


@dataclass(frozen=True)
class Chain:
    """Launches, each of which uses the results of earlier ones and may begin before they have ended.

    Attributes:
        run: makes them; returns what is compared.
        starts: inputs, NUM_INPUTS of them.
        wants: what `run` must return for each.
        more: launches of this PE alone, after the others and sometimes between replays; or None.
    """

    run: Callable[[torch.Tensor], torch.Tensor]
    starts: Sequence[torch.Tensor]
    wants: Sequence[torch.Tensor]
    more: Callable[[torch.Tensor], object] | None = None


@dataclass(frozen=True)
class ChainTest:
    """A chain, and where it is run.

    Attributes:
        make: prepares it on a PE.
        repeats: of the chain in the graph.
        share: one in `share` replays is a PE's replay of a single call.
        pes: how many; None for as many as there are GPUs.
    """

    make: Callable[[], Chain]
    repeats: int = 1
    share: int = 1
    pes: int | None = None


class ChainSuite(GraphSuite):
    """The tests of `GraphSuite`, and chains of launches, of an operator that begins before its predecessor has ended.

    Attributes:
        chains: by name.
    """

    chains: ClassVar[Mapping[str, ChainTest]]

    @classmethod
    def left_over(cls) -> list[str]:
        """Return what the launches of a chain have left and should not have left."""
        return []

    @classmethod
    def _chained(cls, name: str, replays: int) -> list[str]:
        test = cls.chains[name]
        chain = test.make()
        problems = []
        starts, wants = ([tensor.to(po.device()) for tensor in each] for each in (chain.starts, chain.wants))
        x = starts[0].clone()

        def run() -> list[torch.Tensor]:
            results = [chain.run(x) for _ in range(test.repeats)]
            if chain.more is not None:
                chain.more(x)
            return results

        for turn in range(NUM_INPUTS):
            x.copy_(starts[turn])
            problems += [f"eager calls, start {turn}: {found}" for y in run() if (found := difference(y, wants[turn]))]
        po.check()
        graph = Graph(run)
        with gpus_alone():
            problems += cls._replayed_chain(graph, chain, x, starts, wants, replays)
        po.check()
        return problems + cls.left_over()

    @classmethod
    def _replayed_chain(
        cls,
        graph: Graph,
        chain: Chain,
        x: torch.Tensor,
        starts: Sequence[torch.Tensor],
        wants: Sequence[torch.Tensor],
        replays: int,
    ) -> list[str]:
        checks = Checks()
        for turn in range(replays):
            x.copy_(starts[turn % NUM_INPUTS])
            for y in graph.results:
                y.fill_(float("nan"))
            if turn % 7 == po.rank():
                torch.cuda._sleep(1_000_000)
            if turn % 10 == po.rank() and chain.more is not None:
                chain.more(x)
            for y in graph.replay():
                checks.compare(f"replay {turn}", y, wants[turn % NUM_INPUTS])
            if problems := checks.look(turn):
                return problems
        problems = checks.look()
        # Replays without a host wait in between, while PEs drift apart.
        results = []
        for turn in range(60):
            if (turn + po.rank()) % 7 == 0:
                torch.cuda._sleep(1_000_000)
            x.copy_(starts[turn % NUM_INPUTS])
            results.append(graph.replay()[-1].clone())
        for turn, y in enumerate(results):
            checks.compare(f"queued replay {turn}", y, wants[turn % NUM_INPUTS])
        return problems + checks.look()

    @classmethod
    def pytest_generate_tests(cls, metafunc: pytest.Metafunc) -> None:
        super().pytest_generate_tests(metafunc)
        if "chain" in metafunc.fixturenames:
            metafunc.parametrize("chain", cls.chains)

    @pytest.mark.apart
    @pytest.mark.gpu
    def test_launches_that_take_each_other_s_results(self, backend: str, chain: str) -> None:
        test = self.chains[chain]
        pes = test.pes or world_size(backend)
        self._assert_right(self._chained, pes, backend, chain, num_replays(backend, pes) // test.share)
