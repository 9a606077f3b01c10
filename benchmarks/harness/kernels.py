"""Kernels of one call on the GPU of every PE, as torch.profiler sees them: other libraries' kernels too."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from persistent_ops.testing.figures import pyplot

__all__ = ["draw_kernels", "kernels_in", "kernels_of"]

_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")  # of the profiler's events
Kernel = tuple[str, float, float]


def kernels_of(call: Callable[[], object]) -> list[Kernel]:
    """Return the kernels of a call on this PE: name, begin and end, in microseconds of the machine's clock.

    The call runs twice, and the second one counts. The host queues it while the first one runs, so no kernel waits for
    the host. All PEs call this together.
    """
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(2):
            call()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernels.json"
        profiler.export_chrome_trace(str(path))
        found = kernels_in(json.loads(path.read_text()))
    return found[len(found) // 2 :]


def kernels_in(exported: Mapping[str, Any]) -> list[Kernel]:
    """Return the kernels of a trace that torch.profiler has exported, in order of begin."""
    base = exported.get("baseTimeNanoseconds", 0) / 1e3
    spans = [
        (_short(event["name"]), base + float(event["ts"]), base + float(event["ts"]) + float(event["dur"]))
        for event in exported["traceEvents"]
        if event.get("cat") in _CATEGORIES
    ]
    return sorted(spans, key=lambda span: span[1])


def _short(name: str) -> str:
    """Return a kernel's name without return type, namespaces, template arguments and parameters."""
    bare = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    return bare.partition("<")[0].partition("(")[0].split("::")[-1].strip()


def draw_kernels(kernels: Sequence[Sequence[Kernel]], path: Path, title: str) -> None:
    """Draw the kernels of all PEs on one time axis: a panel for each PE, a row for each name."""
    plot = pyplot()
    names = list(dict.fromkeys(name for own in kernels for name, _, _ in own))
    first = min(begin for own in kernels for _, begin, _ in own)
    size = (9, (0.5 + 0.3 * len(names)) * len(kernels) + 0.8)
    drawn, panels = plot.subplots(len(kernels), figsize=size, sharex=True, squeeze=False, layout="constrained")
    for pe, (axes, own) in enumerate(zip(panels.flat, kernels, strict=True)):
        for row, name in enumerate(names):
            bars = [(begin - first, end - begin) for found, begin, end in own if found == name]
            axes.broken_barh(bars, (row - 0.35, 0.7))
        axes.set(title=f"PE {pe}", ylim=(len(names) - 0.5, -0.5))
        axes.set_yticks(range(len(names)), names)
    panels.flat[-1].set_xlabel("us")
    drawn.suptitle(title)
    drawn.savefig(path, dpi=120)
    plot.close(drawn)
