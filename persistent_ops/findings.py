"""What the doctor reports: one finding for each thing that was looked for."""

from __future__ import annotations

import dataclasses

__all__ = ["Finding"]


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that was looked for.

    Attributes:
        section: heading that it stands under.
        name: what was looked for.
        status: "ok", "missing" (a backend cannot run without it), "warning" (it works, but not as it should) or "info".
        value: what was found.
        remedy: the command, or the advice, that mends it; "" where nothing is to be done.
        needed_by: the backends that cannot run while it is missing.
    """

    section: str
    name: str
    status: str
    value: str
    remedy: str = ""
    needed_by: tuple[str, ...] = ()
