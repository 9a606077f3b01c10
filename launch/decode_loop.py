#!/usr/bin/env python3
"""Greedy decoding with a tensor-parallel Llama-shaped model: fused GEMV + AllReduce against the unfused ways.

    python launch/decode_loop.py                            all GPUs with the 8B shape, or 4 host PEs with a tiny one
    python launch/decode_loop.py --model 70B --tokens 128   random weights in the shape of Llama 3 70B
    python launch/decode_loop.py --model DIR                a Hugging Face folder: config.json and *.safetensors
    launch/torchrun.sh 8 python launch/decode_loop.py --model 405B

Exits with 1 where results do not agree or the run was cut off, with 2 where an option or the model is wrong.
"""

from __future__ import annotations

import argparse
import sys

from decode.config import SIZES, Partition
from decode.loop import run_pe
from decode.options import DTYPES, Options
from decode.report import passed, print_report
from program import add_common_options, append_record, check_arguments, command, run_as_asked
from rich.console import Console

_HOST_PES = 4


@command
def main(argv: list[str]) -> int:
    """Run the decode loop.

    Args:
        argv: the options, without the program's name.

    Returns:
        0, 1 where results do not agree, 2 where an option or the model is wrong; others see `program.command`.
    """
    arguments = _parser().parse_args(argv)
    options = _options(arguments)
    check_arguments(arguments)

    def check(gpus: int, world_size: int) -> None:
        config = options.model_config("cuda" if gpus else "host")
        options.prompts(config.vocab)
        Partition.of(config, world_size)

    report, is_printer = run_as_asked(run_pe, options, arguments, host_pes=_HOST_PES, check=check)
    if is_printer:
        print_report(report, Console())
    is_written = append_record(arguments.json if is_printer else None, "decode_loop", argv, report)
    return 0 if is_written and passed(report) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help=f"{', '.join(SIZES)}, or a model folder (default: 8B; host tiny)")
    parser.add_argument("--cut", type=int, default=1, help="weights are cut for a world this many times as large")
    parser.add_argument("--layers", type=int, help="decoder layers to run (default: as many as fit)")
    parser.add_argument("--prompt", help="tokens of the prompt, such as 1,15043,29892 (default: random ones)")
    parser.add_argument("--prompt-length", type=int, default=32, help="tokens of a random prompt (default 32)")
    parser.add_argument("--tokens", type=int, default=64, help="tokens to generate after the first (default 64)")
    parser.add_argument("--batch", type=int, default=1, help="sequences, 1 to 16 (default 1)")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each method (default 5)")
    parser.add_argument("--dtype", choices=tuple(DTYPES), help="default: bf16 on GPUs, fp32 on the host")
    parser.add_argument("--seed", type=int, default=0, help="seed of random weights and prompts")
    small_kernels = "compile small kernels (default: on GPUs)"
    parser.add_argument("--compile", dest="is_compiled", action=argparse.BooleanOptionalAction, help=small_kernels)
    parser.add_argument("--algorithm", choices=("auto", "one_shot", "two_shot"), default="auto")
    parser.add_argument("--wire-dtype", choices=("own",), help="own: sums travel in the weights' dtype, not in fp32")
    parser.add_argument("--prefetch", action="store_true", help="prefetch weights of fused products (default: no)")
    parser.add_argument(
        "--reference", action=argparse.BooleanOptionalAction, help="also run one PE alone (default: tiny only)"
    )
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds that a PE waits for another PE")
    add_common_options(parser, limit=1800.0, host_pes=str(_HOST_PES))
    return parser


def _options(arguments: argparse.Namespace) -> Options:
    taken = {name: value for name, value in vars(arguments).items() if name not in ("pes", "limit", "json")}
    if arguments.prompt is not None:
        try:
            taken["prompt"] = tuple(int(token) for token in arguments.prompt.split(","))
        except ValueError as error:
            raise ValueError(f"--prompt: expected whole numbers with commas, got {arguments.prompt!r}") from error
    return Options(**taken)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
