"""What the programs of this folder look at before they start PEs: what is wrong is then one line, not one per PE."""

from __future__ import annotations

import argparse
import math

from persistent_ops.output_files import check_outputs
from persistent_ops.runtime.errors import BootstrapError
from persistent_ops.runtime.world import most_pes

__all__ = ["check_arguments"]


def check_arguments(arguments: argparse.Namespace, *, output: str | None = None) -> None:
    """Raise where PEs cannot be started, or a result could not be written.

    Args:
        arguments: of the command line: `pes`, `limit`, `seed`, `json`, `trace`.
        output: folder that is written, or None.

    Raises:
        ValueError: it names the option, or the launcher's variable, what was expected and what came.
    """
    if arguments.pes is not None and arguments.pes < 1:
        raise ValueError(f"--pes: expected at least 1, got {arguments.pes}")
    if arguments.pes is not None and arguments.pes > most_pes():
        raise ValueError(f"--pes: expected at most {most_pes()}, got {arguments.pes}")
    if arguments.seed is not None and not 0 <= arguments.seed < 1 << 32:
        raise ValueError(f"--seed: expected 0 to {(1 << 32) - 1}, got {arguments.seed}")
    if not 0 < arguments.limit < math.inf:
        raise ValueError(f"--limit: expected seconds above 0 and below infinity, got {arguments.limit:g}")
    try:
        check_outputs(files={"--json": arguments.json, "--trace": arguments.trace}, folders={"--output": output})
    except BootstrapError as error:
        raise ValueError(str(error)) from error
