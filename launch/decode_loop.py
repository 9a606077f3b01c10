#!/usr/bin/env python3
"""Greedy decoding with a tensor-parallel Llama-shaped model: fused GEMV + AllReduce against the unfused ways.

    python launch/decode_loop.py                            all GPUs with the 8B shape, or 4 host PEs with a tiny one
    python launch/decode_loop.py --model 70B --tokens 128   random weights in the shape of Llama 3 70B
    python launch/decode_loop.py --model DIR                a Hugging Face folder: config.json and *.safetensors
    launch/torchrun.sh 8 python launch/decode_loop.py --model 405B

Exits with 1 where results do not agree, with 2 where an option or the model is wrong.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from decode.config import SIZES
from decode.loop import run_pe, without_multicast
from decode.options import DTYPES, Options
from decode.report import passed, print_report
from early_checks import check_arguments
from harness.record import append_line, what_ran

import persistent_ops as po
from persistent_ops.runtime import launchers

_HOST_PES = 4


def main(argv: list[str]) -> int:
    """Run the decode loop.

    Args:
        argv: the options, without the program's name.

    Returns:
        0, 1 where results do not agree, 2 where an option or the model is wrong.
    """
    try:
        arguments = _parser().parse_args(argv)
    except SystemExit as leaving:
        return int(leaving.code or 0)
    without_multicast()
    try:
        options = _options(arguments)
        check_arguments(arguments)
        report, is_printer = _run(options, arguments.pes, arguments.limit)
    except (ValueError, po.BackendUnavailableError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if is_printer:
        print_report(report, Console())
        if arguments.json is not None:
            command = shlex.join(["python", "launch/decode_loop.py", *argv])
            append_line(arguments.json, {**what_ran(command), **report})
    return 0 if passed(report) else 1


def _run(options: Options, pes: int | None, limit: float) -> tuple[dict[str, Any], bool]:
    """Be one of a launcher's PEs, or start them; returns the report and whether this process prints it."""
    environment = launchers.detect(os.environ)
    if environment.launcher != "single":
        if pes not in (None, environment.world_size):
            raise ValueError(f"--pes: {environment.launcher} started {environment.world_size} processes; leave it out")
        return run_pe(options), environment.rank == 0
    gpus = torch.cuda.device_count() if options.backend != "host" else 0
    num_pes = pes or gpus or _HOST_PES
    # Before any PE is started: what is wrong here is then one error, not one per PE.
    options.prompts(options.model_config("cuda" if gpus else "host").vocab)
    return po.launch(run_pe, num_pes, options, timeout=limit)[0], True


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help=f"{', '.join(SIZES)}, or a model folder (default: 8B; host tiny)")
    parser.add_argument("--cut", type=int, default=1, help="run the shares of PEs of a world so many times as large")
    parser.add_argument("--layers", type=int, help="decoder layers to run (default: as many as fit)")
    parser.add_argument("--prompt", help="tokens of the prompt, such as 1,15043,29892 (default: random ones)")
    parser.add_argument("--prompt-length", type=int, default=32, help="tokens of a random prompt (default 32)")
    parser.add_argument("--tokens", type=int, default=64, help="to generate after the first (default 64)")
    parser.add_argument("--batch", type=int, default=1, help="sequences, 1 to 16 (default 1)")
    parser.add_argument("--rounds", type=int, default=5, help="times that each method generates them (default 5)")
    parser.add_argument("--dtype", choices=tuple(DTYPES), help="default: bf16 on GPUs, fp32 on the host")
    parser.add_argument("--backend", choices=("auto", "cuda", "host"), default="auto")
    parser.add_argument("--pes", type=int, help="PEs to start without a launcher (default: one per GPU; host 4)")
    parser.add_argument("--seed", type=int, default=0, help="of random weights and prompts")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, help="the small kernels (default: on GPUs)")
    parser.add_argument("--algorithm", choices=("auto", "one_shot", "two_phase"), default="auto")
    parser.add_argument("--comm-dtype", choices=("own",), help="own: fused sums travel in the weights' dtype, not fp32")
    parser.add_argument("--prefetch", action="store_true", help="weights of fused products (default: no)")
    parser.add_argument(
        "--reference", action=argparse.BooleanOptionalAction, help="one PE alone, too (default: tiny only)"
    )
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds that PEs wait for each other")
    parser.add_argument("--limit", type=float, default=1800.0, help="seconds for the whole, where PEs are started here")
    parser.add_argument("--json", type=Path, help="file to which one line with all results is appended")
    parser.add_argument("--trace", help="file for a timeline of all launches (docs/timelines.md)")
    return parser


def _options(arguments: argparse.Namespace) -> Options:
    prompt = None
    if arguments.prompt is not None:
        try:
            prompt = tuple(int(token) for token in arguments.prompt.split(","))
        except ValueError as error:
            raise ValueError(f"--prompt: expected whole numbers with commas, got {arguments.prompt!r}") from error
    return Options(
        model=arguments.model,
        cut=arguments.cut,
        layers=arguments.layers,
        prompt=prompt,
        prompt_length=arguments.prompt_length,
        tokens=arguments.tokens,
        batch=arguments.batch,
        rounds=arguments.rounds,
        dtype=arguments.dtype,
        backend=arguments.backend,
        seed=arguments.seed,
        is_compiled=arguments.compile,
        algorithm=arguments.algorithm,
        comm_dtype=arguments.comm_dtype,
        prefetch=arguments.prefetch,
        reference=arguments.reference,
        timeout=arguments.timeout,
        trace=arguments.trace,
    )


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
