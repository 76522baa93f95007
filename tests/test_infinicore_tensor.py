"""infinicore's tensors: what they tell, views, strict contiguity, copies; and the functions that make them."""

from __future__ import annotations

import copy
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import torch_infini.compat.infinicore as ic
from torch_infini.compat.infinicore import utils

CPU = ic.device("cpu")
MADE: Any = {"dtype": ic.float32, "device": CPU}


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
    with pytest.raises(ValueError, match="squeeze: dim must be at least 0, got -1"):
        x.squeeze(-1)  # dimensions count from 0
    with pytest.raises(ValueError, match=r"view: shape must not have negative sizes, got \[-1\]"):
        x.view([-1])
    with pytest.raises(TypeError, match="permute: dims must be a sequence of integers, got 1.5"):
        x.permute(1.5)  # type: ignore[arg-type]


HUGE = 2**64


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda x: x.narrow(-1, 0, 1), ValueError, "narrow: dim must be at least 0, got -1"),
        (lambda x: ic.narrow(x, 0, 0, HUGE), ValueError, f"narrow: length must be below 2^63, got {HUGE}"),
        (lambda x: x.narrow(0, 1.5, 1), TypeError, "narrow: start must be an integer, got 1.5"),
        (lambda x: x.squeeze(None), TypeError, "squeeze: dim must be an integer, got None"),
        (lambda x: ic.squeeze(x, -2), ValueError, "squeeze: dim must be at least 0, got -2"),
        (lambda x: ic.unsqueeze(x, "0"), TypeError, "unsqueeze: dim must be an integer, got '0'"),
        (lambda x: x.size(HUGE), ValueError, f"size: dim must be below 2^63, got {HUGE}"),
        (lambda x: x.stride(0.5), TypeError, "stride: dim must be an integer, got 0.5"),
        (lambda x: x.view([HUGE]), ValueError, f"view: shape must be below 2^63, got [{HUGE}]"),
        (lambda x: x.permute([0, HUGE]), ValueError, f"permute: dims must be below 2^63, got [0, {HUGE}]"),
        (lambda x: x.as_strided([1], [HUGE]), ValueError, f"as_strided: stride must be below 2^63, got [{HUGE}]"),
        (lambda x: x.as_strided([1], [-HUGE]), ValueError, f"numbers below {-(2**63)}, got [{-HUGE}]"),
        (lambda x: x.as_strided([1], ["a"]), TypeError, "stride must be a sequence of integers, got ['a']"),
        (lambda x: ic.zeros([HUGE], **MADE), ValueError, f"zeros: size must be below 2^63, got [{HUGE}]"),
        (lambda x: ic.empty(HUGE, **MADE), ValueError, f"empty: size must be below 2^63, got [{HUGE}]"),
        (lambda x: ic.strided_empty([2], [HUGE], **MADE), ValueError, f"strides must be below 2^63, got [{HUGE}]"),
        (lambda x: ic.from_blob(HUGE, [2], **MADE), ValueError, f"data_ptr must be below 2^64, got {HUGE}"),
        (lambda x: ic.from_blob("x", [2], **MADE), TypeError, "data_ptr must be an integer, got 'x'"),
        (lambda x: ic.strided_from_blob(8, [2], [0.5], **MADE), TypeError, "strides must be a sequence of integers"),
    ],
)
def test_numbers_that_are_no_sizes(call: Any, kind: type[Exception], message: str) -> None:
    """One sentence, and not what pybind11 says of its signatures."""
    with pytest.raises(kind) as caught:
        call(ic.zeros([1, 3], **MADE))
    assert message in str(caught.value) and "infinicore." in str(caught.value) and "\n" not in str(caught.value)


def test_truth() -> None:
    """That of a single element, as torch's; of others there is none."""
    for value in (0.0, -0.0, 2.5, float("nan")):
        for shape in ((), (1,), (1, 1)):
            for dtype in (torch.float32, torch.bfloat16, torch.bool, torch.complex64):
                theirs = torch.full(shape, value).to(dtype)
                assert bool(ic.from_torch(theirs)) is bool(theirs)
    for shape in ([2], [0], [1, 3]):
        with pytest.raises(
            RuntimeError, match=r"__bool__: the tensor must have one element, got shape \[" + str(shape[0])
        ):
            bool(ic.zeros(shape, **MADE))


def test_deepcopy_and_copy() -> None:
    """deepcopy() gives other memory, once for each tensor; copy() the same memory."""
    x = ic.from_torch(torch.arange(6.0).reshape(2, 3).t())
    pair = copy.deepcopy([x, x])
    assert pair[0] is pair[1] and type(pair[0]) is ic.Tensor
    assert torch.equal(torch.from_dlpack(pair[0]), torch.from_dlpack(x)) and pair[0].data_ptr() != x.data_ptr()
    torch.from_dlpack(x).zero_()
    assert torch.from_dlpack(pair[0]).sum() == 15
    same = copy.copy(x)
    assert same is not x and same.data_ptr() == x.data_ptr() and same.stride() == x.stride()
    assert copy.deepcopy(x.device) == x.device


@pytest.mark.parametrize("dtype", [ic.float32, ic.bfloat16, ic.float16, ic.bool, ic.int64, ic.complex64, ic.complex32])
def test_pickle(dtype: ic.dtype) -> None:
    """By values: of every shape, and of views only what they show."""
    theirs = utils.to_torch_dtype(dtype)
    whole = torch.arange(12).reshape(3, 4).to(torch.float32 if dtype == ic.complex32 else theirs).to(theirs)
    for source in (whole, whole.t(), whole[:, 1:3], whole[0, 0], whole[:0]):
        x = ic.from_torch(source)
        x.device._underlying  # noqa: B018 - which a device keeps
        again = pickle.loads(pickle.dumps(x))
        assert (again.shape, again.dtype, again.device) == (x.shape, x.dtype, x.device)
        got = torch.from_dlpack(again)
        assert got.flatten().view(torch.uint8).tolist() == source.flatten().view(torch.uint8).tolist()
    assert len(pickle.dumps(ic.from_torch(torch.zeros(10000)).narrow(0, 0, 1))) < 1000


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
    whole = ic.from_list([1.9, -1.9, 127, -128.5], dtype=ic.int8)  # fractions are cut off, as torch does
    assert numpy.asarray(whole).tolist() == [1, -1, 127, -128]
    with pytest.raises(ValueError, match="Unsupported numpy dtype"):
        ic.from_list(["a"])
