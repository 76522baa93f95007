"""Everyday calls that make, copy, view and index tensors, and their dtypes."""

from __future__ import annotations

from typing import Any

import torch

from .. import unwrap, wrap
from .checks import DEVICE, bits, data, everyday, on_both, refused, require, same, same_tensor

# ---- factories ----


@everyday("factories")
def constants() -> None:
    """torch.zeros, ones, full, eye, empty and scalar_tensor with device="infini"."""

    def make(device: str) -> Any:
        half = torch.full((3,), 2.5, dtype=torch.float16, device=device)
        plain = torch.zeros(2, 3, device=device), torch.ones((), device=device), torch.eye(3, 5, device=device)
        return *plain, half, torch.scalar_tensor(7, device=device), torch.empty(0, 4, device=device)

    on_both(make)
    require(torch.empty(5, 7, device=DEVICE).shape == (5, 7), "torch.empty must have its shape")


@everyday("factories")
def ranges() -> None:
    """torch.arange, linspace, logspace and tril_indices."""
    on_both(
        lambda device: (
            torch.arange(10, device=device),
            torch.arange(1, 2, 0.25, device=device),
            torch.linspace(0, 1, 7, device=device),
            torch.logspace(0, 2, 3, dtype=torch.float64, device=device),
            torch.tril_indices(3, 3, device=device),
        )
    )


@everyday("factories")
def from_data() -> None:
    """torch.tensor, as_tensor and asarray from lists, scalars and numpy."""
    numpy = data(3, 4).numpy()
    on_both(
        lambda device: (
            torch.tensor([[1, 2], [3, 4]], device=device),
            torch.tensor(2.5, device=device),
            torch.as_tensor(numpy, device=device),
            torch.asarray([1.0, 2.0], device=device),
            torch.tensor([], device=device),
        )
    )


@everyday("factories")
def like_another() -> None:
    """zeros_like, full_like, rand_like, new_zeros and new_tensor follow the tensor's device and strides."""

    def make(device: str) -> Any:
        x = data(3, 4).to(device).t()
        new = x.new_zeros(2, 2), x.new_full((3,), 4), x.new_tensor([1, 2]), x.new_ones(2, dtype=torch.int8)
        return torch.zeros_like(x), torch.full_like(x, 3, dtype=torch.float64), *new

    on_both(make)
    require(torch.rand_like(data(2).to(DEVICE)).device.type == DEVICE, "rand_like must stay on infini")


@everyday("factories")
def default_device() -> None:
    """Both `with torch.device("infini")` and torch.set_default_device decide where a factory allocates."""
    with torch.device(DEVICE):
        same_tensor(torch.arange(3) + torch.ones(3), torch.arange(3, device="cpu") + torch.ones(3, device="cpu"))
        require(torch.nn.Linear(2, 3).weight.device.type == DEVICE, "parameters must be made on infini")
    before = torch.get_default_device()
    torch.set_default_device(DEVICE)
    try:
        require(torch.zeros(2).device == torch.device(DEVICE, 0), "the default device must be infini:0")
    finally:
        torch.set_default_device(None if before.type == "cpu" else before)
    require(torch.zeros(2).device.type == before.type, "the default device must be as before")


# ---- copies ----


@everyday("copies")
def to_and_back() -> None:
    """x.to("infini"), with a dtype, copy=True and non_blocking=True, and .cpu() give the same bits."""
    x = data(33, 5)
    same_tensor(x.to(DEVICE), x)
    same_tensor(x.to("infini:0", torch.bfloat16, non_blocking=True), x.bfloat16())
    y = x.to(DEVICE)
    require(y.to(DEVICE) is y, "a tensor that is there already must be returned")
    require(y.to(DEVICE, copy=True).data_ptr() != y.data_ptr(), "copy=True must copy")
    require(torch.equal(bits(y.cpu()), bits(x)), "the way back must keep the bits")


