"""Start the demo's PEs, or run as one of them, and print the result."""

from __future__ import annotations

from pathlib import Path

import torch
from rich.console import Console

import persistent_ops as po

from ..testing.criteo import read_batches
from ..testing.dlrm_batch import DLRM_ROWS
from ..testing.output_files import check_outputs
from ..testing.pes import is_first_process, run_on_pes, started_pes
from .options import HOST_PES, DemoOptions
from .pe import PeReport, run_pe
from .report import passed, print_report

__all__ = ["run_demo"]


def run_demo(options: DemoOptions, *, console: Console | None = None) -> int:
    """Run the fused embedding exchange over several PEs and compare it with torch's embedding_bag + all_to_all_single.

    Under a launcher (torchrun, mpiexec, srun) this process is one of the PEs, and rank 0 prints. Otherwise the PEs are
    started here: one per GPU, or 4 on the host backend.

    Args:
        options: what to run.
        console: where the result goes; standard output by default.

    Returns:
        0 where every PE's output is within the tolerance, else 1.

    Raises:
        ValueError: the data file is malformed, the timeline's file cannot be written, `pes` was given under a launcher,
            or a launcher's variables contradict each other.
        BackendUnavailableError: the backend that was asked for cannot run here.
    """
    console = console or Console()
    try:
        started = started_pes()
    except po.BootstrapError as error:  # which elsewhere is what PEs say of each other
        raise ValueError(str(error)) from error
    check_outputs(files={"trace": options.trace})
    if options.data is not None:
        # Read what the PEs will read before any is started: a malformed line is then one error, not one per PE.
        _check_data(options.data, options)
    if started is not None and options.pes not in (None, started):
        raise ValueError(f"pes is {options.pes}, but a launcher started {started} processes; leave pes out")
    answers = run_on_pes(run_pe, started or _world_size(options), options, fresh=True)
    reports = [PeReport(**answer) for answer in answers]
    if is_first_process():
        print_report(reports, options, console)
    return 0 if passed(reports, dtype=options.dtype) else 1


def _world_size(options: DemoOptions) -> int:
    if options.pes is not None:
        return options.pes
    gpus = torch.cuda.device_count() if options.backend != "host" else 0
    return gpus or HOST_PES


def _check_data(path: Path, options: DemoOptions) -> None:
    if not path.is_file():
        raise ValueError(f"data: expected a file, got {str(path)!r}")
    backend = "cuda" if options.backend != "host" and torch.cuda.is_available() else "host"
    batches = read_batches(path, batch_size=options.batch_for(backend), num_rows=DLRM_ROWS)
    for _, _ in zip(range(options.steps), batches, strict=False):
        pass
