"""An all-gather in Triton: each PE stores its row in the outputs of all PEs."""

import os

import torch

os.environ.setdefault("TRITON_INTERPRET", str(int(not torch.cuda.is_available())))  # before triton is imported
import triton
import triton.language as tl

import persistent_ops as po
import persistent_ops.triton as pot
from persistent_ops.testing.pes import run_on_pes


@pot.operator(contract=("N",), phases={16: "its row"})
@triton.jit
def all_gather(team, out, x, N, BLOCK: tl.constexpr):
    launch = pot.begin(team, out)
    for step in range(1, launch.size + 1):
        pe = (launch.rank + tl.program_id(0) + step) % launch.size  # work-groups begin with different PEs
        at = pot.await_credit(launch, pe)
        if at >= 0:
            for i in range(tl.program_id(0), tl.cdiv(N, BLOCK), tl.num_programs(0)):
                cols = i * BLOCK + tl.arange(0, BLOCK)
                inside = (cols < N)[None, :]
                value = tl.load(x + cols[None, :], mask=inside)
                pot.put_block(launch, pe, at, launch.rank + tl.arange(0, 1), cols, N, value, inside)
            if pe != launch.rank:
                pot.signal(launch, pe, tl.program_id(0))
    for step in range(1, launch.size):
        pot.wait(launch, (launch.rank + step) % launch.size, tl.program_id(0), 16)
    pot.await_all_credits(launch)
    pot.leave(launch, out, launch.size * N * (out.dtype.element_ty.primitive_bitwidth // 8))


def main() -> None:
    po.init()
    torch.manual_seed(po.rank())
    n = 1 << 20 if po.backend() == "cuda" else 10_000
    with po.process_group():
        for _ in range(3):
            x = torch.randn(n, device=po.device())
            y = all_gather(x, n, out_shape=(po.world_size(), n), meta={"BLOCK": 4096})
            po.check()
            rows = [torch.empty_like(x) for _ in y]
            torch.distributed.all_gather(rows, x)
            assert torch.equal(y, torch.stack(rows))
    if po.rank() == 0:
        print(f"all_gather: {n} elements of each PE, as torch.distributed gathers them")


if __name__ == "__main__":
    run_on_pes(main, torch.cuda.device_count() or 2)
