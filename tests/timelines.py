"""Properties of every timeline: complete, nested, and the same in the file."""

from __future__ import annotations

import itertools
import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

from persistent_ops.timeline import PeTimeline

__all__ = ["problems_of_file", "problems_of_timeline"]

_NS = 1.0  # possible rounding error of a time


def problems_of_timeline(pes: Sequence[PeTimeline], operator: str) -> list[str]:
    """Return where a launch lacks a WG or has one twice, and where an interval lies outside of its parent."""
    problems = []
    for pe in pes:
        found: defaultdict[tuple[str, int, int], Counter[int]] = defaultdict(Counter)
        for launch in pe.launches:
            where = f"PE {pe.pe}, {launch.operator} {launch.epoch}, WG {launch.wg}"
            found[launch.operator, launch.team, launch.epoch][launch.wg] += 1
            pieces = [tasks for tasks in (launch.own, launch.others) if tasks is not None] + launch.spans
            for piece in pieces:
                if not launch.begin - _NS <= piece.begin <= piece.end <= launch.end + _NS:
                    problems.append(f"{where}: {piece} lies outside of {launch.begin} to {launch.end}")
            problems += [
                f"{where}: a {span.kind} with PE {span.peer}" for span in launch.spans if not 0 <= span.peer < len(pes)
            ]
            if launch.num_warps == 1:
                ordered = sorted((span for span in launch.spans if span.kind == "wait"), key=lambda span: span.begin)
                for first, second in itertools.pairwise(ordered):
                    if second.begin + _NS < first.end:
                        problems.append(f"{where}: {first} overlaps {second}")
        if not any(name == operator for name, _, _ in found):
            problems.append(f"PE {pe.pe}: no launch of {operator}")
        for (name, _, epoch), wgs in found.items():
            num_wgs = next(each.num_wgs for each in pe.launches if (each.operator, each.epoch) == (name, epoch))
            if wgs != Counter(range(num_wgs)):
                problems.append(f"PE {pe.pe}, {name} {epoch}: {dict(wgs)} of {num_wgs} WGs")
    return problems


def problems_of_file(path: Path, pes: Sequence[PeTimeline]) -> list[str]:
    """Return what is missing in the file, and the rows that are not nested."""
    data = json.loads(path.read_text())
    problems = []
    counts = Counter(event["cat"] for event in data["traceEvents"] if event["ph"] != "M")
    launches = [launch for pe in pes for launch in pe.launches]
    spans = Counter(span.kind for launch in launches for span in launch.spans)
    if counts["launch"] != len(launches) or any(counts[kind] != spans[kind] for kind in ("wait", "send")):
        problems.append(f"{counts} of {len(launches)} launches and {spans}")
    rows = defaultdict(list)
    for event in data["traceEvents"]:
        if event["ph"] == "X" and event["cat"] in ("launch", "tasks"):
            rows[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for row, times in rows.items():
        times.sort()
        problems += [f"{row}: {a} and {b}" for a, b in itertools.pairwise(times) if b[0] < a[1] - 1e-3]
    if set(data["otherData"]["clock_error_us"]) != {f"PE {pe.pe}" for pe in pes}:
        problems.append("the clocks' errors are missing")
    return problems
