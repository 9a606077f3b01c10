"""The command line: persistent-ops demo | bench | trace | doctor | compile | --version."""

from __future__ import annotations

import ast
import importlib
import inspect
import io
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.markup import escape

from . import __version__

__all__ = ["app", "benchmark_folder", "benchmarks", "main"]

app = typer.Typer(
    name="persistent-ops",
    help="Persistent kernels that compute and communicate in one launch.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

# The arguments after the operator's name belong to its benchmark, --help included.
_PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"persistent-ops {__version__}")
        raise typer.Exit(0)


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass  # The option has done its work when it was read.


@app.command()
def demo(
    data: Annotated[
        Path | None,
        typer.Option(help="File in Criteo's format (tabs or commas, also .gz). Default: a synthetic batch."),
    ] = None,
    steps: Annotated[int, typer.Option(help="Batches to run, after one warm-up batch.")] = 20,
    batch: Annotated[int | None, typer.Option(help="Samples of the global batch. Default: 16384; on host 512.")] = None,
    dim: Annotated[int, typer.Option(help="Elements of an embedding row.")] = 128,
    dtype: Annotated[str, typer.Option(help="Data type of the tables: fp32, bf16 or fp16.")] = "fp32",
    pes: Annotated[
        int | None, typer.Option(help="PEs to start without a launcher. Default: one per GPU; on host 4.")
    ] = None,
    backend: Annotated[str, typer.Option(help="Where kernels run: auto, cuda or host.")] = "auto",
    max_rows: Annotated[
        int | None, typer.Option(help="Most rows of a table. Default: as many as fit on the GPUs; on host 50000.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the tables and the synthetic batches.")] = 0,
    trace: Annotated[str | None, typer.Option(help="File for a timeline of all launches (Perfetto).")] = None,
) -> None:
    """Run a DLRM embedding exchange over several PEs and check it against torch.

    Exits with 1 if a result is out of tolerance, and with 2 if the input, an option or a launcher's variable is wrong
    or the backend cannot run here.
    """
    from .demo.options import DemoOptions
    from .demo.run import run_demo
    from .runtime.errors import BackendUnavailableError, PersistentOpsError

    try:
        options = DemoOptions(
            data=data,
            steps=steps,
            batch=batch,
            dim=dim,
            dtype=dtype,
            pes=pes,
            backend=backend,
            max_rows=max_rows,
            seed=seed,
            trace=trace,
        )
        raise typer.Exit(run_demo(options))
    except (ValueError, OSError, MemoryError, BackendUnavailableError) as error:
        _fail(error, 2)
    except PersistentOpsError as error:
        _fail(error, 1)


@app.command(context_settings=_PASS_ON)
def bench(context: typer.Context, op: Annotated[str, typer.Argument(help="Name of the operator.")] = "") -> None:
    """Run the benchmark of an operator. Options after its name are the benchmark's (OP --help)."""
    _run_benchmark(bench, op, context.args)


@app.command(context_settings=_PASS_ON)
def trace(context: typer.Context, op: Annotated[str, typer.Argument(help="Name of the operator.")] = "") -> None:
    """Record a timeline of an operator's launches and print their summary (options as of `bench OP`)."""
    _run_benchmark(trace, op, [*context.args, "--trace"])


@app.command()
def doctor(
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    ranks: Annotated[bool, typer.Option("--ranks", help="Under a launcher: compare all ranks; rank 0 prints.")] = False,
) -> None:
    """Show what the package finds on this machine, what is missing, and the command that installs it.

    Exits with 0 if at least one backend can run, else with 1.
    """
    from .doctor import run_doctor

    raise typer.Exit(run_doctor(as_json=json, of_ranks=ranks))


