"""The placement of embedding tables as a printable table."""

from __future__ import annotations

from collections.abc import Mapping

from rich import box
from rich.markup import escape
from rich.table import Table

from .embedding_tables import TableConfig
from .table_layout import Layout
from .table_owners import load

__all__ = ["placement_table"]

_MICROSECONDS = 1e6
_MEGABYTE = 1e6


def placement_table(layout: Layout, lookups_per_sample: Mapping[str, float]) -> Table:
    """Return a line for each table, and below them what every PE holds and has to do, by the costs of the choice.

    Args:
        layout: which PE has what.
        lookups_per_sample: of each feature.
    """
    unit, scale = _unit(layout)
    report = Table(box=box.SIMPLE_HEAD, show_footer=True, footer_style="none")
    report.add_column("table", footer="\n".join(f"PE {pe}" for pe in range(len(layout.loads))))
    of_pes = {"MB": "\n".join(f"{nbytes / _MEGABYTE:.3g}" for nbytes in layout.table_bytes)}
    for heading in ("rows", "columns", "MB", "lookups"):
        report.add_column(heading, justify="right", footer=of_pes.get(heading, ""))
    report.add_column("placement")
    report.add_column("PEs")
    report.add_column(escape(unit), justify="right", footer="\n".join(f"{each * scale:.3g}" for each in layout.loads))
    for number, (config, placement) in enumerate(zip(layout.configs, layout.placements, strict=True)):
        owners = "all" if layout.is_replicated(number) else ", ".join(map(str, layout.owners[number]))
        sliced = f" x {placement.num_slices}" if placement.num_slices > 1 else ""
        report.add_row(
            escape(config.name),
            str(config.num_embeddings),
            str(config.embedding_dim),
            f"{_megabytes(config):.3g}",
            f"{sum(lookups_per_sample[name] for name in config.feature_names):g}",
            placement.kind + sliced,
            owners,
            f"{load(layout.costs.of_slices[number]) * scale:.3g}",
        )
    return report


def _unit(layout: Layout) -> tuple[str, float]:
    """Return heading and factor of costs: of a slice, or a replica, on one PE."""
    return ("us per step", _MICROSECONDS) if layout.costs.unit == "s_per_step" else ("bytes per sample", 1.0)


def _megabytes(config: TableConfig) -> float:
    return config.num_embeddings * config.embedding_dim * config.data_type.itemsize / _MEGABYTE
