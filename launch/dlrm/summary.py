"""The result of a training or a comparison, as text for people."""

from __future__ import annotations

import math
from typing import Any

from curves import recent
from program import caveat, hardware_of
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .compare import OWN, disagreements

__all__ = ["AUC_MARGIN", "problems", "print_summary"]

AUC_MARGIN = 0.01


def problems(report: dict[str, Any]) -> list[str]:
    """Return the errors of the results, one line each."""
    if "compared" in report:
        tolerance = report["compared"]["tolerance"]
        return [
            f"losses of {name} differ from {OWN}'s by {difference:.2g} (tolerance {tolerance:g})"
            for name, difference in disagreements(report["compared"]).items()
            if not difference <= tolerance
        ]
    if not _judges_auc(report):
        return []
    found, best = report["evaluations"][-1]["auc"], report["best_auc"]
    if found >= best - AUC_MARGIN:
        return []
    return [f"AUC {found:.4f} is more than {AUC_MARGIN} below the best possible one, {best:.4f}"]


def _judges_auc(report: dict[str, Any]) -> bool:
    """Return whether the training was one that must come near the best AUC: of the small model, to its end.

    There is none where what evaluates is of one class, which the summary says.
    """
    options, best = report["options"], report["best_auc"]
    if best is None or options["model"] != "small" or options["steps"] is not None:
        return False
    return not math.isnan(best + report["evaluations"][-1]["auc"])


def print_summary(report: dict[str, Any], console: Console) -> None:
    """Print the training and its hardware, the speed, and whether the result is right."""
    options = report["options"]
    interaction = {"dcn": "DLRM-DCNv2", "dot": "DLRM with the dot interaction"}[options["interaction"]]
    console.print(f"\n[bold]{interaction}[/] {hardware_of(report)}", highlight=False)
    lookups = sum(report["hotness"])
    console.print(
        f"{escape(report['source'])}: {report['num_samples']:,} samples train, {report['num_evaluated']:,} evaluate; "
        f"{len(report['num_rows'])} tables of {sum(report['num_rows']):,} rows, {lookups} lookups a sample",
        highlight=False,
    )
    if "compared" in report:
        _print_compared(report, console)
    else:
        _print_trained(report, console)
    for problem in problems(report):
        console.print(f"[bold red]WRONG[/]: {escape(problem)}", highlight=False)
    for line in caveat(report):
        console.print(line)


def _print_trained(report: dict[str, Any], console: Console) -> None:
    options, losses, last = report["options"], report["losses"], report["evaluations"][-1]
    before = f", the first {report['first_step']} before" if report["first_step"] else ""
    lines = [
        report["batches"],
        f"loss {losses[0]:.4f} -> {recent(losses):.4f} in {len(losses)} steps{before}; {last['loss']:.4f} over what "
        "evaluates",
    ]
    if options["is_captured"]:
        lines.append(f"{report['num_replays']} of this run's steps were replays of a CUDA graph")
    if report["timed_steps"]:
        each = report["seconds"] / report["timed_steps"]
        lines.append(f"{options['batch'] / each:,.0f} samples/s, {each * 1e3:.2f} ms per step")
    best = report["best_auc"]
    if math.isnan(last["auc"]):
        lines.append("no AUC: what evaluates has clicks alone, or none; take more --evaluation-samples")
    else:
        lines.append(f"AUC {last['auc']:.4f}" + ("" if best is None else f", the best possible one is {best:.4f}"))
    lines.append(f"what was written is in {options['output']}; --resume with more --epochs or --steps goes on")
    for line in lines:
        console.print(escape(line), highlight=False)
    if _judges_auc(report) and not problems(report):
        console.print(f"[green]correct[/]: within {AUC_MARGIN} of the best AUC", highlight=False)


def _print_compared(report: dict[str, Any], console: Console) -> None:
    compared = report["compared"]
    differences, own = disagreements(compared), compared["seconds"][OWN]
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    table.add_column("tables by", no_wrap=True)
    for name in ("ms per step", "x time", "first loss", "last compared", "difference"):
        table.add_column(name, justify="right")
    for name, losses in compared["losses"].items():
        seconds = compared["seconds"][name]
        difference = f"{differences[name]:.1g}" if name in differences else ""
        times = (f"{seconds * 1e3:.2f}", f"{seconds / own:.2f}")
        table.add_row(name, *times, f"{losses[0]:.6f}", f"{losses[-1]:.6f}", difference)
    console.print(table)
    kind = "replays of its CUDA graph" if report["options"]["is_captured"] else "eager"
    lines = [f"{compared['steps']} steps of each way are timed, {kind}", *compared["left_out"]]
    for line in lines:
        console.print(escape(line), highlight=False)
    if differences and not problems(report):
        steps = len(compared["losses"][OWN])
        text = f"the losses of {steps} steps agree (relative tolerance {compared['tolerance']:g})"
        console.print(f"[green]correct[/]: {text}", highlight=False)