@everyday("copies")
def generated_methods() -> None:
    """Tensor.infini(), Tensor.is_infini and Module.infini()."""
    x: Any = data(4)
    same_tensor(x.infini(), x)
    require(x.infini().is_infini and not x.is_infini, "is_infini must say where a tensor is")
    layer: Any = torch.nn.Linear(3, 2)
    require(layer.infini().bias.device.type == DEVICE, "Module.infini() must move the parameters")


@everyday("copies")
def module_to() -> None:
    """Module.to moves parameters, buffers and gradients, and back."""
    layer = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    layer.to(DEVICE)
    same(dict(layer.state_dict()), before)
    layer(data(6, 4).to(DEVICE)).sum().backward()
    gradient = layer[0].weight.grad
    require(gradient is not None and gradient.device.type == DEVICE, "gradients must be on infini")
    layer.cpu()
    require(all(p.device.type == "cpu" for p in layer.parameters()), "Module.cpu() must move everything back")


@everyday("copies")
def copy_between_devices() -> None:
    """copy_ in both directions and within the device, strided, broadcast and converted."""
    x = data(6, 5)
    here = torch.zeros(5, 6, device=DEVICE).t()
    here.copy_(x)
    same_tensor(here, torch.zeros(5, 6).t().copy_(x))
    there = torch.zeros(6, 5, dtype=torch.float64)
    there[::2].copy_(here[::2])
    require(torch.equal(there[::2], x[::2].double()), "copies onto the CPU must convert and keep strides")
    here.copy_(torch.arange(5, device=DEVICE))
    require(torch.equal(here.cpu(), torch.arange(5.0).expand(6, 5)), "copies must broadcast")


@everyday("copies")
def numpy_round_trip() -> None:
    """.cpu().numpy() and torch.from_numpy(...).to("infini"); .numpy() itself raises TypeError, as on CUDA."""
    x = data(3, 4, dtype=torch.int32)
    numpy = x.to(DEVICE).cpu().numpy()
    same_tensor(torch.from_numpy(numpy).to(DEVICE), x)
    refused(TypeError, "can't convert infini:0 device type tensor to numpy", lambda: x.to(DEVICE).numpy())


@everyday("copies")
def python_values() -> None:
    """item, tolist, bool, int, len, iteration and print."""
    x = torch.tensor([[1.5, -2.0]], device=DEVICE)
    require(x[0, 0].item() == 1.5 and x.tolist() == [[1.5, -2.0]], "item and tolist must give the elements")
    require(bool(x.ne(0).all()) and int(x[0, 1]) == -2 and len(x) == 1, "bool, int and len must work")
    require([row.tolist() for row in x] == [[1.5, -2.0]], "iteration must give rows")
    require(repr(x) == "tensor([[ 1.5000, -2.0000]], device='infini:0')", f"repr must name the device, got {x!r}")


# ---- views ----


@everyday("views")
def reshape_and_transpose() -> None:
    """view, reshape, flatten, squeeze, t, permute and movedim; views share memory."""

    def look(device: str) -> Any:
        x = data(2, 3, 4).to(device)
        return (
            x.view(6, 4),
            x.reshape(4, -1),
            x.flatten(1),
            x[:1].squeeze(0),
            x.transpose(0, 2),
            x.permute(1, 2, 0),
            x.movedim(0, -1).contiguous(),
            x.transpose(1, 2).reshape(2, 12),
        )

    on_both(look)
    x = data(2, 3).to(DEVICE)
    require(x.t().data_ptr() == x.data_ptr() and x.view(6)._is_view(), "views must share memory")


@everyday("views")
def slicing() -> None:
    """Slices with steps, select, narrow and diagonal."""

    def look(device: str) -> Any:
        x = data(5, 6).to(device)
        return x[1:4, ::2], x[:, 3], x.select(0, 2), x.narrow(1, 2, 3), x.diagonal(1), x[..., None, -1], x[2:2]

    on_both(look)


