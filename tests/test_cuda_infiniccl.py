"""libinfiniccl on NVIDIA devices: what it asks of NCCL, by a library in its place that writes down every call.

On a GPU, or, with INFINI_LIBRARIES=build/native/emulated, on the emulated CUDA runtime. Skipped where there is neither.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.c_runtime import CPU, device_count, made, ok
from support.fresh_python import run_python
from torch_infini.distributed.libinfiniccl import NVIDIA, Communicator, ReduceOp, unique_id
from torch_infini.testing import cuda_device

pytestmark = pytest.mark.skipif(
    device_count(NVIDIA) == 0 or shutil.which("cc") is None, reason="no CUDA device, or no C compiler"
)

# One line a call; a communicator is the address of its rank. A count of 13 is refused.
FAKE = r"""
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct { char internal[128]; } Id;
static char calls[4096];

const char *fake_calls(void) { return calls; }
void fake_forget(void) { calls[0] = 0; }

static int wrote(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    size_t used = strlen(calls);
    vsnprintf(calls + used, sizeof calls - used, format, arguments);
    va_end(arguments);
    return 0;
}
static int *rank_of(int rank) { int *made = malloc(sizeof(int)); *made = rank; return made; }
static int result(size_t count) { return count == 13 ? 4 : 0; }

int ncclGetUniqueId(Id *id) { memset(id, 'i', sizeof *id); return wrote("id\n"); }
int ncclCommInitRank(void **comm, int ranks, Id id, int rank) {
    *comm = rank_of(rank);
    return wrote("init %d of %d, id %c%c\n", rank, ranks, id.internal[0], id.internal[127]);
}
int ncclCommInitAll(void **comms, int devices, const int *ids) {
    wrote("init all");
    for (int i = 0; i < devices; ++i) { comms[i] = rank_of(i); wrote(" %d", ids[i]); }
    return wrote("\n");
}
int ncclCommDestroy(int *comm) { return wrote("destroy %d\n", *comm); }
int ncclCommAbort(int *comm) { return wrote("abort %d\n", *comm); }
const char *ncclGetErrorString(int error) { return error == 4 ? "invalid argument" : "?"; }
int ncclAllReduce(const char *send, char *recv, size_t count, int type, int op, int *comm, void *stream) {
    wrote("all-reduce %d %d, %zu of %d, op %d, rank %d\n", *send, *recv, count, type, op, *comm);
    return stream == 0 ? 1 : result(count);
}
int ncclBroadcast(const void *send, char *recv, size_t count, int type, int root, int *comm, void *stream) {
    return wrote("broadcast %d %d, %zu of %d, root %d, rank %d\n", send != 0, *recv, count, type, root, *comm);
}
int ncclAllGather(const char *send, char *recv, size_t count, int type, int *comm, void *stream) {
    return wrote("all-gather %d %d, %zu of %d, rank %d\n", *send, *recv, count, type, *comm);
}
int ncclReduceScatter(const char *send, char *recv, size_t count, int type, int op, int *comm, void *stream) {
    return wrote("reduce-scatter %d %d, %zu of %d, op %d, rank %d\n", *send, *recv, count, type, op, *comm);
}
int ncclSend(const char *send, size_t count, int type, int peer, int *comm, void *stream) {
    return wrote("send %d, %zu of %d, to %d, rank %d\n", *send, count, type, peer, *comm);
}
int ncclRecv(char *recv, size_t count, int type, int peer, int *comm, void *stream) {
    return wrote("recv %d, %zu of %d, from %d, rank %d\n", *recv, count, type, peer, *comm);
}
"""


class Fake:
    """The library in NCCL's place."""

    def __init__(self, path: Path) -> None:
        path.with_suffix(".c").write_text(FAKE)
        subprocess.run(["cc", "-shared", "-fPIC", str(path.with_suffix(".c")), "-o", str(path)], check=True)
        self.library = ctypes.CDLL(str(path))
        self.library.fake_calls.restype = ctypes.c_char_p

    def calls(self) -> list[str]:
        """Since this was asked last."""
        lines = self.library.fake_calls().decode().splitlines()
        self.library.fake_forget()
        return lines


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fake]:
    """It stays loaded until the process ends, which is why another file's test must not want the real one."""
    path = tmp_path_factory.mktemp("nccl") / "libfake.so"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("INFINI_NCCL_LIBRARY", str(path))
        loaded = Fake(path)
        unique_id(NVIDIA)
        loaded.calls()
        yield loaded


