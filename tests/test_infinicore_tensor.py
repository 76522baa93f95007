"""infinicore's tensors: what they tell, views, strict contiguity, copies; and the functions that make them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import torch_infini.infinicore as ic
from torch_infini.infinicore import utils

CPU = ic.device("cpu")


# ---- tensors ----


def test_tensor() -> None:
    x = ic.empty((2, 3, 4), dtype=ic.float16, device=CPU)
    assert x.shape == [2, 3, 4] and isinstance(x.shape, list)
    assert x.size() == [2, 3, 4] and x.size(1) == 3 and x.size(-1) == 4
    assert x.stride() == [12, 4, 1] and x.stride(0) == 12
    assert (x.ndim, x.numel()) == (3, 24)
    assert x.dtype == ic.float16 and x.device == CPU
    assert x.is_contiguous() and not x.is_pinned()
    assert x.data_ptr() == x._underlying.data_ptr() != 0
    assert repr(x) == "infinicore.Tensor(shape=[2, 3, 4], dtype=infinicore.float16, device=cpu:0)"
    x.shape.append(1)
    assert x.shape == [2, 3, 4]
    with pytest.raises(IndexError, match="size: dim must be below 3, got 3"):
        x.size(3)


def test_tensor_is_a_plain_class() -> None:
    """Hashable by identity, in sets; attributes of objects and of the class can be set."""
    x, y = (ic.zeros([2], dtype=ic.float32, device=CPU) for _ in range(2))
    assert len({x, y, x}) == 2 and x != y
    x.name = "x"  # type: ignore[attr-defined]
    try:
        ic.Tensor.to_list = lambda self: numpy.asarray(self).tolist()  # type: ignore[attr-defined]
        assert x.to_list() == [0, 0]  # type: ignore[attr-defined]
    finally:
        del ic.Tensor.to_list  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match="underlying must be an _infinicore.Tensor, got None"):
        ic.Tensor(None)  # type: ignore[arg-type]


def test_views() -> None:
    """All share the memory, and write through."""
    x = ic.from_torch(torch.arange(24).reshape(2, 3, 4))
    base = torch.arange(24).reshape(2, 3, 4)
    for ours, theirs in (
        (x.permute([2, 0, 1]), base.permute(2, 0, 1)),
        (x.permute((0, 1, 2)), base),
        (x.view([6, 4]), base.view(6, 4)),
        (x.view((24,)), base.view(24)),
        (x.narrow(2, 1, 2), base.narrow(2, 1, 2)),
        (x.narrow(0, 1, 1).squeeze(0), base[1]),
        (x.as_strided([2, 2], [1, 12]), base.as_strided((2, 2), (1, 12))),
        (x.narrow(1, 1, 2).as_strided([2], [3]), base[:, 1:].as_strided((2,), (3,), 4)),
        (x.as_strided([3, 5], [0, 1]), base.as_strided((3, 5), (0, 1))),
    ):
        assert torch.equal(torch.from_dlpack(ours), theirs)
        assert ours.stride() == list(theirs.stride())
    assert x.unsqueeze(1).shape == [2, 1, 3, 4] and x.unsqueeze(3).shape == [2, 3, 4, 1]
    one = ic.from_torch(torch.ones(1))
    assert one.view([]).shape == [] and one.view([]).ndim == 0
    torch.from_dlpack(x.narrow(0, 1, 1)).fill_(7)
    assert torch.equal(torch.from_dlpack(x)[1], torch.full((3, 4), 7))


def test_strict_contiguity() -> None:
    """Strides of dimensions of size 1 count, unlike torch's; so what unsqueeze() returns is not contiguous."""
    x = ic.zeros([3, 4], dtype=ic.float32, device=CPU)
    assert x.is_contiguous()
    wide = x.unsqueeze(0)
    assert wide.stride() == [0, 4, 1] and not wide.is_contiguous()
    again = wide.contiguous()
    assert again.is_contiguous() and again.data_ptr() != x.data_ptr()
    assert x.contiguous().data_ptr() == x.data_ptr()
    assert not x.permute([1, 0]).is_contiguous()


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x.squeeze(0),
        lambda x: x.squeeze(9),
        lambda x: x.unsqueeze(4),
        lambda x: x.narrow(0, 1, 2),
        lambda x: x.narrow(5, 0, 1),
        lambda x: x.view([5, 5]),
        lambda x: x.permute([1, 0]).view([12]),
        lambda x: x.permute([0, 0]),
        lambda x: x.permute([0]),
    ],
)
def test_refused_views(call: Any) -> None:
    with pytest.raises(RuntimeError):
        call(ic.zeros([2, 3], dtype=ic.float32, device=CPU).unsqueeze(2).squeeze(2))


