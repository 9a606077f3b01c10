"""The documents: tables match the records, links have targets, and all variables of the package are listed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import tables

REPOSITORY = Path(__file__).resolve().parents[2]
LINKED = [
    "README.md",
    "benchmarks/README.md",
    "launch/README.md",
    *sorted(f"docs/{p.name}" for p in REPOSITORY.glob("docs/*.md")),
]
# The pages in the kernels' source folders, linked from the first document.
PROTOCOL = ["cuda/DESIGN.md", *sorted(f"cuda/kernels/{p.name}" for p in REPOSITORY.glob("cuda/kernels/*.md"))]
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_VARIABLE = re.compile(r"PERSISTENT_OPS_[A-Z_]*[A-Z]")


def _without_code(text: str) -> str:
    return re.sub(r"`[^`\n]*`", "", re.sub(r"```.*?```", "", text, flags=re.DOTALL))


def _anchors(text: str) -> set[str]:
    """Return the names that GitHub gives to the headings."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


# ---- documents -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", tables.DOCUMENTS, ids=lambda path: path.name)
def test_tables_are_those_that_the_records_give(path: Path) -> None:
    assert tables.rewritten(path) == path.read_text(), "run: python scripts/tables.py --write"


@pytest.mark.parametrize("name", [*LINKED, *PROTOCOL])
def test_links_lead_somewhere(name: str) -> None:
    path = REPOSITORY / name
    targets = [target for target in _LINK.findall(_without_code(path.read_text())) if not target.startswith("http")]
    for target in targets:
        file, _, anchor = target.partition("#")
        found = path.parent / file if file else path
        assert found.exists(), target
        assert not anchor or anchor in _anchors(found.read_text()), target


def test_every_document_is_linked_from_the_readme() -> None:
    linked = set(_LINK.findall((REPOSITORY / "README.md").read_text()))
    assert set(LINKED) - {"README.md"} <= linked


def test_every_variable_of_the_package_is_told() -> None:
    sources = [
        *REPOSITORY.glob("persistent_ops/**/*.py"),
        *REPOSITORY.glob("launch/**/*"),
        *REPOSITORY.glob("scripts/*"),
    ]
    texts = [
        path.read_text()
        for path in [*sources, REPOSITORY / "Makefile"]
        if path.suffix in ("", ".py", ".sh") and path.is_file()
    ]
    told = _VARIABLE.findall((REPOSITORY / "docs" / "installation.md").read_text())
    assert set(told) == {name for text in texts for name in _VARIABLE.findall(text)}


# ---- records -------------------------------------------------------------------------------------------------------

_COMMIT = "0123456789abcdef0123456789abcdef01234567"


def _record(folder: Path, *, name: str = "gemv.jsonl", fused_us: float = 10.0, **changes: Any) -> None:
    """Write a small record of gemv_all_reduce that may be shown, except for the changes."""
    failures, note = changes.pop("failures", []), changes.pop("note", None)
    about = {
        "kind": "run",
        "pes": 2,
        "date": "2026-01-02T03:04:05+00:00",
        "command": "persistent-ops bench gemv_all_reduce --worlds 2 --out somewhere",
        "backend": "cuda",
        "gpu": "NVIDIA H200",
        "torch": "2.11.0",
        "commit": _COMMIT,
    }
    times = [
        {"kind": "time", "pes": 2, "shape_name": "8192x3584", "method": method, "us": us, "limit_us": 8.0}
        for method, us in (("fused", fused_us), ("cublas_nccl", 20.0), ("cublas_symm_one_shot", 15.0))
    ]
    lines = [{**about, **changes}, {"kind": "check", "pes": 2, "shape_name": "8192x3584", "failures": failures}, *times]
    if note is not None:
        lines.append({"kind": "note", **note})
    (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of records that replaces the project's."""
    read = tables.read_runs
    monkeypatch.setattr(tables, "read_runs", lambda: read(tmp_path))
    return tmp_path


def test_every_record_is_shown() -> None:
    runs = tables.read_runs()
    shown = [run for subject in {run.subject for run in runs} for run in tables.newest_runs(runs, subject)]
    assert sorted(run.file for run in runs) == sorted(run.file for run in shown), "delete what a newer one replaces"


def test_a_record_is_shown_with_where_it_is_from(results: Path) -> None:
    _record(results)
    shown = tables._runs_block(REPOSITORY, "gemv_all_reduce")
    assert "| `8192x3584` | 10.0 | 8.0 | 1.25 | 20.0 | 15.0 | 1.50 |" in shown
    assert "2x H200, 2026-01-02; `persistent-ops bench gemv_all_reduce --worlds 2`; " in shown
    assert "the record names commit 0123456;" in shown
    cells = "| `8192x3584` | 10.0 | 15.0 | 1.50 | 1.25 | 2x H200, 2026-01-02 |"
    assert cells in tables._operators_block(REPOSITORY)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"commit": None}, "the record names no commit"),
        ({"commit": f"{_COMMIT} with changes"}, "commit 0123456 with changes"),
        ({"commit": None, "note": {"commit": _COMMIT}}, "commit 0123456, noted by hand (the record names no commit)"),
    ],
)
def test_a_table_says_of_which_commit_it_is(results: Path, changes: dict[str, Any], said: str) -> None:
    _record(results, **changes)
    assert said in tables._runs_block(REPOSITORY, "gemv_all_reduce")


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"failures": ["PE 0, cublas_nccl, input 2: 1 values have other bits"]}, "reports 1 failed checks"),
        ({"backend": "host"}, "ran without a GPU"),
    ],
)
def test_a_run_that_failed_or_had_no_gpu_is_refused(results: Path, changes: dict[str, Any], problem: str) -> None:
    _record(results, **changes)
    with pytest.raises(ValueError, match=problem):
        tables._runs_block(REPOSITORY, "gemv_all_reduce")


def test_the_newest_run_on_each_number_of_gpus_is_shown(results: Path) -> None:
    _record(results, name="b.jsonl", fused_us=11.0, date="2026-01-01T00:00:00+00:00")
    _record(results, name="a.jsonl", fused_us=12.0, date="2026-01-03T00:00:00+00:00", gpu="NVIDIA H100")
    shown = tables._runs_block(REPOSITORY, "gemv_all_reduce")
    assert "| 12.0 |" in shown
    assert "| 11.0 |" not in shown


@pytest.mark.parametrize(("baselines", "ratio"), [((), None), (("fbgemm_step",), "3.00")])
def test_a_graph_is_not_compared_with_eager_calls_alone(baselines: tuple[str, ...], ratio: str | None) -> None:
    us = {"forward_backward": 10.0, "fbgemm_step_eager": 40.0, "fbgemm_step": 30.0}
    about = {"kind": "time", "pes": 2, "distribution": "uniform", "optimizer": "sgd", "config": "B", "limit_us": 8.0}
    lines = [
        {**about, "method": name, "us": us[name]} for name in ("forward_backward", "fbgemm_step_eager", *baselines)
    ]
    (table,) = tables._backward_tables(tables.Run("a.jsonl", "embedding_backward", 2, {}, lines, {}))
    head, _, row = table.splitlines()
    assert ("speedup over best baseline" in head) == (ratio is not None) and (ratio is None or f"| {ratio} |" in row)