@everyday("views")
def expand_and_split() -> None:
    """expand, broadcast_to, split, chunk, unbind and stack."""

    def look(device: str) -> Any:
        x = data(6, 4).to(device)
        parts = *x.split([1, 2, 3]), *x.chunk(4), *x.unbind(1)
        return x[:, :1].expand(6, 3), torch.broadcast_to(x[0], (2, 3, 4)), *parts, torch.stack(x.unbind(0), 1)

    on_both(look)


@everyday("views")
def strided_views() -> None:
    """as_strided, unfold and memory formats."""

    def look(device: str) -> Any:
        x = data(24).to(device)
        image = x.view(1, 2, 3, 4).contiguous(memory_format=torch.channels_last)
        return x.as_strided((3, 4), (2, 5), 1), x.unfold(0, 5, 3), image, image + 1

    on_both(look)


@everyday("views")
def complex_views() -> None:
    """Conjugate, real, imag, view_as_real and negative views, resolved when they are read."""

    def look(device: str) -> Any:
        x = data(3, 4, dtype=torch.complex64).to(device)
        lazy = x.conj()
        parts = lazy.real, torch.view_as_real(x), lazy.resolve_conj(), lazy.imag.resolve_neg()
        return *parts, lazy @ x.T, x @ x.mH, torch.view_as_complex(data(3, 2).to(device))

    on_both(look)
    lazy = data(3, dtype=torch.complex64).to(DEVICE).conj()
    require(lazy.is_conj(), "conj must stay lazy")
    require(lazy.cpu().resolve_conj().equal(data(3, dtype=torch.complex64).conj().resolve_conj()), "copies of it")


@everyday("views")
def views_as_dtypes() -> None:
    """x.view(dtype) with another element size."""
    on_both(
        lambda d: (data(3, 4).to(d).view(torch.int32), data(3, 4).to(d).view(torch.uint8), data(4).to(d).view(2, 2))
    )


@everyday("views")
def writes_through_views() -> None:
    """A write into a view changes its base, and autograd follows."""

    def write(device: str) -> Any:
        base = data(4, 3).to(device).requires_grad_()
        x = base * 2
        x[1:3].mul_(3)
        x.t()[0].zero_()
        x.sum().backward()
        return x.detach(), base.grad

    on_both(write)
    x = data(4).to(DEVICE)
    view, version = x[1:], x._version
    view.add_(1)
    require(x._version > version, "a view must share the version counter of its base")
    same_tensor(x, torch.cat([data(4)[:1], data(4)[1:] + 1]))
    alias = wrap(unwrap(x))
    alias.zero_()
    require(not x.any(), "wrap(unwrap(x)) must share memory with x")


# ---- indexing ----


@everyday("indexing")
def basic_indexing() -> None:
    """Reads and writes with integers, slices, None and an ellipsis."""

    def use(device: str) -> Any:
        x = data(4, 5, 6).to(device)
        x[1] = 0
        x[..., -1] = torch.arange(5.0, device=device)
        x[0, :, 1:3] += 1
        return x, x[3, None, 2:], x[torch.tensor(2)]

    on_both(use)


@everyday("indexing")
def masks() -> None:
    """Boolean masks: read, assign, masked_fill, masked_select, where, nonzero."""

    def use(device: str) -> Any:
        x = data(5, 6).to(device)
        mask = x > 0
        y = x.clone()
        y[mask] = -1
        filled = x.masked_fill(mask, 9), x.masked_select(mask), torch.where(mask, x, -x)
        return x[mask], y, *filled, mask.nonzero(), *torch.where(mask), x[:, mask[0]]

    on_both(use)


@everyday("indexing")
def index_tensors() -> None:
    """Integer index tensors on infini and on the CPU; index_select, take, accumulating index_put_."""

    def use(device: str) -> Any:
        x = data(5, 6).to(device)
        rows = torch.tensor([0, 3, 3, 1])
        there = rows.to(device)
        y = torch.zeros(5, 6, device=device)
        y.index_put_((there,), x[rows], accumulate=True)
        return (
            x[rows],
            x[there, there.flip(0)],
            x.index_select(1, there),
            x.take(there),
            y,
            y.index_add(0, there, x[rows]),
        )

    on_both(use)