@pytest.fixture
def buffers() -> tuple[int, int]:
    """Addresses of two buffers that begin with 1 and 2; the library in NCCL's place looks at them on the host."""
    kept.append((ctypes.create_string_buffer(b"\1", 256), ctypes.create_string_buffer(b"\2", 256)))
    send, recv = kept[-1]
    return ctypes.addressof(send), ctypes.addressof(recv)


kept: list[tuple[ctypes.Array[ctypes.c_char], ...]] = []


def test_ids_and_ranks(fake: Fake) -> None:
    given = unique_id(NVIDIA)
    assert given == b"i" * 128
    communicator = Communicator(3, given, 2, NVIDIA)
    assert fake.calls() == ["id", "init 2 of 3, id ii"]
    communicator.destroy()
    assert fake.calls() == ["destroy 2"]


def test_all_ranks_of_a_process(fake: Fake, buffers: tuple[int, int]) -> None:
    devices = list(range(device_count(NVIDIA)))
    communicators = Communicator.all(len(devices), NVIDIA)
    assert fake.calls() == ["init all " + " ".join(map(str, devices))]
    for communicator in communicators:
        communicator.all_reduce(*buffers, 5, 13, ReduceOp.AVG)
        communicator.destroy()
    assert fake.calls()[::2] == [f"all-reduce 1 2, 5 of 7, op 4, rank {rank}" for rank in devices]


def test_every_collective(fake: Fake, buffers: tuple[int, int]) -> None:
    send, recv = buffers
    communicator = Communicator(2, unique_id(NVIDIA), 1, NVIDIA)
    ok("SetDevice", NVIDIA, 0)
    stream = made("StreamCreate")
    fake.calls()
    communicator.all_reduce(send, recv, 5, 19, ReduceOp.MAX, stream)
    communicator.broadcast(send, recv, 6, 13, 0, stream)
    communicator.broadcast(send, recv, 6, 13, 1, stream)
    communicator.all_gather(send, recv, 7, 14, stream)
    communicator.reduce_scatter(send, recv, 8, 12, ReduceOp.PROD, stream)
    communicator.send(send, 9, 5, 0, stream)
    communicator.recv(recv, 10, 10, 0, stream)
    assert fake.calls() == [
        "all-reduce 1 2, 5 of 9, op 2, rank 1",
        "broadcast 0 2, 6 of 7, root 0, rank 1",
        "broadcast 1 2, 6 of 7, root 1, rank 1",
        "all-gather 1 2, 7 of 8, rank 1",
        "reduce-scatter 1 2, 8 of 6, op 1, rank 1",
        "send 1, 9 of 2, to 0, rank 1",
        "recv 2, 10 of 5, from 0, rank 1",
    ]
    ok("StreamDestroy", stream)
    ok("SetDevice", CPU, 0)


def test_dtypes_that_nccl_has_not(fake: Fake, buffers: tuple[int, int]) -> None:
    """What only moves goes as bytes; bools are reduced as bytes; the rest is refused."""
    send, recv = buffers
    communicator = Communicator(2, unique_id(NVIDIA), 0, NVIDIA)
    fake.calls()
    communicator.all_gather(send, recv, 3, 18)  # complex128
    communicator.send(send, 3, 8, 1)  # uint16
    for op in (ReduceOp.SUM, ReduceOp.PROD):
        communicator.all_reduce(send, recv, 3, 2, op)
    assert [line.split(", rank")[0] for line in fake.calls()] == [
        "all-gather 1 2, 48 of 1",
        "send 1, 6 of 1, to 1",
        "all-reduce 1 2, 3 of 1, op 2",
        "all-reduce 1 2, 3 of 1, op 3",
    ]
    with pytest.raises(RuntimeError, match="infinicclAllReduce: datatype must be one that NCCL reduces, got int16"):
        communicator.all_reduce(send, recv, 3, 4, ReduceOp.SUM)


