"""What a run of the benchmark was asked to do."""

from __future__ import annotations

from dataclasses import dataclass

from .cases import CASES, SWEEPS, Case, swept
from .methods import METHODS

__all__ = ["Options"]


@dataclass(frozen=True)
class Options:
    """See the command line's help.

    Attributes:
        cases: keys of CASES.
        sweeps: of SWEEPS.
        methods: of METHODS.
        rounds: times each method is timed; in the sweeps at most `sweep_rounds`.
        replays: timed one by one for the spread; None for as many as fit a second or two.
        gloo_bytes: that all PEs' inputs may have together where Gloo is measured.
        room_bytes: of the symmetric heap that "allgather" and "dense" may take each beside the result; where they need
            more, they are not measured.
        burst_ms: length of one time.
    """

    backend: str = "auto"
    cases: tuple[str, ...] = tuple(CASES)
    sweeps: tuple[str, ...] = SWEEPS
    methods: tuple[str, ...] = METHODS
    rounds: int = 9
    sweep_rounds: int = 5
    replays: int | None = None
    quick: bool = False
    gloo_bytes: int = 500_000_000
    room_bytes: int = 4_300_000_000
    burst_ms: float = 3.0
    record_path: str | None = None
    command: str = ""
    timeout: float = 20.0

    def groups(self, backend: str) -> dict[str, list[Case]]:
        """Return what is measured in the sizes of a backend: "cases", and each sweep.

        The cases with the smallest results come first: what the operator keeps from one is then never more than the
        next one needs.
        """
        groups = {"cases": [CASES[name] for name in self.cases]}
        groups |= {sweep: swept(sweep, quick=self.quick) for sweep in self.sweeps}
        if backend != "cuda":
            groups = {name: [case.for_host() for case in cases] for name, cases in groups.items()}
        return {name: sorted(cases, key=_expected_result_bytes) for name, cases in groups.items()}


def _expected_result_bytes(case: Case) -> float:
    """Return a number that orders cases as their results' sizes do."""
    alike = {"uniform": 0.1, "zipf": 0.5, "overlap": case.shared}[case.distribution]
    return case.rows_per_pe * case.row_bytes * (2 - alike)
