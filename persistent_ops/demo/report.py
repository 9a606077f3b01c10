"""The demo's result as one table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..testing.dlrm_batch import ZIPF_EXPONENT
from .options import DemoOptions
from .pe import TOLERANCE, PeReport

__all__ = ["exchange_hidden", "passed", "print_report"]


def passed(reports: Sequence[PeReport], *, dtype: str) -> bool:
    """Return whether every PE's output agrees with the reference."""
    return all(report.relative_difference <= TOLERANCE[dtype] for report in reports)


def exchange_hidden(reports: Sequence[PeReport]) -> float | None:
    """Return the share of the exchange's time that the fused operator hid, 0 to 1.

    It is 1 - (fused - pooling) / exchange, each the maximum over the PEs: the part of all_to_all_single's time that
    does not show in the fused operator's beyond the time of pooling alone.

    Returns:
        The share, or None where nothing was exchanged.
    """
    if sum(report.bytes_sent for report in reports) == 0:
        return None
    fused, pooling, exchange = (_largest(reports, name) for name in ("fused", "pooling", "exchange"))
    return min(1.0, max(0.0, 1 - (fused - pooling) / exchange))


def _largest(reports: Sequence[PeReport], name: str) -> float:
    return max(float(getattr(report, name)) for report in reports)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g}" if seconds < 1 else f"{seconds * 1e3:.0f}"


def _short(number: float, unit: str = "") -> str:
    """Write a number with three digits: 51.2K, 1.77MB."""
    for prefix in ("", "K", "M"):
        if number < 999.5:
            return f"{number:.3g}{prefix}{unit}"
        number /= 1000
    return f"{number:.3g}G{unit}"


def _hardware(reports: Sequence[PeReport]) -> str:
    counts = Counter(report.hardware for report in reports)
    return ", ".join(f"{count} x {name}" for name, count in counts.items())


def print_report(reports: Sequence[PeReport], options: DemoOptions, console: Console) -> None:
    """Print hardware and options, how far the results differ, the times, the bytes sent and the hidden time."""
    first = reports[0]
    source = (
        options.data.name if options.data is not None else f"Zipf({ZIPF_EXPONENT}) lookups, MLPerf DLRM-DCNv2 tables"
    )
    console.print(
        f"\n[bold]Fused embedding + All-to-All[/] on the {first.backend} backend: {escape(_hardware(reports))}"
    )
    console.print(
        f"{escape(source)}, at most {first.row_cap:,} rows each; batch {first.batch:,}, D {options.dim}, "
        f"{options.dtype}; {first.steps} steps",
        highlight=False,
    )
    table = Table(box=box.SIMPLE_HEAD, show_footer=True, padding=0, pad_edge=False, footer_style="bold")
    for header, footer in (
        ("PE", "all"),
        ("where", ""),
        ("tables", str(sum(report.num_tables for report in reports))),
        ("lookups", _short(sum(report.lookups for report in reports))),
        ("sent", _short(sum(report.bytes_sent for report in reports), "B")),
        ("fused", _ms(_largest(reports, "fused"))),
        ("unfused", _ms(_largest(reports, "unfused"))),
        ("pooling", _ms(_largest(reports, "pooling"))),
        ("exchange", _ms(_largest(reports, "exchange"))),
        ("max diff", f"{_largest(reports, 'largest_difference'):.2g}"),
    ):
        table.add_column(header, footer, justify="left" if header in ("PE", "where") else "right", no_wrap=True)
    for report in reports:
        good = report.relative_difference <= TOLERANCE[options.dtype]
        table.add_row(
            str(report.rank),
            report.place,
            str(report.num_tables),
            _short(report.lookups),
            _short(report.bytes_sent, "B"),
            _ms(report.fused),
            _ms(report.unfused),
            _ms(report.pooling),
            _ms(report.exchange),
            f"[{'green' if good else 'bold red'}]{report.largest_difference:.2g}[/]",
        )
    console.print(table)
    for line in _verdict(reports, options):
        console.print(line, highlight=False)


def _verdict(reports: Sequence[PeReport], options: DemoOptions) -> list[str]:
    first = reports[0]
    relative = _largest(reports, "relative_difference")
    fused, unfused = _largest(reports, "fused"), _largest(reports, "unfused")
    tolerance = f"{relative:.2g} relative, tolerance {TOLERANCE[options.dtype]:.2g} for {options.dtype}"
    if passed(reports, dtype=options.dtype):
        lines = [f"[green]correct[/]: every step agrees with the reference ({tolerance})"]
    else:
        lines = [f"[bold red]WRONG[/]: the fused operator's output differs from the reference ({tolerance})"]
    hidden = exchange_hidden(reports)
    if hidden is None:
        lines.append("nothing was exchanged: there is one PE. Try --pes 2 (two PEs may share a GPU), or --backend host")
    else:
        lines.append(f"fused takes {fused / unfused:.2f}x the unfused time; {hidden:.0%} of the exchange was hidden")
    lines.append(
        "[dim]Times in ms: median over the steps of one eager call, all PEs starting together; the last row has the "
        "maximum over the PEs, and sums of tables, lookups and bytes sent per step. unfused: torch embedding_bag, one "
        f"call per table, then all_to_all_single ({first.reference}), then a reorder.[/]"
    )
    lines.append(
        "[dim]hidden = 1 - (fused - pooling) / exchange, within 0 and 100 %; pooling is embedding_bag alone and "
        "exchange all_to_all_single alone. So where the fused kernel also pools faster than embedding_bag, that counts "
        "as hidden.[/]"
    )
    if first.backend == "host":
        lines.append(
            "[yellow]The host backend shows that the protocol is correct. Its PEs are processes that share this "
            "machine's cores: its times say nothing about GPUs.[/]"
        )
    elif first.reference == "gloo":
        lines.append(
            "[yellow]Several PEs share a GPU: they run by turns and the reference exchanges through host memory, so "
            "these times say nothing about one PE per GPU.[/]"
        )
    return lines
