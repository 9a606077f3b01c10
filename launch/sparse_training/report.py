"""The result of a training, for people."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from curves import draw_losses, recent
from program import caveat, hardware_of
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from persistent_ops.testing.figures import pyplot

__all__ = ["TOLERANCE", "passed", "plot", "print_report", "problems"]

# Relative. Gradients of one process and of several are sums of the same numbers in another order; a loss has some
# thousand terms, of which each rounds by 2^-24, and Adam lets small gradients count as much as large ones.
TOLERANCE = 1e-5


def differences(report: dict[str, Any]) -> tuple[float, float]:
    """Return the largest relative differences of a loss and of a gradient's norm from one process's values."""
    first, expected = report["first_step"], report["one_process"]
    losses = report["losses"][first : first + len(expected["losses"])]
    return _difference(losses, expected["losses"]), _difference(report["norms"], expected["norms"])


def _difference(actual: list[float], expected: list[float]) -> float:
    found = [abs(one - other) / abs(other) for one, other in zip(actual, expected, strict=True)]
    return math.inf if any(math.isnan(each) for each in found) else max(found, default=0.0)


def problems(report: dict[str, Any]) -> list[str]:
    """Return the errors of the results, one line each."""
    found = []
    for what, difference in zip(("losses", "norms of gradients"), differences(report), strict=True):
        if difference > TOLERANCE:
            found.append(f"{what} differ from those of one process by {difference:.2g} (tolerance {TOLERANCE:g})")
    if not report["same_bits"]:
        found.append("the tables differ between PEs")
    return found


def passed(report: dict[str, Any]) -> bool:
    """Return whether the training gave the same result as one process."""
    return not problems(report)


def plot(report: dict[str, Any], path: Path) -> None:
    """Draw the loss curve into a PNG file."""
    plots = pyplot()
    figure, axes = plots.subplots(figsize=(8, 4.5), layout="constrained")
    draw_losses(axes, report["losses"])
    if report["first_step"]:
        axes.axvline(report["first_step"], color="grey", linestyle=":", label="resumed")
    axes.set_xlabel("step")
    axes.set_ylabel("loss per word")
    axes.set_title(f"CBOW, {report['vocabulary']} words, {report['pes']} PEs on {report['backend']}")
    axes.legend()
    axes.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plots.close(figure)


def print_report(report: dict[str, Any], console: Console) -> None:
    """Print the training, its speed, whether it is right, the vectors' nearest words, and the files."""
    options = report["options"]
    console.print(f"\n[bold]Sparse embedding training[/] {hardware_of(report)}")
    lines = [
        f"{escape(report['source'])}: {report['num_bytes']:,} bytes, {report['num_words']:,} words, "
        f"{report['vocabulary']:,} different ones; vectors of {options['dim']}",
        f"loss {report['losses'][0]:.3f} -> {recent(report['losses']):.3f} in {len(report['losses'])} steps of "
        f"{options['batch']} words" + (f", the first {report['first_step']} before" if report["first_step"] else ""),
    ]
    if report["timed_steps"]:
        each = report["seconds"] / report["timed_steps"]
        lines.append(f"{options['batch'] / each:,.0f} words/s, {each * 1e3:.1f} ms per step")
    for line in lines:
        console.print(line, highlight=False)
    for problem in problems(report):
        console.print(f"[bold red]WRONG[/]: {escape(problem)}", highlight=False)
    if passed(report):
        checked = len(report["one_process"]["losses"])
        told = (
            f"losses and norms of gradients of {checked} steps are those of one process (relative difference at most "
            f"{max(differences(report)):.1g}, tolerance {TOLERANCE:g}), and "
            if checked
            else ""
        )
        console.print(f"[green]correct[/]: {told}all PEs have the same bits", highlight=False)
    if report["passes"]:
        _print_passes(report, console)
    if report["neighbors"]:
        _print_neighbors(report["neighbors"], console)
    folder = escape(options["output"])
    console.print(f"what was written is in {folder}; --resume --steps {2 * options['steps']} goes on", highlight=False)
    for line in caveat(report):
        console.print(line)


def _print_passes(report: dict[str, Any], console: Console) -> None:
    passes = report["passes"]
    table = Table(box=box.SIMPLE_HEAD, padding=0, pad_edge=False)
    table.add_column("gradients are exchanged")
    table.add_column("ms per pass", justify="right")
    names = {"hook": "by po.nn.ddp_sparse_hook", "after": "after the backward pass", "none": "not at all"}
    for name, text in names.items():
        table.add_row(text, f"{passes[name] * 1e3:.2f}", style="bold" if name == "hook" else "")
    console.print(table)
    exposed, whole = max(passes["hook"] - passes["none"], 0.0), passes["after"] - passes["none"]
    text = f"communication adds {exposed * 1e3:.2f} ms, {exposed / passes['hook']:.0%} of a forward and backward pass"
    if report["backend"] == "host":
        text += "; on the host backend the operator returns when it is done, so that nothing can be hidden"
    elif whole > 0:
        text += f"; {max(0.0, 1 - exposed / whole):.0%} of it is hidden behind the backward pass"
    console.print(text, highlight=False)


def _print_neighbors(found: dict[str, list[tuple[str, float]]], console: Console) -> None:
    table = Table(box=box.SIMPLE_HEAD, padding=0, pad_edge=False)
    table.add_column("word")
    table.add_column("nearest, with the cosine")
    for word, nearest in found.items():
        table.add_row(escape(word), ", ".join(f"{escape(other)} {cosine:.2f}" for other, cosine in nearest))
    console.print(table)