@everyday("indexing")
def gather_and_scatter() -> None:
    """gather, scatter_, scatter_add, scatter_reduce and take_along_dim."""

    def use(device: str) -> Any:
        x, index = (
            data(4, 6).to(device),
            torch.randint(0, 4, (3, 6), generator=torch.Generator().manual_seed(2)).to(device),
        )
        zeros = torch.zeros(4, 6, device=device)
        added = zeros.scatter_add(0, index, x[:3])
        most = zeros.scatter_reduce(0, index, x[:3], "amax", include_self=False)
        return x.gather(0, index), zeros.clone().scatter_(0, index, 5.0), added, most, x.take_along_dim(x.argsort(1), 1)

    on_both(use)


# ---- dtypes ----


@everyday("dtypes")
def integers() -> None:
    """All integer types and bool: arithmetic, shifts, bits and division."""

    def use(device: str) -> Any:
        kinds = torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64
        sums = [data(9, dtype=kind).to(device) * 3 + 1 for kind in kinds]
        a, b = data(9, dtype=torch.int32).to(device), data(9, dtype=torch.int32, seed=2).to(device) + 1
        logic = a & b, a ^ b, a << 2, a // b, a % b, a / b, (a > b) | (a == b)
        return (
            *sums,
            *logic,
            data(4, dtype=torch.bool).to(device).logical_not(),
            torch.tensor([3], dtype=torch.uint16).to(device),
        )

    on_both(use)


@everyday("dtypes")
def half_types() -> None:
    """float16 and bfloat16: arithmetic, products and conversions."""

    def use(device: str) -> Any:
        found: list[torch.Tensor] = []
        for dtype in (torch.float16, torch.bfloat16):
            x = data(7, 8, dtype=dtype).to(device)
            found += [x + 1, x @ x.t(), x.softmax(-1), x.float(), x.sum(), x.double().to(dtype)]
        return found

    on_both(use)


@everyday("dtypes")
def float8() -> None:
    """float8_e4m3fn and float8_e5m2: conversion, copies, views and saving memory."""

    def use(device: str) -> Any:
        found: list[torch.Tensor] = []
        for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
            x = data(6, 4).to(device).to(dtype)
            found += [x, x.float(), x[::2].clone(), x.t().contiguous(), x.view(torch.uint8)]
        return found

    on_both(use)
    require(torch.empty(64, dtype=torch.float8_e5m2, device=DEVICE).untyped_storage().nbytes() == 64, "a byte each")


@everyday("dtypes")
def complex_numbers() -> None:
    """complex64 and complex128: arithmetic, abs, angle, polar, products and gradients."""

    def use(device: str) -> Any:
        x = data(4, 4, dtype=torch.complex64).to(device).requires_grad_()
        (x @ x.conj().t()).abs().sum().backward()
        y = x.detach()
        return x.grad, y * 2j, y.abs(), y.angle(), torch.polar(y.abs(), y.angle()), y.to(torch.complex128).exp()

    on_both(use)


@everyday("dtypes")
def promotion() -> None:
    """Mixed dtypes, Python scalars and 0-dim CPU tensors promote as on the CPU; mixed devices raise."""

    def use(device: str) -> Any:
        x, n = data(3).to(device), data(3, dtype=torch.int32).to(device)
        zero = torch.tensor(2.0, dtype=torch.float64)  # on the CPU, as torch allows for 0-dim tensors
        return x + n, n * 1.5, n + True, x.half() + zero, n / 2, torch.result_type(n, x) is torch.float32, 1 - n

    on_both(use)
    refused(RuntimeError, "Expected all tensors to be on the same device", lambda: data(3).to(DEVICE) + data(3))
