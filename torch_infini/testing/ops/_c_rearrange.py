"""Rearrange of the C ABI, described for tests, fuzzer and benchmarks.

The kernel is csrc/infiniop/rearrange.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..c_ops import DTYPES, CErrorCase, COp, CSample, Described

COMPLEX128 = 18  # INFINI_DTYPE_C128: 16 bytes
SIZES = (torch.int8, torch.int16, torch.int32, torch.int64)  # the kernel knows an element's size only


def reference(dst: Tensor, src: Tensor) -> dict[str, Tensor]:
    return {"dst": src}


def values(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    info = torch.iinfo(dtype)
    return torch.randint(info.min, info.max, shape, dtype=dtype)


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.full(shape, 77).to(dtype)


def samples() -> Iterator[CSample]:
    for dtype in DTYPES:
        src = torch.randint(0, 2, (3, 5, 7)).to(dtype)
        yield CSample(f"{dtype}", {"dst": empty((3, 5, 7), dtype), "src": src})
        yield CSample(f"{dtype} transposed", {"dst": empty((7, 5, 3), dtype), "src": src.permute(2, 1, 0)})
    for dtype in SIZES:
        for shape in ((), (1,), (3, 0, 5), (1, 1, 17)):
            yield CSample(f"{dtype} {shape}", {"dst": empty(shape, dtype), "src": values(shape, dtype)})
        for rows, columns in ((2, 300), (300, 2), (65, 131), (64, 128), (1, 50)):
            src = values((columns, rows), dtype).T
            yield CSample(f"{dtype} transposed {rows} by {columns}", {"dst": empty((rows, columns), dtype), "src": src})
            wide = values((columns, 2 * rows), dtype)[:, ::2].T
            dst = empty((rows, 3 * columns), dtype)[:, 1::3]
            yield CSample(f"{dtype} strided, transposed {rows} by {columns}", {"dst": dst, "src": wide})
        yield CSample(
            f"{dtype} rows apart", {"dst": empty((9, 70), dtype)[:, 3:40], "src": values((9, 64), dtype)[:, 1:38]}
        )
        yield CSample(
            f"{dtype} every second", {"dst": empty((9, 70), dtype)[:, ::2], "src": values((9, 105), dtype)[:, ::3]}
        )
        for pairs in (1, 2, 3, 4, 8):  # runs of several elements
            src = values((11, 6, pairs), dtype).transpose(0, 1)
            yield CSample(f"{dtype} runs of {pairs}", {"dst": empty((6, 11, pairs), dtype), "src": src})
        yield CSample(f"{dtype} one row", {"dst": empty((9, 70), dtype), "src": values((1, 70), dtype).expand(9, 70)})
        yield CSample(f"{dtype} one column", {"dst": empty((9, 70), dtype), "src": values((9, 1), dtype).expand(9, 70)})
        yield CSample(f"{dtype} one number", {"dst": empty((9, 70), dtype), "src": values((1, 1), dtype).expand(9, 70)})
        backwards = Described(values((9, 70), dtype), (9, 70), (-70, -1), 9 * 70 - 1)
        yield CSample(f"{dtype} backwards", {"dst": empty((9, 70), dtype), "src": backwards})
        yield CSample(
            f"{dtype} backwards, transposed",
            {"dst": Described(empty((70, 9), dtype), (9, 70), (-1, 9), 8), "src": values((9, 70), dtype)},
        )
        src = values((2, 3, 4, 5, 6), dtype)
        yield CSample(
            f"{dtype} five dimensions", {"dst": empty((6, 3, 5, 2, 4), dtype), "src": src.permute(4, 1, 3, 0, 2)}
        )
        yield CSample(f"{dtype} in place", {"dst": src, "src": src})
        yield CSample(
            f"{dtype} large, transposed", {"dst": empty((500, 700), dtype), "src": values((700, 500), dtype).T}
        )
        yield CSample(f"{dtype} large", {"dst": empty((300, 1000), dtype), "src": values((300, 1000), dtype)})
    for strides in ((1, 17), (20, 1), (-1, -17)):
        src, dst = (torch.randn(340, dtype=torch.complex128) for _ in range(2))
        yield CSample(
            f"complex128 {strides}",
            {
                "dst": Described(dst, (17, 20), (20, 1), 0, COMPLEX128),
                "src": Described(src, (17, 20), strides, 0 if strides[0] > 0 else 339, COMPLEX128),
            },
        )


def compare(sample: CSample, outputs: dict[str, Tensor]) -> None:
    """To the bit."""
    dst, src = (t.contiguous().reshape(-1).view(torch.uint8) for t in (outputs["dst"], sample.args["src"]))
    assert torch.equal(dst, src), sample.name


def errors() -> Iterator[CErrorCase]:
    op = "infini::rearrange: "
    dst, src = torch.ones(2, 3), torch.ones(2, 3)
    yield CErrorCase(
        "shapes differ",
        {"dst": dst, "src": torch.ones(3, 2)},
        "BAD_TENSOR_SHAPE",
        op + "src must have the shape of dst, [2, 3], got [3, 2]",
    )
    yield CErrorCase(
        "dtypes differ",
        {"dst": dst, "src": src.int()},
        "BAD_TENSOR_DTYPE",
        op + "src must have the dtype of dst, float32, got int32",
    )
    yield CErrorCase(
        "broadcast output",
        {"dst": torch.ones(2, 1).expand(2, 3), "src": src},
        "BAD_TENSOR_STRIDES",
        op + "dst must not be a broadcast view, for it is written to, got strides [1, 0]",
    )
    square = torch.ones(3, 3)
    yield CErrorCase(
        "transposed onto itself",
        {"dst": square, "src": square.T},
        "BAD_PARAM",
        op + "dst must be src itself or share no memory with it, got one whose span of memory overlaps it",
        at="run",
    )


C_OPS = [COp("Rearrange", ["dst"], reference, samples, errors, compare)]
