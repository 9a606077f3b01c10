"""A one-shot all-reduce in Triton: each PE reads the inputs of all PEs in their heaps, and adds them in rank order."""

import os

import torch

os.environ.setdefault("TRITON_INTERPRET", str(int(not torch.cuda.is_available())))  # before triton is imported
import triton
import triton.language as tl

import persistent_ops as po
import persistent_ops.triton as pot
from persistent_ops.testing.pes import run_on_pes


@pot.operator(contract=("N",), phases={16: "that it has read this PE's input"})
@triton.jit
def one_shot_all_reduce(team, out, x, N, BLOCK: tl.constexpr):
    launch = pot.begin(team, out)
    pot.await_all_credits(launch)  # a PE that gives credit has written its input
    for i in range(tl.program_id(0), tl.cdiv(N, BLOCK), tl.num_programs(0)):
        row, cols = tl.arange(0, 1), i * BLOCK + tl.arange(0, BLOCK)
        inside = (cols < N)[None, :]
        total = tl.zeros([1, BLOCK], tl.float32)
        for pe in range(launch.size):  # in the same order on all PEs: the same bits
            at = pot.offset_of(launch, x)
            total += pot.get_block(launch, pe, at, row, cols, N, x.dtype.element_ty, inside).to(tl.float32)
        tl.store(out + cols[None, :], total.to(out.dtype.element_ty), mask=inside)
    for step in range(1, launch.size):  # that PE may write its input again
        pot.signal(launch, (launch.rank + step) % launch.size, tl.program_id(0))
    for step in range(1, launch.size):
        pot.wait(launch, (launch.rank + step) % launch.size, tl.program_id(0), 16)
    pot.leave(launch, out, N * (out.dtype.element_ty.primitive_bitwidth // 8))


def main() -> None:
    po.init()
    torch.manual_seed(po.rank())
    n = 1 << 17 if po.backend() == "cuda" else 5000
    x = po.empty(n, dtype=torch.float16)  # at the same offset in all heaps
    with po.process_group():
        for _ in range(3):
            x.normal_()
            y = one_shot_all_reduce(x, n, out_shape=(n,), meta={"BLOCK": 1024})
            po.check()
            inputs = [torch.empty_like(x) for _ in range(po.world_size())]
            torch.distributed.all_gather(inputs, x)
            assert torch.equal(y, sum(each.float() for each in inputs).to(x.dtype))
    if po.rank() == 0:
        print(f"one_shot_all_reduce: {n} elements, the bits of torch's sums in rank order")


if __name__ == "__main__":
    run_on_pes(main, torch.cuda.device_count() or 2)