@app.command(name="compile")
def precompile(
    names: Annotated[list[str], typer.Argument(help="Operators and modules, or all.")],
    arch: Annotated[
        str | None, typer.Option(help="Architecture, such as sm_90. Default: that of the GPU here.")
    ] = None,
    dtype: Annotated[list[str], typer.Option(help="Dtype of weights and tables; may be repeated.")] = ["bf16"],  # noqa: B006
    pes: Annotated[int, typer.Option(help="PEs of the program.")] = 2,
    nodes: Annotated[int, typer.Option(help="Hosts of them.")] = 1,
    in_features: Annotated[int, typer.Option(help="Features that go into a linear layer, K.")] = 4096,
    out_features: Annotated[int, typer.Option(help="Features that come out, and columns that are summed.")] = 4096,
    tokens: Annotated[int, typer.Option(help="Rows of x.")] = 512,
    tables: Annotated[int, typer.Option(help="Embedding tables of a PE.")] = 4,
    rows: Annotated[int, typer.Option(help="Rows of a table.")] = 100_000,
    dim: Annotated[int, typer.Option(help="Elements of a row.")] = 128,
    batch: Annotated[int, typer.Option(help="Samples of a PE.")] = 1024,
    lookups: Annotated[int, typer.Option(help="Lookups of a sample in each table.")] = 1,
    optimizer: Annotated[str, typer.Option(help="Optimizer of the tables.")] = "rowwise_adagrad",
    weighted: Annotated[bool, typer.Option("--weighted", help="Lookups have weights.")] = False,
) -> None:
    """Compile the kernels of operators and modules into the cache, side by side. Needs nvcc and no GPU.

    Names are those of po and po.nn. Which kernels a program loads depends on dtypes and sizes: pass the program's.
    Exits with 1 if a kernel does not compile, and with 2 if an argument is wrong.
    """
    from .precompile import DTYPES, Program, precompile as compile_all
    from .runtime.errors import PersistentOpsError

    sizes = {
        "in_features": in_features,
        "out_features": out_features,
        "tokens": tokens,
        "tables": tables,
        "rows": rows,
        "dim": dim,
        "batch": batch,
        "lookups": lookups,
    }
    try:
        if unknown := set(dtype) - set(DTYPES):
            raise ValueError(f"--dtype: expected {', '.join(DTYPES)}; got {', '.join(sorted(unknown))}")
        options = {"pes": pes, "nodes": nodes, **sizes}
        programs = [Program(DTYPES[each], optimizer=optimizer, is_weighted=weighted, **options) for each in dtype]
        for line in compile_all(names, programs, arch):
            typer.echo(line)
    except (ValueError, TypeError) as error:
        _fail(error, 2)
    except PersistentOpsError as error:
        _fail(error, 1)


def benchmark_folder() -> Path:
    """Return the folder of the benchmarks: the checkout's, or the copy that the wheel carries."""
    package = Path(__file__).resolve().parent
    installed = package / "_benchmarks"
    return installed if installed.is_dir() else package.parent / "benchmarks"


def benchmarks() -> dict[str, Path]:
    """Return the operators that have a benchmark, and its file."""
    return {file.stem: file for file in sorted(benchmark_folder().glob("*.py")) if not file.stem.startswith("_")}


def _run_benchmark(command: Callable[..., None], op: str, arguments: Sequence[str]) -> NoReturn:
    name, found = command.__name__, benchmarks()
    if op not in found:
        lines = [f"  persistent-ops {name} {each:<22}{_subject(file)}".rstrip() for each, file in found.items()]
        listed = "\n".join(lines) or "  (none is installed)"
        if op in ("", "--help"):
            usage = f"Usage: persistent-ops {name} OP [ARGUMENTS OF THE BENCHMARK]"
            typer.echo(f"{usage}\n\n{inspect.getdoc(command)}\n\nOperators:\n{listed}")
            raise typer.Exit(0)
        typer.echo(f"error: no benchmark is called {op!r}. The benchmarks are:\n{listed}", err=True)
        raise typer.Exit(2)
    # Benchmarks share modules that lie beside them, and the PEs that they start import both by name.
    sys.path.insert(0, str(found[op].parent))
    raise typer.Exit(importlib.import_module(op).main(list(arguments)))


def _subject(benchmark: Path) -> str:
    """Return what a benchmark is of, as the first line of its file says."""
    about = ast.get_docstring(ast.parse(benchmark.read_text())) or ""
    return about.partition(":")[0].removeprefix("Benchmark of ")


def _fail(error: Exception, code: int) -> None:
    Console(stderr=True).print(f"[bold red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
    raise typer.Exit(code)


def main() -> None:
    """Run the command line. What a stream's encoding cannot say is spelled out, such as a letter of a folder's name."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")
    app()
