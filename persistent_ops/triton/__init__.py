"""Communication for kernels in Triton: write your own operator that computes and communicates in one launch.

Needs the extra `persistent-ops[triton]`. docs/triton.md is the introduction.
"""

from .device import (
    Launch as Launch,
    await_all_credits as await_all_credits,
    await_credit as await_credit,
    begin as begin,
    get_block as get_block,
    is_aborted as is_aborted,
    leave as leave,
    offset_of as offset_of,
    peer_ptr as peer_ptr,
    put_block as put_block,
    signal as signal,
    wait as wait,
)
from .explain import explain as explain
from .operator import TritonOperator as TritonOperator, operator as operator, tune as tune
from .transfer import (
    Piece as Piece,
    Transfer as Transfer,
    finish_transfer as finish_transfer,
    first_piece as first_piece,
    move_piece as move_piece,
    no_transfer as no_transfer,
)
