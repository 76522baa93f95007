"""A rank in a separate process, for tests/test_infiniccl_processes.py: libinfiniccl through ctypes, without torch.

Started with the libraries' folder; runs each line that it reads, and answers with one: the value, or the failure.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import random
import sys
from typing import Any

U8, F32, SUM = 7, 13, 0
CCL = ctypes.CDLL(f"{sys.argv[1]}/libinfiniccl.so")
RT = ctypes.CDLL(f"{sys.argv[1]}/libinfinirt.so")
RT.infiniGetLastErrorMessage.restype = ctypes.c_char_p
comm: Any = None


def call(name: str, *arguments: Any) -> None:
    status = getattr(CCL, f"infiniccl{name}")(*arguments)
    if status:
        raise RuntimeError(f"{status}: {RT.infiniGetLastErrorMessage().decode()}")


def join(unique: str, ranks: int, rank: int, seconds: float = 60) -> None:
    global comm
    made = ctypes.c_void_p()
    given = ctypes.create_string_buffer(bytes.fromhex(unique), 128)
    call("CommInitRank", 0, ctypes.byref(made), ranks, given, rank, 0, ctypes.c_int64(round(seconds * 1000)))
    comm = made


def data(seed: int, count: int) -> bytes:
    return random.Random(seed).randbytes(count)


def all_reduce(content: bytes, dtype: int = U8, op: int = SUM, size: int = 1) -> str:
    """The digest of the result."""
    buffer = ctypes.create_string_buffer(content, len(content))
    call("AllReduce", buffer, buffer, ctypes.c_size_t(len(content) // size), dtype, op, comm, None)
    return hashlib.sha256(buffer.raw).hexdigest()


def broadcast(content: bytes, root: int, dtype: int = U8) -> str:
    buffer = ctypes.create_string_buffer(content, len(content))
    call("Broadcast", buffer, buffer, ctypes.c_size_t(len(content)), dtype, root, comm, None)
    return hashlib.sha256(buffer.raw).hexdigest()


def send(content: bytes, peer: int) -> None:
    call("Send", content, ctypes.c_size_t(len(content)), U8, peer, comm, None)


def recv(count: int, peer: int) -> str:
    buffer = ctypes.create_string_buffer(count)
    call("Recv", buffer, ctypes.c_size_t(count), U8, peer, comm, None)
    return hashlib.sha256(buffer.raw).hexdigest()


def limit_files(size: int) -> None:
    """No file of this process may grow beyond it: for what it makes, /dev/shm is full."""
    import resource
    import signal

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def child_destroys() -> None:
    """A child of fork() lets go of what it has inherited."""
    child = os.fork()
    if child == 0:
        call("CommDestroy", comm)
        os._exit(0)
    os.waitpid(child, 0)


def files() -> int:
    return len(os.listdir("/proc/self/fd"))


def main() -> None:
    for line in sys.stdin:
        try:
            try:
                value = eval(line, globals())
            except SyntaxError:
                exec(line, globals())
                value = None
            print(repr(value), flush=True)
        except RuntimeError as error:
            print(repr(f"failed {error}"), flush=True)


main()