def test_failures(fake: Fake, buffers: tuple[int, int]) -> None:
    communicator = Communicator(2, unique_id(NVIDIA), 0, NVIDIA)
    with pytest.raises(RuntimeError) as caught:
        communicator.all_reduce(*buffers, 13, 13, ReduceOp.SUM)
    assert str(caught.value) == "infinicclAllReduce: NCCL: invalid argument (4)"
    with pytest.raises(RuntimeError, match="infinicclCommSetTimeout: NCCL has no timeouts"):
        communicator.set_timeout(1)
    fake.calls()
    communicator.abort()
    communicator.abort()
    with pytest.raises(RuntimeError, match="infinicclAllReduce: the communicator has been aborted"):
        communicator.all_reduce(*buffers, 1, 13, ReduceOp.SUM)
    communicator.destroy()
    assert fake.calls() == ["abort 0"]
    with pytest.raises(RuntimeError, match="infinicclCommInitRank: device_id must be less than the number of devices"):
        Communicator(2, b"i" * 128, 0, NVIDIA, device_count(NVIDIA))


@pytest.mark.parametrize(
    ("library", "sentence"),
    [
        (
            "/nowhere/libnccl.so",
            "infiniccl: NCCL cannot be loaded (/nowhere/libnccl.so: cannot open shared object file",
        ),
        ("libc.so.6", "infiniccl: libc.so.6 has no ncclGetUniqueId"),
    ],
)
def test_without_nccl(library: str, sentence: str) -> None:
    code = "from torch_infini.distributed.libinfiniccl import *\ntry: unique_id(1)\nexcept RuntimeError as e: print(e)"
    environment = {**os.environ, "INFINI_NCCL_LIBRARY": library}
    done = run_python(code, env=environment)
    assert done.stdout.startswith(sentence), done.stderr


# One rank, which has every result for itself; on a GPU that is all of NCCL that a machine with one can run.
ALONE = """
import sys
import torch, torch_infini
from torch_infini.distributed.libinfiniccl import Communicator, ReduceOp, unique_id
device, kind = sys.argv[1], int(sys.argv[2])
DTYPES = {torch.float32: 13, torch.bfloat16: 19, torch.float16: 12, torch.int64: 6}
communicator = Communicator(1, unique_id(kind), 0, kind)
stream = torch.cuda.current_stream().cuda_stream or 1 if device == "cuda" else None
for dtype, number in DTYPES.items():
    x = torch.arange(-500, 500, device=device).to(dtype)
    for count in (0, 1, 1000):
        for call in (
            lambda y: communicator.all_reduce(x.data_ptr(), y.data_ptr(), count, number, ReduceOp.SUM, stream),
            lambda y: communicator.all_reduce(x.data_ptr(), y.data_ptr(), count, number, ReduceOp.MAX, stream),
            lambda y: communicator.broadcast(x.data_ptr(), y.data_ptr(), count, number, 0, stream),
            lambda y: communicator.all_gather(x.data_ptr(), y.data_ptr(), count, number, stream),
            lambda y: communicator.reduce_scatter(x.data_ptr(), y.data_ptr(), count, number, ReduceOp.SUM, stream),
        ):
            y = torch.full_like(x, 7)
            call(y)
            assert torch.equal(y[:count], x[:count]) and (y[count:] == 7).all(), (dtype, count)
communicator.destroy()
print("alone")
"""


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_one_rank(device: str) -> None:
    """In a separate process, with the real NCCL; on the CPU the same program, so that it is known to be right.

    The fixture `fake` names the library in NCCL's place for the whole module, and that one reads buffers on the host.
    """
    if device == "cuda" and cuda_device() != "cuda":
        pytest.skip("no GPU")
    kind = NVIDIA if device == "cuda" else CPU
    environment = {name: value for name, value in os.environ.items() if name != "INFINI_NCCL_LIBRARY"}
    command = [sys.executable, "-c", ALONE, device, str(kind)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.stdout == "alone\n", (done.returncode, done.stderr)
