"""The documents: tables as the records give them, links that lead somewhere, every variable, a README that is short."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
LINKED = [
    "README.md",
    "benchmarks/README.md",
    "launch/README.md",
    *sorted(f"docs/{p.name}" for p in REPOSITORY.glob("docs/*.md")),
]
# What the kernels' sources say about themselves, linked from its first document.
PROTOCOL = ["cuda/DESIGN.md", *sorted(f"cuda/kernels/{p.name}" for p in REPOSITORY.glob("cuda/kernels/*.md"))]
MOST_WORDS = 900
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_VARIABLE = re.compile(r"PERSISTENT_OPS_[A-Z_]*[A-Z]")


def _tables() -> Any:
    spec = importlib.util.spec_from_file_location("document_tables", REPOSITORY / "scripts" / "tables.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before = list(sys.path)
    sys.modules[spec.name] = module  # dataclasses look themselves up there
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path[:] = before
    return module


tables = _tables()


def _without_code(text: str) -> str:
    return re.sub(r"`[^`\n]*`", "", re.sub(r"```.*?```", "", text, flags=re.DOTALL))


def _anchors(text: str) -> set[str]:
    """Return the names that GitHub gives to the headings."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


# ---- documents -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", tables.DOCUMENTS)
def test_tables_are_those_that_the_records_give(name: str) -> None:
    path = REPOSITORY / name
    assert tables.BLOCK.search(path.read_text()), "has no table"
    assert tables.rewritten(path) == path.read_text(), "run: python scripts/tables.py --write"


def test_other_documents_have_no_tables_to_be_made() -> None:
    assert [name for name in LINKED if tables.BLOCK.search((REPOSITORY / name).read_text())] == sorted(tables.DOCUMENTS)


def test_readme_is_short() -> None:
    assert len((REPOSITORY / "README.md").read_text().split()) <= MOST_WORDS


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


def test_gpu_runs_name_test_files() -> None:
    for run in json.loads((REPOSITORY / "tests" / "gpu_runs.json").read_text()):
        missing = [name for name in run["files"] if not (REPOSITORY / "tests" / f"{name}.py").exists()]
        assert missing == [], run["date"]


def test_a_test_file_has_its_newest_run_on_each_kind_of_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "test_sums.py").write_text('"""Sums."""\n')
    (tmp_path / "test_norms.py").write_text('"""Norms."""\n')
    runs = [("03", "1x H200", "ccccccc"), ("02", "2x H200", "bbbbbbb"), ("01", "1x H200", "aaaaaaa")]
    listed = [{"date": f"2026-01-{day}", "gpus": gpus, "commit": it, "files": ["test_sums"]} for day, gpus, it in runs]
    (tmp_path / "gpu_runs.json").write_text(json.dumps(listed))
    monkeypatch.setattr(tables, "TESTS", tmp_path)
    shown = tables._tests_block(tmp_path)
    newest = "1x H200, ccccccc, 2026-01-03; 2x H200, bbbbbbb, 2026-01-02"
    assert f"| [test_sums.py](test_sums.py) | Sums. | yes | {newest} |" in shown
    assert "| [test_norms.py](test_norms.py) | Norms. | yes | - |" in shown


# ---- records -------------------------------------------------------------------------------------------------------

_COMMIT = "0123456789abcdef0123456789abcdef01234567"


def _record(folder: Path, *, name: str = "gemv.jsonl", fused_us: float = 10.0, **changes: Any) -> None:
    """Write a small record of gemv_all_reduce that has nothing against it but the changes."""
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
    """A folder of records in place of the project's."""
    read = tables.read_runs
    monkeypatch.setattr(tables, "read_runs", lambda: read(tmp_path))
    return tmp_path


def test_a_record_with_nothing_against_it_is_shown(results: Path) -> None:
    _record(results)
    assert tables.problems(*tables.read_runs()) == []
    shown = tables._runs_block(REPOSITORY, "gemv_all_reduce")
    assert "| `8192x3584` | 10.0 | 8.0 | 1.25 | 20.0 | 15.0 | 1.50 |" in shown
    assert "2x H200, 2026-01-02; `persistent-ops bench gemv_all_reduce --worlds 2`; " in shown
    assert "the record names commit 0123456;" in shown
    cells = "| `8192x3584` | 10.0 | 15.0 | 1.50 | 1.25 | 2x H200, 2026-01-02 |"
    assert cells in tables._operators_block(REPOSITORY)


