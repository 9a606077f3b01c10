"""ctypes mirrors of the structs in cuda/comm/team.cuh.

The C++ side is the definition: each kernel is compiled with the size of its plan as Python sees it, and a static_assert
refuses a mismatch; tests compare the offset of every field.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Sequence

__all__ = [
    "BLAME_KIND_SHIFT",
    "CONTRACT_WORDS",
    "EPOCH_SHIFT",
    "GRANT_BYTES",
    "LOCAL_STATE_WORDS",
    "MAX_PES",
    "ErrorRecord",
    "InputErrorRecord",
    "LocalState",
    "Team",
    "contract_hash",
]

MAX_PES = 64
CONTRACT_WORDS = 14
EPOCH_SHIFT = 16
BLAME_KIND_SHIFT = 14
GRANT_BYTES = 128


class LocalState(ctypes.Structure):
    """Private state of a workspace, in device memory."""

    _fields_ = (
        ("epoch", ctypes.c_uint64),
        ("_pad0", ctypes.c_uint64 * 15),
        ("ticket", ctypes.c_uint64),
        ("_pad1", ctypes.c_uint64 * 15),
        ("departed", ctypes.c_uint64),
        ("_pad2", ctypes.c_uint64 * 15),
        ("abort", ctypes.c_uint64),
        ("error_claimed", ctypes.c_uint64),
        ("input_error_claimed", ctypes.c_uint64),
        ("lost", ctypes.c_uint64),
        ("preparing", ctypes.c_uint64),
        ("_pad3", ctypes.c_uint64 * 11),
    )


LOCAL_STATE_WORDS = ctypes.sizeof(LocalState) // 8


class ErrorRecord(ctypes.Structure):
    """Why a launch was aborted; `state` is written last."""

    _fields_ = (
        ("state", ctypes.c_uint64),
        ("kind", ctypes.c_uint64),
        ("phase", ctypes.c_uint64),
        ("peer", ctypes.c_uint64),
        ("index", ctypes.c_uint64),
        ("epoch", ctypes.c_uint64),
        ("seen", ctypes.c_uint64),
        ("waited_ns", ctypes.c_uint64),
        ("own_contract", ctypes.c_int64 * CONTRACT_WORDS),
        ("peer_contract", ctypes.c_int64 * CONTRACT_WORDS),
    )


class InputErrorRecord(ctypes.Structure):
    """The first bad index or offset that a kernel met; `state` is written last."""

    _fields_ = (
        ("state", ctypes.c_uint64),
        ("kind", ctypes.c_uint64),
        ("table", ctypes.c_int64),
        ("bag", ctypes.c_int64),
        ("value", ctypes.c_int64),
        ("limit", ctypes.c_int64),
    )


class Team(ctypes.Structure):
    """What every kernel knows about its world; the first field of every plan."""

    _fields_ = (
        ("rank", ctypes.c_int32),
        ("size", ctypes.c_int32),
        ("heap", ctypes.c_uint64),
        ("peer_heaps", ctypes.c_uint64),
        ("grants_offset", ctypes.c_uint64),
        ("ready_offset", ctypes.c_uint64),
        ("abort_offset", ctypes.c_uint64),
        ("ready_stride", ctypes.c_uint64),
        ("local", ctypes.c_uint64),
        ("wg_done", ctypes.c_uint64),
        ("error", ctypes.c_uint64),
        ("input_error", ctypes.c_uint64),
        ("timeout_ns", ctypes.c_uint64),
        ("contract_hash", ctypes.c_uint64),
        ("contract", ctypes.c_int64 * CONTRACT_WORDS),
        ("network", ctypes.c_uint64),
        ("epoch", ctypes.c_uint64),
    )


def contract_hash(contract: Sequence[int]) -> int:
    """Hash a launch contract to the 16 bits that a flag has room for."""
    words = (ctypes.c_int64 * CONTRACT_WORDS)(*contract)
    return int.from_bytes(hashlib.blake2b(bytes(words), digest_size=2).digest(), "little")