def test_arguments_of_views() -> None:
    x = ic.zeros([1, 3], dtype=ic.float32, device=CPU)
    with pytest.raises(TypeError):
        x.squeeze(-1)  # dimensions count from 0
    with pytest.raises(ValueError, match=r"view: shape must not have negative sizes, got \[-1\]"):
        x.view([-1])
    with pytest.raises(TypeError, match="permute: dims must be a sequence of integers, got 1.5"):
        x.permute(1.5)  # type: ignore[arg-type]


def test_copy() -> None:
    x = ic.zeros([3, 4], dtype=ic.float32, device=CPU)
    source = torch.randn(4, 3).t()
    assert x.copy_(ic.from_torch(source)) is None
    assert torch.equal(torch.from_dlpack(x), source)
    for wrong in (torch.zeros(4, 3), torch.zeros(3, 4).double()):
        with pytest.raises(RuntimeError, match="copy_from"):
            x.copy_(ic.from_torch(wrong))
    with pytest.raises(TypeError, match="copy_: src must be an infinicore.Tensor, got 3"):
        x.copy_(3)  # type: ignore[arg-type]


def test_to() -> None:
    """On the same device over the same memory; there are no other dtypes."""
    x = ic.zeros([3, 4], dtype=ic.float32, device=CPU)
    assert x.to(CPU).data_ptr() == x.data_ptr() == x.to("cpu").data_ptr()
    with pytest.raises(TypeError, match="to: device must be an infinicore.device or its name, got a "):
        x.to(ic.float16)  # type: ignore[arg-type]


