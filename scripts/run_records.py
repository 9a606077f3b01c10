"""Runs on record: the lines that each has written about a world, and the reason if one may not be shown."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
RESULTS = REPOSITORY / "benchmarks" / "results"

sys.path.insert(0, str(REPOSITORY / "benchmarks"))

from persistent_ops.testing.record import select  # noqa: E402

__all__ = [
    "OWN_TABLES",
    "REPOSITORY",
    "RESULTS",
    "Run",
    "case_of",
    "differences",
    "newest_runs",
    "problems",
    "read_runs",
]

_Line = dict[str, Any]
OWN_TABLES = "persistent_ops"  # of a comparison of trainings
_EXAMPLES = {"model": "decode_loop", "compared": "dlrm_train"}  # by a field that their reports alone have


@dataclass(frozen=True)
class Run:
    """What one run has written about one world.

    Attributes:
        file: in benchmarks/results/.
        subject: the benchmark, or the example, that ran.
        pes: size of the world.
        about: the line that says what ran, where and when.
        lines: all others of this world; of an example none.
        note: of a line {"kind": "note", "commit": ...}, added by hand where the run did not know its commit.
    """

    file: str
    subject: str
    pes: int
    about: _Line
    lines: Sequence[_Line]
    note: _Line

    @property
    def date(self) -> str:
        return str(self.about["date"])[:10]

    @property
    def place(self) -> str:
        """GPUs, as "2x H100" where the record says "NVIDIA H100 80GB HBM3"."""
        gpu = self.about.get("gpu") or self.about.get("hardware", ["CPU"])[0]
        return f"{self.pes}x {re.sub(r'^NVIDIA | [0-9]+GB HBM[0-9]e?$', '', gpu)}"

    @property
    def command(self) -> str | None:
        command = self.about.get("command")
        return None if command is None else re.sub(r" --(out|json) \S+", "", command)

    @property
    def commit(self) -> str:
        """What the record says of its commit, short."""
        commit = self.about.get("commit")
        return "none" if commit is None else re.sub(r"^([0-9a-f]{7})[0-9a-f]*", r"\1", commit)


def read_runs(folder: Path = RESULTS) -> list[Run]:
    """Return all runs on record, the newest first."""
    runs = []
    for path in sorted(folder.glob("*.jsonl")):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        note = {name: value for line in lines if line.get("kind") == "note" for name, value in line.items()}
        for line in lines:
            if line.get("kind") == "run":
                found = re.search(r"bench (\w+)", line["command"])
                assert found is not None, f"{path.name}: the run names no benchmark"
                own = [other for other in lines if other.get("pes") == line["pes"] and other is not line]
                runs.append(Run(path.name, found[1], line["pes"], line, own, note))
            elif "kind" not in line:
                subject = next((name for field, name in _EXAMPLES.items() if field in line), "sparse_embedding_train")
                runs.append(Run(path.name, subject, line["pes"], line, (), note))
    return sorted(runs, key=lambda run: str(run.about["date"]), reverse=True)


def case_of(line: _Line) -> str:
    named = (line.get(field) for field in ("case", "shape_name", "config", "size", "shape"))
    return next((name for name in named if isinstance(name, str)), "None")


def problems(run: Run) -> list[str]:
    """Return why a run may not be shown; nothing where it ran on GPUs and all went well."""
    found = [] if run.about["backend"] == "cuda" else ["ran without a GPU"]
    if failures := sum(len(line["failures"]) for line in select(run.lines, "check")):
        found.append(f"reports {failures} failed checks")
    differing = [name for name, (_, is_alike) in differences(run.about).items() if not is_alike]
    if differing:
        found.append(f"losses of {', '.join(differing)} differ")
    return found


def differences(about: _Line) -> dict[str, tuple[float, bool]]:
    """Return how far the losses of others' tables are from the package's, relative, and whether that is little enough.

    None where the run compared no trainings.
    """
    compared = about.get("compared", {"losses": {}})
    losses = dict(compared["losses"])
    own, found = losses.pop(OWN_TABLES, []), {}
    for name, others in losses.items():
        far = max(abs(one - other) / abs(other) for one, other in zip(others, own, strict=True))
        found[name] = (far, far <= compared["tolerance"])
    return found


def newest_runs(runs: Iterable[Run], subject: str) -> list[Run]:
    """Return a subject's newest run on each number of GPUs, the largest number first.

    Raises:
        ValueError: one of them may not be shown.
    """
    newest: dict[int, Run] = {}
    for run in runs:
        if run.subject == subject:
            newest.setdefault(run.pes, run)
    for run in newest.values():
        if found := problems(run):
            raise ValueError(f"{run.file} {'; '.join(found)}. Run it again, or delete the record.")
    return sorted(newest.values(), key=lambda run: -run.pes)
