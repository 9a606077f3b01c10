"""The result of the decode loop, as one table."""

from __future__ import annotations

import math
import statistics
from typing import Any

import torch
from program import caveat, hardware_of
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

__all__ = ["passed", "print_report", "seconds_per_token", "tolerance"]

# fp32 sums in another order differ by more than a rounding: some hundred additions deep.
_LEAST_EPS = 2.0**-16


def tolerance(report: dict[str, Any]) -> float:
    """Return by how much logits of two methods may differ, relative to their norm.

    Every half layer rounds the residual stream once more or less in one method than in another; independent errors of
    one unit in the last place each add up to its square root of the number of half layers.
    """
    eps = max(torch.finfo(getattr(torch, report["dtype"])).eps, _LEAST_EPS)
    return eps * math.sqrt(2 * report["layers"])


def seconds_per_token(method: dict[str, Any]) -> float:
    """Return the median over the rounds on each PE, the maximum over the PEs."""
    return max(statistics.median(rounds) for rounds in method["seconds"])


def problems(report: dict[str, Any]) -> list[str]:
    """Return the errors of the results, one line each."""
    found = []
    for method in report["methods"]:
        if not method["is_repeatable"]:
            found.append(f"{method['label']}: the tokens differ between rounds or PEs")
        if method["difference"] > tolerance(report):
            found.append(f"{method['label']}: logits differ from the fused ones by {method['difference']:.2g}")
    reference = report["reference"]
    if reference is not None:
        if reference["difference"] > tolerance(report):
            found.append(f"fused: logits differ from the single-rank reference by {reference['difference']:.2g}")
        if report["dtype"] == "float32" and reference["equal_tokens"] < len(reference["tokens"][0]):
            found.append("fused: tokens differ from the single-rank reference")
    return found


def passed(report: dict[str, Any]) -> bool:
    """Return whether all methods' results agree as far as their rounding allows."""
    return not problems(report)


def print_report(report: dict[str, Any], console: Console) -> None:
    """Print hardware and shapes, the times of each method, how far the results agree, and an explanation."""
    options = report["options"]
    length = options["prompt_length"] if options["prompt"] is None else len(options["prompt"])
    console.print(f"\n[bold]Decode loop[/] {hardware_of(report)}")
    console.print(
        f"{escape(report['model']['name'])}, {report['layers']} of {report['model']['num_layers']} layers, "
        f"{report['dtype']}, batch {options['batch']}, prompt {length}, {options['tokens']} tokens after the first; "
        f"{'CUDA graph' if report['has_graphs'] else 'eager'}, {options['rounds']} rounds",
        highlight=False,
    )
    table = Table(box=box.SIMPLE_HEAD, padding=0, pad_edge=False)
    for header in ("layers by", "tokens/s", "ms/token", "us/layer", "x fused", "equal", "diff"):
        table.add_column(header, justify="left" if header.startswith("layers") else "right", no_wrap=True)
    fused = seconds_per_token(report["methods"][0])
    best = min(map(seconds_per_token, _unfused(report)))
    for method in report["methods"]:
        seconds = seconds_per_token(method)
        is_fused = method is report["methods"][0]
        style = "bold" if is_fused else "green" if seconds == best else ""
        table.add_row(
            method["label"],
            f"{options['batch'] / seconds:.1f}",
            f"{seconds * 1e3:.3f}",
            f"{(seconds - report['outside_seconds']) / report['layers'] * 1e6:.1f}",
            "" if is_fused else f"{seconds / fused:.2f}",
            "" if is_fused else f"{method['equal_tokens']}/{len(method['tokens'][0])}",
            "" if is_fused else f"{method['difference']:.1g}",
            style=style,
        )
    reference = report["reference"]
    if reference is not None:
        equal = f"{reference['equal_tokens']}/{len(reference['tokens'][0])}"
        table.add_row("one PE alone", "", "", "", "", equal, f"{reference['difference']:.1g}")
    console.print(table)
    for line in _notes(report):
        console.print(line, highlight=False)


def _unfused(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the methods that use nothing of this package."""
    return [method for method in report["methods"] if not method["label"].startswith("fused")]


def _notes(report: dict[str, Any]) -> list[str]:
    found = problems(report)
    limit = f"tolerance {tolerance(report):.1g} for {report['dtype']} and {report['layers']} layers"
    lines = [f"[bold red]WRONG[/]: {escape(problem)} ({limit})" for problem in found]
    if not found:
        lines.append(f"[green]correct[/]: the first step's logits agree ({limit}); each round gave the same tokens")
    fused = report["methods"][0]
    best = min(_unfused(report), key=seconds_per_token)
    ratio = seconds_per_token(best) / seconds_per_token(fused)
    lines.append(f"the fused loop is {ratio:.2f}x as fast as the best unfused one, {escape(best['label'])}")
    prefill = report["prefill"]
    paths = {
        "unfused": "the unfused path, linear + torch.distributed",
        "all_reduce": "linear + po.all_reduce",
        "gemm_all_reduce": "po.gemm_all_reduce",
        "fused": "the fused operator",
    }
    lines.append(
        f"prefill: {prefill['rows']} rows took {paths[prefill['path']]}, {prefill['seconds'] * 1e3:.1f} ms; it is the "
        "same for all methods, and so are its token, the head, the norms and attention"
    )
    lines.append(f"tokens: {' '.join(map(str, fused['tokens'][0][:12]))} ...")
    missing = report["model"]["num_layers"] - report["layers"]
    if missing:
        lines.append(f"[yellow]{missing} layers of the model were left out: tokens/s are not those of the model[/]")
    lines += [f"[yellow]{escape(note)}[/]" for note in report["notes"]]
    lines.append(
        "[dim]fused: po.gemv, and po.gemv_all_reduce with the residual inside; fused sums: the latter, and cuBLAS in "
        "place of the former; fused norm: the former, cuBLAS, and po.all_reduce_rms_norm; one_shot, two_shot: "
        "all-reduces of torch's symmetric memory; these and the process group's add the residual in one kernel with "
        "the norm. Times: median over the rounds, maximum over the PEs, methods interleaved. us/layer: without "
        "embedding, vocabulary head and choice of the token, which were timed alone. equal: leading tokens like the "
        "fused loop's; in 16 bits a near tie may fall differently, and all later tokens with it. diff: logits of the "
        "first step, norm of the difference over the norm.[/]"
    )
    kernels = "torch.compile makes the small kernels" if report["is_compiled"] else "small kernels are eager torch's"
    lines.append(f"[dim]{kernels}, the same for all methods[/]")
    return lines + caveat(report)