def test_debug(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    x = ic.from_torch(torch.tensor([[1.5, -2.0], [0.0, 8.0]]).t())
    x.debug()
    said = capfd.readouterr().out
    assert "1.5" in said and "-2" in said and "[2, 2]" in said
    x.debug(str(tmp_path / "x.bin"))
    assert numpy.fromfile(tmp_path / "x.bin", numpy.float32).tolist() == [1.5, 0.0, -2.0, 8.0]


# ---- constructors ----


@pytest.mark.parametrize("name", [name for name in dir(ic) if isinstance(getattr(ic, name), ic.dtype)])
def test_filled(name: str) -> None:
    """zeros and ones fill every dtype and every kind of size."""
    dtype = getattr(ic, name)
    for size in ([2, 3], (5,), [], [0, 3], [1, 1, 257]):
        zeros, ones = ic.zeros(size, dtype=dtype, device=CPU), ic.ones(size, dtype=dtype, device="cpu")
        assert zeros.shape == list(size) and zeros.dtype == dtype
        theirs = utils.to_torch_dtype(dtype)
        for ours, number in ((zeros, 0), (ones, 1)):
            got = torch.from_dlpack(ours)
            if dtype == ic.complex32:  # which torch neither fills nor compares
                parts = torch.view_as_real(got)
                assert bool((parts[..., 0] == number).all()) and bool((parts[..., 1] == 0).all())
            else:
                assert torch.equal(got, torch.full(size, number, dtype=theirs))


def test_empty_like() -> None:
    x = ic.from_torch(torch.zeros(3, 4).t())
    like = ic.empty_like(x)
    assert like.shape == [4, 3] and like.is_contiguous() and like.dtype == ic.float32 and like.device == CPU
    assert ic.empty_like(x, dtype=ic.int8, device=CPU).dtype == ic.int8
    with pytest.raises(TypeError, match="empty_like: input must be an infinicore.Tensor"):
        ic.empty_like(torch.zeros(3))  # type: ignore[arg-type]


def test_strided_empty() -> None:
    x = ic.strided_empty([2, 3], [10, 2], dtype=ic.float32, device=CPU)
    assert x.stride() == [10, 2] and x.shape == [2, 3] and not x.is_contiguous()
    torch.from_dlpack(x).fill_(3)
    assert (numpy.asarray(x) == 3).all()
    with pytest.raises(RuntimeError, match="strides must have one number for each of the 2 dimensions"):
        ic.strided_empty([2, 3], [1], dtype=ic.float32, device=CPU)


def test_pinned() -> None:
    assert ic.empty([4], dtype=ic.float32, device=CPU, pin_memory=True).is_pinned()
    assert ic.zeros([4], dtype=ic.float32, device=CPU, pin_memory=True).is_pinned()


def test_from_blob() -> None:
    """Over memory that stays the caller's."""
    memory = numpy.arange(12, dtype=numpy.float32)
    x = ic.from_blob(memory.ctypes.data, [3, 4], dtype=ic.float32, device=CPU)
    assert x.data_ptr() == memory.ctypes.data
    memory[5] = -1
    assert numpy.asarray(x)[1, 1] == -1
    strided = ic.strided_from_blob(memory.ctypes.data, [4, 3], [1, 4], dtype=ic.float32, device=CPU)
    assert (numpy.asarray(strided) == memory.reshape(3, 4).T).all()
    before = sys.getrefcount(memory)
    ic.from_blob(memory.ctypes.data, [3, 4], dtype=ic.float32, device=CPU)
    assert sys.getrefcount(memory) == before
    with pytest.raises(RuntimeError, match="raw_ptr must not be NULL"):
        ic.from_blob(0, [3], dtype=ic.float32, device=CPU)


@pytest.mark.parametrize("make", [ic.empty, ic.zeros, ic.ones])
def test_dtype_and_device_are_required(make: Any) -> None:
    name = make.__name__
    with pytest.raises(TypeError, match=f"infinicore.{name}: dtype must be an infinicore.dtype, got None"):
        make([2], device=CPU)
    with pytest.raises(
        TypeError, match=f"infinicore.{name}: device must be an infinicore.device or its name, got None"
    ):
        make([2], dtype=ic.float32)
    with pytest.raises(TypeError, match=f"infinicore.{name}: dtype must be an infinicore.dtype, got a torch.dtype"):
        make([2], dtype=torch.float32, device=CPU)
    with pytest.raises(ValueError, match=f"infinicore.{name}: size must not have negative sizes"):
        make([2, -1], dtype=ic.float32, device=CPU)
    with pytest.raises(TypeError, match=f"infinicore.{name}: size must be a sequence of integers, got 'ab'"):
        make("ab", dtype=ic.float32, device=CPU)
    with pytest.raises(RuntimeError, match="less than 2\\^63 bytes"):
        make([2**40, 2**40], dtype=ic.float32, device=CPU)


def test_from_list() -> None:
    assert ic.from_list([1.0, 2.0]).dtype == ic.float64
    assert ic.from_list((1, 2)).dtype == ic.int64
    assert ic.from_list([True, False]).dtype == ic.bool
    x = ic.from_list([[1, 2], [3, 4.5]], dtype=ic.bfloat16, device=CPU)
    assert x.dtype == ic.bfloat16 and torch.equal(torch.from_dlpack(x), torch.tensor([[1, 2], [3, 4.5]]).bfloat16())
    with pytest.raises(TypeError, match="from_list: data must be a list or a tuple, got 3"):
        ic.from_list(3)
    for empty in ([], (), [[]]):
        with pytest.raises(ValueError, match="from_list: data must not be empty"):
            ic.from_list(empty)
    with pytest.raises(ValueError):
        ic.from_list([[1, 2], [3]])
    with pytest.raises(ValueError, match="Unsupported numpy dtype"):
        ic.from_list(["a"])
