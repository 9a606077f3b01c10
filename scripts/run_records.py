"""Runs on record: what one has written about a world, which of them are shown, and what speaks against one."""

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

from harness.record import select  # noqa: E402

__all__ = [
    "OWN_TABLES",
    "REPOSITORY",
    "RESULTS",
    "Run",
    "case_of",
    "current_runs",
    "differences",
    "failed_of",
    "problems",
    "read_runs",
    "without_failed",
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
        note: of a line {"kind": "note", "commit": ..., "command": ...}, added by hand where the run did not know it.
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
        command = self.note.get("command", self.about.get("command"))
        return None if command is None else re.sub(r" --(out|json) \S+", "", command)

    @property
    def commit(self) -> str:
        """What the record says of its commit, short."""
        commit = self.about.get("commit")
        return "none" if commit is None else re.sub(r"^([0-9a-f]{7})[0-9a-f]*", r"\1", commit)

    @property
    def cases(self) -> frozenset[tuple[str, ...]]:
        """What was measured, so that a later run of the same can be told."""
        times = select(self.lines, "time")
        keys = (
            "config",
            "distribution",
            "optimizer",
            "shape",
            "shape_name",
            "vectors",
            "group",
            "case",
            "size",
            "method",
        )
        return frozenset(tuple(_text(line.get(key)) for key in keys) for line in times) or frozenset(
            [tuple(str(self.about.get(name)) for name in ("model", "layers", "num_rows")) + _choices(self.about)]
        )


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _choices(about: _Line) -> tuple[str, ...]:
    """Return what a comparison of trainings was asked for."""
    options = about.get("options", {}) if "compared" in about else {}
    return tuple(f"{name}={value}" for name, value in sorted(options.items()) if name not in ("output", "seed"))


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
                runs.append(Run(path.name, found[1], line["pes"], line, without_failed(own), note))
            elif "kind" not in line:
                subject = next((name for field, name in _EXAMPLES.items() if field in line), "sparse_embedding_train")
                runs.append(Run(path.name, subject, line["pes"], line, (), note))
    return sorted(runs, key=lambda run: str(run.about["date"]), reverse=True)


def case_of(line: _Line) -> str:
    named = (line.get(field) for field in ("case", "shape_name", "config", "size", "shape"))
    return next((name for name in named if isinstance(name, str)), "None")


def failed_of(line: _Line) -> list[tuple[str, str]]:
    """Return the cases and methods of which a check says that they failed ("PE 0, method, ...")."""
    case = case_of(line)
    return [(case, [*failure.split(", "), ""][1]) for failure in line["failures"]]


def without_failed(lines: Sequence[_Line]) -> list[_Line]:
    """Return a record's lines without the times of what a check found wrong; where it names no method, of all."""
    failed = {pair for line in select(lines, "check") for pair in failed_of(line)}

    def is_wrong(line: _Line) -> bool:
        case = case_of(line)
        return (case, str(line.get("method"))) in failed or (case, "") in failed

    return [line for line in lines if line["kind"] != "time" or not is_wrong(line)]


def problems(run: Run) -> list[str]:
    """Return what speaks against the figures of a run; nothing where all is known of it and all went well."""
    found = []
    commit = run.about.get("commit")
    if "commit" in run.note:
        found.append("its commit is noted by hand")
    elif commit is None:
        found.append("names no commit")
    elif not re.fullmatch(r"[0-9a-f]{40}", commit):
        found.append(f"names commit {run.commit}")
    if run.command is None:
        found.append("names no command")
    failures = sum(len(line["failures"]) for line in select(run.lines, "check"))
    if failures:
        found.append(f"reports {failures} failed checks")
    differing = [name for name, (_, is_alike) in differences(run.about).items() if not is_alike]
    if differing:
        found.append(f"losses of {', '.join(differing)} differ")
    if run.about["backend"] != "cuda":
        found.append("ran without a GPU")
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


def current_runs(runs: Iterable[Run], subject: str) -> list[Run]:
    """Return the runs of a subject that may be shown: of those that measured the same on the same GPUs, the newest."""
    found: dict[tuple[str, frozenset[tuple[str, ...]]], Run] = {}
    for run in runs:
        if run.subject == subject and run.about["backend"] == "cuda":
            found.setdefault((run.place, run.cases), run)
    return sorted(found.values(), key=lambda run: -run.pes)