@pytest.mark.parametrize(
    ("changes", "problem", "said"),
    [
        ({"commit": None}, "names no commit", "the record names no commit"),
        ({"commit": f"{_COMMIT} with changes"}, "names commit 0123456 with changes", "commit 0123456 with changes"),
    ],
)
def test_what_speaks_against_a_record_is_said_beneath_its_table(
    results: Path, changes: dict[str, Any], problem: str, said: str
) -> None:
    _record(results, **changes)
    assert tables.problems(*tables.read_runs()) == [problem]
    assert "8192x3584" in (shown := tables._runs_block(REPOSITORY, "gemv_all_reduce"))
    assert said in shown
    assert problem in tables._records_block(REPOSITORY)


def test_a_method_whose_check_failed_is_left_out(results: Path) -> None:
    _record(results, failures=["PE 0, cublas_nccl, input 2: 1 values have other bits", "PE 1, cublas_nccl, input 2: 1"])
    assert tables.problems(*tables.read_runs()) == ["reports 2 failed checks"]
    shown = tables._runs_block(REPOSITORY, "gemv_all_reduce")
    assert "| `8192x3584` | 10.0 | 8.0 | 1.25 | 15.0 | 1.50 |" in shown
    assert "2 checks failed, of `cublas_nccl`, which is left out there" in shown


def test_a_case_whose_check_names_no_method_is_left_out(results: Path) -> None:
    _record(results, failures=["PE 0"])
    assert "8192x3584" not in tables._runs_block(REPOSITORY, "gemv_all_reduce")


def test_a_run_without_gpus_is_not_shown(results: Path) -> None:
    _record(results, backend="host")
    assert tables.problems(*tables.read_runs()) == ["ran without a GPU"]
    assert "8192x3584" not in tables._runs_block(REPOSITORY, "gemv_all_reduce")
    assert "15.0" not in tables._operators_block(REPOSITORY)


def test_a_commit_noted_by_hand_is_said_to_be(results: Path) -> None:
    _record(results, commit=None, note={"commit": _COMMIT})
    assert tables.problems(*tables.read_runs()) == ["its commit is noted by hand"]
    said = "commit 0123456, noted by hand (the record names no commit)"
    assert said in tables._runs_block(REPOSITORY, "gemv_all_reduce")
    _record(results, commit=None, note={"commit": _COMMIT}, failures=["PE 0"])
    assert tables.problems(*tables.read_runs()) == ["its commit is noted by hand", "reports 1 failed checks"]


def test_of_runs_that_measured_the_same_the_newest_is_shown(results: Path) -> None:
    _record(results, name="b.jsonl", fused_us=11.0, date="2026-01-01T00:00:00+00:00")
    _record(results, name="a.jsonl", fused_us=12.0, date="2026-01-03T00:00:00+00:00")
    _record(results, name="c.jsonl", fused_us=13.0, date="2026-01-04T00:00:00+00:00", backend="host")
    shown = tables._runs_block(REPOSITORY, "gemv_all_reduce")
    assert "| 12.0 |" in shown
    assert "| 11.0 |" not in shown
    assert "| 13.0 |" not in shown


@pytest.mark.parametrize(
    ("field", "one", "other"),
    [("optimizer", "sgd", "adagrad"), ("vectors", 17, 32), ("shape", {"rows": [4]}, {"rows": [8]})],
)
def test_runs_of_other_shapes_are_not_the_same(field: str, one: object, other: object) -> None:
    def run(value: object) -> Any:
        line = {"kind": "time", "pes": 2, "method": "fused", field: value}
        return tables.Run("a.jsonl", "bench", 2, {}, [line], {})

    assert run(one).cases == run(one).cases != run(other).cases


@pytest.mark.parametrize(("peers", "ratio"), [((), None), (("fbgemm_step",), "3.00")])
def test_a_graph_is_not_compared_with_eager_calls_alone(peers: tuple[str, ...], ratio: str | None) -> None:
    us = {"forward_backward": 10.0, "fbgemm_step_eager": 40.0, "fbgemm_step": 30.0}
    about = {"kind": "time", "pes": 2, "distribution": "uniform", "optimizer": "sgd", "config": "B", "limit_us": 8.0}
    lines = [{**about, "method": name, "us": us[name]} for name in ("forward_backward", "fbgemm_step_eager", *peers)]
    (table,) = tables._backward_tables(tables.Run("a.jsonl", "embedding_backward", 2, {}, lines, {}))
    head, _, row = table.splitlines()
    assert ("x best peer" in head) == (ratio is not None) and (ratio is None or f"| {ratio} |" in row)
