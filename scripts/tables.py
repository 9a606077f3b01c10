"""Tables of the documents, made from records and code: reports which tables differ; --write replaces them.

A document has a table between two comments. The first one names the table:

    <!-- table: runs gemv_all_reduce -->
    <!-- end of table -->

Figures come from benchmarks/results/*.jsonl: an operator's newest record for each number of GPUs.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

import all_reduce
import dlrm_embedding
import embedding.methods
import embedding_backward
import gemm
import gemm_exchange
import gemv.methods
import row_parallel_linear
import sparse.methods
import triton_gemm_all_to_all
from embedding_step.methods import PHASES
from public_names import public_names, summary_of
from run_records import (
    OWN_TABLES,
    REPOSITORY,
    RESULTS,
    Run,
    case_of,
    differences,
    newest_runs,
    problems,
    read_runs,
)
from sparse.report import swept_lines
from sparse_all_reduce import SparseAllReduce

from persistent_ops.testing.record import pes_text, select, unique, us_text

__all__ = ["DOCUMENTS", "Run", "newest_runs", "problems", "read_runs", "rewritten"]

BLOCK = re.compile(r"(<!-- table: ([^\n]*?) -->\n).*?(<!-- end of table -->)", re.DOTALL)
DOCUMENTS = [
    path for path in (REPOSITORY / "README.md", *sorted(REPOSITORY.glob("docs/*.md"))) if BLOCK.search(path.read_text())
]

_Line = dict[str, Any]
# The cases of which README has one figure: neither the best nor the worst of their tables.
_BAGS, _GEMV, _ROWS, _SUM = "B2048_T256_P10", "8192x3584", "5Mx2048_50k_zipf", "256K"
_STEP, _GEMM = "adagrad_uniform", "1024x2560x8192"
_MODULE = "nn.ShardedEmbeddingBagCollection"
# What these columns say: more is better in the one, less in the other.
_SPEEDUP, _OVER_LIMIT = "speedup over best baseline", "time / limit"
_OURS_SPARSE = ("auto", "into")
_BASELINES_SUM = ("nccl", "symm_one_shot", "symm_two_shot")
_BASELINES_SPARSE = {  # columns, and the methods of which each is the faster one
    "all-gather + `index_add`": ("gather_add", "gather_add_graph"),
    "union + NCCL": ("union_reduce", "union_reduce_graph"),
    "dense NCCL": ("dense_reduce",),
    "Gloo": ("gloo",),
}


# ---- a run's tables ------------------------------------------------------------------------------------------------


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of markdown, without columns in which no row has anything."""
    rows = list(rows)
    kept = [i for i in range(len(head)) if any(row[i] for row in rows)]
    listed = [[cells[i] for i in kept] for cells in (head, ["---"] * len(head), *rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in listed)


def _us(line: _Line | None) -> str:
    return us_text(line["us"]) if line else ""


def _times(a: float | None, b: float | None) -> str:
    """Return a / b, or nothing where one is missing."""
    return f"{a / b:.2f}" if a and b else ""


def _fastest(rows: dict[str, _Line], methods: Iterable[str]) -> float | None:
    return min((float(rows[name]["us"]) for name in methods if name in rows), default=None)


def _by(lines: Sequence[_Line], field: str) -> dict[Any, dict[str, _Line]]:
    """Return "time" lines by a field, then by method."""
    found: dict[Any, dict[str, _Line]] = {}
    for line in select(lines, "time"):
        found.setdefault(line[field], {})[line["method"]] = line
    return found


def _embedding_tables(run: Run) -> list[str]:
    methods = embedding.methods
    tables = []
    for distribution in unique(select(run.lines, "time"), "distribution"):
        is_uniform = distribution == "uniform"  # hot rows stay in the cache, so the limit says less
        rows = []
        for config, by_method in _by(select(run.lines, "time", distribution=distribution), "config").items():
            fused = by_method.get("fused")
            limit = by_method[next(iter(by_method))]["limit_us"] if is_uniform else None
            rows.append(
                [
                    f"`{config}`",
                    _us(fused),
                    us_text(limit) if limit else "",
                    _times(fused["us"] if fused else None, limit),
                    *[_us(by_method.get(name)) for name in methods.METHODS[1:]],
                    _times(_fastest(by_method, methods.UNFUSED), fused["us"] if fused else None),
                ]
            )
        labels = [methods.LABELS[name].format(collective="NCCL") for name in methods.METHODS[1:]]
        tables.append(_table([f"us, {distribution} indices", "fused", "limit", _OVER_LIMIT, *labels, _SPEEDUP], rows))
    rows = []
    for config in unique(select(run.lines, "skew", distribution="uniform"), "config"):
        pair = {line["method"]: line for line in select(run.lines, "skew", distribution="uniform", config=config)}
        if "fused" in pair and "oblivious" in pair:
            cells = [text for line in pair.values() for text in (_us(line), f"{100 * line['skew']:.1f} %")]
            rows.append([f"`{config}`", *cells, _times(pair["oblivious"]["us"], pair["fused"]["us"])])
    if rows:
        head = [
            "us, single launches begun together",
            "communication-aware",
            "skew",
            "oblivious",
            "skew",
            "speedup over oblivious",
        ]
        tables.append(_table(head, rows))
    for line in select(run.lines, "host_cost"):
        costs = ", ".join(f"{us:.0f} us ({name})" for name, us in line["us_per_call"].items())
        tables.append(f"Host time of an eager call, by the number of tables: {costs}.")
    return tables


def _backward_tables(run: Run) -> list[str]:
    """The backward pass with its parts and baselines; then both passes with theirs."""
    parts = {"fused": ("sort", "kernel", "kernel_alone", "exchange"), "forward_backward": ()}
    tables = []
    for ours, baselines in embedding_backward.BASELINES.items():
        methods = (ours, *parts[ours], *baselines)
        rows = []
        for distribution in unique(select(run.lines, "time"), "distribution"):
            lines = select(run.lines, "time", distribution=distribution)
            for optimizer in unique(lines, "optimizer"):
                by_config = _by(select(lines, "time", optimizer=optimizer), "config")
                for config, by_method in by_config.items():
                    if ours not in by_method:
                        continue
                    own = by_method[ours]
                    times = [_us(by_method.get(name)) for name in methods[1:]]
                    # What is a graph is compared where a graph of a baseline was timed too.
                    graphs = [name for name in baselines if not name.endswith("_eager")]
                    timed = baselines if any(name in by_method for name in graphs) else ()
                    ahead = _times(_fastest(by_method, timed), own["us"])
                    limit = own["limit_us"]
                    what = f"`{config}`, {optimizer}" + ("" if distribution == "uniform" else f", {distribution}")
                    rows.append([what, _us(own), us_text(limit), _times(own["us"], limit), *times, ahead])
        labels = [embedding_backward.LABELS[name].format(collective="NCCL") for name in methods]
        head = [f"us, {pes_text(run.pes)}", labels[0], "limit", _OVER_LIMIT, *labels[1:], _SPEEDUP]
        if rows:
            tables.append(_table(head, rows))
    return tables


def _dlrm_embedding_tables(run: Run) -> list[str]:
    """Return the steps of all cases, and the phases of eager ones."""
    methods, baselines = dlrm_embedding.METHODS, dlrm_embedding.BASELINES["fused"]
    ours = [name for name in methods if name not in baselines]
    rows = []
    for case, by_method in _by(run.lines, "case").items():
        limit = next(iter(by_method.values()))["limit_us"]
        own = _fastest(by_method, ours)
        times = [_us(by_method.get(name)) for name in methods]
        rows.append(
            [f"`{case}`", *times, us_text(limit), _times(own, limit), _times(_fastest(by_method, baselines), own)]
        )
    labels = {name: text.format(collective="NCCL") for name, text in dlrm_embedding.LABELS.items()}
    head = [f"us, {pes_text(run.pes)}", *[labels[name] for name in methods], "limit", _OVER_LIMIT, _SPEEDUP]
    found = [_table(head, rows)]
    phases = [
        [
            f"`{line['case']}`",
            labels[line["method"]],
            *[us_text(line["us"][n]) if n in line["us"] else "" for n in PHASES],
        ]
        for line in select(run.lines, "phases")
    ]
    return [*found, _table([f"us of the phases, {pes_text(run.pes)}", "", *PHASES], phases)] if phases else found


def _dlrm_train_tables(run: Run) -> list[str]:
    """Return a step of each way of a comparison."""
    options, compared = run.about["options"], run.about["compared"]
    far_off, own = differences(run.about), compared["seconds"][OWN_TABLES]
    most = f"{options['model']}, at most {max(run.about['num_rows']):,} rows a table, batch {options['batch']:,}"
    rows = []
    for name, seconds in compared["seconds"].items():
        losses = compared["losses"][name]
        far = f"{far_off[name][0]:.1g}" if name in far_off else ""
        rows.append(
            [name, f"{1e3 * seconds:.2f}", f"{seconds / own:.2f}", f"{losses[0]:.6f}", f"{losses[-1]:.6f}", far]
        )
    head = [
        f"tables by, {pes_text(run.pes)}",
        "ms per step",
        f"time / {OWN_TABLES}",
        "first loss",
        "last compared",
        "largest difference",
    ]
    kind = "replays of CUDA graphs" if options.get("is_captured") else "eager"
    what = f"Model {most}, {options['optimizer']}, dense part in {options['precision']}; steps are {kind}."
    return [_table(head, rows), what, *[f"{line}." for line in compared["left_out"]]]


def _gemv_tables(run: Run) -> list[str]:
    labels = {
        name: text.format(product="cuBLAS", collective="NCCL").replace(" alone", "")
        for name, text in gemv.methods.LABELS.items()
    }
    ours = ("fused", "prefetch") if run.pes > 1 else ("gemv_alone", "gemv_alone_prefetch")
    baselines = gemv.methods.UNFUSED if run.pes > 1 else ("cublas_alone",)
    rows = []
    for shape, by_method in _by(run.lines, "shape_name").items():
        limit = next(iter(by_method.values()))["limit_us"]
        first = by_method.get(ours[0])
        rows.append(
            [
                f"`{shape}`",
                *[_us(by_method.get(name)) for name in ours],
                us_text(limit),
                _times(first["us"] if first else None, limit),
                *[_us(by_method.get(name)) for name in baselines],
                *[_times(_fastest(by_method, baselines), _fastest(by_method, [name])) for name in ours],
            ]
        )
    speedup = _SPEEDUP if run.pes > 1 else "speedup over cuBLAS"
    head = [f"us, {pes_text(run.pes)}", *[labels[name] for name in ours], "limit", _OVER_LIMIT]
    return [_table([*head, *[labels[name] for name in baselines], speedup, f"{speedup}, with prefetch"], rows)]


def _gemm_tables(run: Run) -> list[str]:
    """Return a table for each load."""
    tables = []
    for load in unique(select(run.lines, "time"), "load"):
        by_shape = _by(select(run.lines, "time", load=load), "shape")
        rows = [[f"`{shape}`", *gemm.cells(by_method)] for shape, by_method in by_shape.items()]
        tables.append(_table([f"us, {load}, {pes_text(run.pes)}", *gemm.COLUMNS], rows))
    return tables


def _gemm_exchange_tables(run: Run) -> list[str]:
    """Return tables for each exchange: the times, and what the cost model predicts."""
    tables = []
    for exchange in unique(select(run.lines, "time"), "exchange"):
        by_shape = _by(select(run.lines, "time", exchange=exchange), "shape_name")
        for columns, cells in gemm_exchange.TABLES:
            rows = [[f"`{shape}`", *cells(by_method)] for shape, by_method in by_shape.items()]
            names = [column.replace("\n", " ") for column in columns]
            tables.append(_table([f"us, gemm_{exchange}, {pes_text(run.pes)}", *names], rows))
    return tables


def _triton_tables(run: Run) -> list[str]:
    by_shape = _by(select(run.lines, "time"), "shape_name")
    rows = [[f"`{shape}`", *triton_gemm_all_to_all.cells(by_method)] for shape, by_method in by_shape.items()]
    names = [column.replace("\n", " ") for column in triton_gemm_all_to_all.COLUMNS]
    return [_table([f"us, {pes_text(run.pes)}", *names], rows)]


def _all_reduce_tables(run: Run) -> list[str]:
    return [_sums_table(run, norms=norms) for norms in (False, True)]


def _row_parallel_tables(run: Run) -> list[str]:
    methods = row_parallel_linear.METHODS
    rows = []
    for shape, by_method in _by(run.lines, "shape").items():
        limit, own = next(iter(by_method.values()))["limit_us"], by_method.get("layer")
        best = _fastest(by_method, row_parallel_linear.BASELINES)
        times = [_us(by_method.get(name)) for name in methods]
        rows.append([f"`{shape}`", *times, us_text(limit), _times(best, own["us"] if own else None)])
    labels = [row_parallel_linear.LABELS[name].format(collective="NCCL", product="cuBLAS") for name in methods]
    return [_table([f"us, {pes_text(run.pes)}", *labels, "limit", _SPEEDUP], rows)]


def _sums_table(run: Run, *, norms: bool) -> str:
    """Return a table by size, of sums alone or with residual and norm."""
    prefix = "norm_" if norms else ""
    baselines = [f"{prefix}{name}" for name in _BASELINES_SUM]
    rows = []
    for size, by_method in _by(run.lines, "size").items():
        own = by_method.get(f"{prefix}auto")
        rows.append(
            [
                size,
                *[_us(by_method.get(f"{prefix}{name}")) for name in all_reduce.ALGORITHMS],
                us_text(next(iter(by_method.values()))["limit_us"]),
                *[_us(by_method.get(name)) for name in baselines],
                _times(_fastest(by_method, baselines), own["us"] if own else None),
            ]
        )
    labels = [all_reduce.LABELS[name].format(collective="NCCL") for name in baselines]
    what = "us, sum + residual + RMS norm" if norms else "us, sum"
    return _table([f"{what}, {pes_text(run.pes)}", *all_reduce.ALGORITHMS, "limit", *labels, f"{_SPEEDUP}, auto"], rows)


def _sparse_tables(run: Run) -> list[str]:
    tables = []
    rows = []
    for case, by_method in _by(select(run.lines, "time", group="cases"), "case").items():
        (about,) = select(run.lines, "case", group="cases", case=case)
        own = _fastest(by_method, _OURS_SPARSE)
        baselines = [_fastest(by_method, names) for names in _BASELINES_SPARSE.values()]
        host = select(run.lines, "host", group="cases", case=case, method="auto")
        rows.append(
            [
                f"`{case}`",
                *[_us(by_method.get(name)) for name in _OURS_SPARSE],
                _us(host[0]) if host else "",
                us_text(about["limit_us"]),
                us_text(about["unicast_us"]),
                _times(own, about["unicast_us"]),
                *[us_text(baseline) if baseline else "" for baseline in baselines],
                _times(min((baseline for baseline in baselines if baseline), default=None), own),
            ]
        )
    if rows:
        head = [
            f"us, {pes_text(run.pes)}",
            "operator",
            "into, in a graph",
            "host time of the operator, without its wait",
        ]
        head += ["limit", "unicast limit", "time / unicast limit"]
        tables.append(_table([*head, *_BASELINES_SPARSE, _SPEEDUP], rows))
    for sweep, name in (("sparsity", "rows on each PE"), ("overlap", "rows that all PEs share")):
        points = swept_lines(run.lines, sweep, run.pes)
        if points:
            methods = [method for method in sparse.methods.SWEPT if any(method in times for _, times in points)]
            labels = [SparseAllReduce.label_on(method, "cuda") for method in methods]
            rows = [
                [f"{case['shape']['point']:.3g}", us_text(case["limit_us"]), us_text(case["unicast_us"])]
                + [_us(times.get(method)) for method in methods]
                for case, times in points
            ]
            tables.append(_table([f"us, by the share of {name}", "limit", "unicast limit", *labels], rows))
    return tables


def _decode_tables(run: Run) -> list[str]:
    steps = {
        method["label"]: statistics.median(map(max, zip(*method["seconds"], strict=True)))
        for method in run.about["methods"]
    }
    per_layer = [
        us_text(1e6 * (seconds - run.about["outside_seconds"]) / run.about["layers"]) for seconds in steps.values()
    ]
    best = min((seconds for label, seconds in steps.items() if not label.startswith("fused")), default=None)
    model = f"{run.about['model']['name']}, {run.about['layers']} layers"
    row = [model, *per_layer, _times(best, steps.get("fused"))]
    return [_table([f"us per layer, {pes_text(run.pes)}", *steps, f"{_SPEEDUP}, whole step"], [row])]


def _train_tables(run: Run) -> list[str]:
    passes = {name: 1e3 * seconds for name, seconds in run.about["passes"].items()}
    cells = [1e3 * run.about["seconds"] / run.about["timed_steps"], passes["hook"], passes["none"]]
    row = [f"{run.about['options']['batch']} words", *[f"{ms:.2f}" for ms in cells]]
    head = [f"ms, {pes_text(run.pes)}", "step", "forward and backward pass, with the hook", "without an exchange"]
    return [_table([*head, "all PEs' tables have the same bits"], [[*row, "yes" if run.about["same_bits"] else "no"]])]


_TABLES: dict[str, Callable[[Run], list[str]]] = {
    "dlrm_embedding": _dlrm_embedding_tables,
    "dlrm_train": _dlrm_train_tables,
    "embedding_all_to_all": _embedding_tables,
    "embedding_backward": _backward_tables,
    "gemm": _gemm_tables,
    "gemm_exchange": _gemm_exchange_tables,
    "gemv_all_reduce": _gemv_tables,
    "all_reduce": _all_reduce_tables,
    "row_parallel_linear": _row_parallel_tables,
    "sparse_all_reduce": _sparse_tables,
    "decode_loop": _decode_tables,
    "sparse_embedding_train": _train_tables,
    "triton_gemm_all_to_all": _triton_tables,
}


def _source(run: Run, folder: Path) -> str:
    """Return where the figures are from, in one paragraph; links lead from `folder`."""
    about = run.about
    commit = f"the record names commit {run.commit}" if run.commit != "none" else "the record names no commit"
    if "commit" in run.note:
        commit = f"commit {run.note['commit'][:7]}, noted by hand ({commit})"
    versions = about.get("versions", about)
    known = {
        "torch": versions.get("torch"),
        "CUDA": versions.get("cuda"),
        "NCCL": versions.get("nccl"),
        "NVSHMEM": about.get("nvidia-nvshmem-cu13"),
        "FBGEMM": versions.get("fbgemm"),
        **{line["name"]: line["version"] for line in select(run.lines, "library")},
    }
    software = ", ".join(f"{name} {version}" for name, version in known.items() if version)
    command = f"`{run.command}`" if run.command else "the record names no command"
    text = f"{run.place}, {run.date}; {command}; {commit}; {software}."
    for line in select(run.lines, "ceilings"):
        store = f", stores to peers {line['store'] / 1e9:.0f} GB/s" if line["store"] else ""
        text += f" Ceilings: HBM read {line['read'] / 1e12:.2f} TB/s{store}."
    text += " All checks passed." * any(select(run.lines, "check"))
    return f"{text} [{run.file}]({os.path.relpath(RESULTS / run.file, folder)})"


def _show(runs: Sequence[Run], folder: Path) -> str:
    return "\n\n".join("\n\n".join((*_TABLES[run.subject](run), _source(run, folder))) for run in runs)


# ---- blocks --------------------------------------------------------------------------------------------------------


def _runs_block(folder: Path, subject: str) -> str:
    return _show(newest_runs(read_runs(), subject), folder)


def _operators_block(folder: Path) -> str:
    """Return one row per operator: a figure against the best baseline and against the limit."""
    runs = read_runs()
    rows = []
    for name, does, subject, case, is_alone in (
        ("embedding_all_to_all", "embedding bags, sent to their samples' PEs", "embedding_all_to_all", _BAGS, False),
        ("gemv_all_reduce", "`weight @ x` for 1 to 16 vectors, summed over PEs", "gemv_all_reduce", _GEMV, False),
        ("gemv", "the same on one PE alone", "gemv_all_reduce", _GEMV, True),
        ("gemm_reduce_scatter", "`a @ b`, summed over PEs that get rows each", "gemm_exchange", _GEMM, False),
        ("gemm_all_to_all", "`a @ b`, whose rows are sent to PEs", "gemm_exchange", _GEMM, False),
        ("all_reduce", "sum over PEs", "all_reduce", _SUM, False),
        ("all_reduce_rms_norm", "the same and the RMS norm of rows", "all_reduce", _SUM, False),
        ("sparse_all_reduce", "sum of sparse COO tensors over PEs", "sparse_all_reduce", _ROWS, False),
        (_MODULE, "in four: lookups exchanged, pooled, sorted, rows updated", "dlrm_embedding", _STEP, False),
    ):
        found = [run for run in newest_runs(runs, subject) if (run.pes == 1) == is_alone]
        figures = [figure for run in found for figure in [_headline(run, name, case)] if figure]
        rows += [[f"`po.{name}`", does, f"`{case}`", *figure] for figure in figures[:1]]
    head = ["", "in one kernel", "case", "us", "best baseline, us", _SPEEDUP, _OVER_LIMIT, "GPUs, date", "command"]
    return _table(head, rows)


def _headline(run: Run, name: str, case: str) -> list[str] | None:
    lines = [
        line
        for line in select(run.lines, "time")
        if case == case_of(line)
        and line.get("distribution", "uniform") == "uniform"
        and line.get("group", "cases") == "cases"
        and line.get("exchange", "") == name.removeprefix("gemm_") * ("exchange" in line)
    ]
    by_method = {line["method"]: line for line in lines}
    ours, baselines = {
        "embedding_all_to_all": (("fused",), embedding.methods.UNFUSED),
        "gemv_all_reduce": (("fused",), gemv.methods.UNFUSED),
        "gemv": (("gemv_alone",), ("cublas_alone",)),
        "gemm_reduce_scatter": (("fused",), ("nccl", "symm_mem")),
        "gemm_all_to_all": (("fused",), ("nccl",)),
        "all_reduce": (("auto",), _BASELINES_SUM),
        "all_reduce_rms_norm": (("norm_auto",), tuple(f"norm_{name}" for name in _BASELINES_SUM)),
        "sparse_all_reduce": (_OURS_SPARSE, sparse.methods.BASELINES),
        _MODULE: (("fused",), dlrm_embedding.BASELINES["fused"]),
    }[name]
    own, best = _fastest(by_method, ours), _fastest(by_method, baselines)
    if own is None or best is None:
        return None
    limit = next(line["limit_us"] for line in [*lines, *select(run.lines, "case", case=case)] if "limit_us" in line)
    if "gemm" in by_method:
        limit = max(limit, by_method["gemm"]["us"])
    where = [f"{run.place}, {run.date}", f"`{run.command}`"]
    return [us_text(own), us_text(best), _times(best, own), _times(own, limit), *where]


def _public_names_block(folder: Path) -> str:
    """Return what `po` and its modules export, each with its first sentence."""
    rows = [[f"`{each.name}`", summary_of(each.what).replace("|", "\\|")] for each in public_names(with_parts=False)]
    return _table(["name", "what it is"], rows)


_BLOCKS: dict[str, Callable[..., str]] = {
    "public_names": _public_names_block,
    "runs": _runs_block,
    "operators": _operators_block,
}


def rewritten(path: Path) -> str:
    """Return a document's text with its tables as the records give them."""

    def replace(match: re.Match[str]) -> str:
        name, *arguments = match[2].split()
        return f"{match[1]}{_BLOCKS[name](path.parent, *arguments)}\n{match[3]}"

    return BLOCK.sub(replace, path.read_text())


def main() -> None:
    """Compare the documents with the records, or write them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--write", action="store_true", help="replace what differs")
    is_asked_to_write = parser.parse_args().write
    differ = [path for path in DOCUMENTS if rewritten(path) != path.read_text()]
    for path in differ:
        if is_asked_to_write:
            path.write_text(rewritten(path))
        sys.stdout.write(f"{path.relative_to(REPOSITORY)}: {'written' if is_asked_to_write else 'differs'}\n")
    sys.exit(bool(differ) and not is_asked_to_write)


if __name__ == "__main__":
    main()
