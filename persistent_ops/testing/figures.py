"""matplotlib, if installed: imported when a figure is drawn."""

from __future__ import annotations

from typing import Any

__all__ = ["pyplot", "why_none"]


def pyplot() -> Any:
    """Return matplotlib's pyplot, which draws into files; ImportError where matplotlib is not installed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as found

    return found


def why_none(error: Exception) -> str:
    """Return why there is no figure, in one line, with a remedy where matplotlib is missing."""
    if isinstance(error, ImportError) and error.name == "matplotlib":
        return "matplotlib is not installed (pip install 'persistent-ops[plot]')"
    return f"{type(error).__name__}: {error}"
