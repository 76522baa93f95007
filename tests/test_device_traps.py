"""The ten ways in which a device that aliases another's memory goes wrong unseen: a test or more for each."""

from __future__ import annotations

import gc
import re
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import torch_infini.device
from support.device_processes import in_process, run_code
from torch_infini.device import unwrap, wrap

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.usefixtures("infini")


# ---- 1: a registered PrivateUse1 takes over torch.accelerator ----


def accelerators() -> tuple[str, bool, str, bool]:
    """The accelerator after the import, and after enable()."""
    import torch_infini.device as device

    before, was_enabled = str(torch.accelerator.current_accelerator()), device.is_enabled()
    device.enable("cpu")
    return before, was_enabled, str(torch.accelerator.current_accelerator()), device.is_enabled()


def test_1_an_import_registers_nothing() -> None:
    assert in_process(accelerators) == ("None", False, "infini", True)


# ---- 2: torch's autoload runs in every `import torch` ----

ENTRY = """
import sys, torch
name = torch._C._get_privateuse1_backend_name()
print(torch.accelerator.current_accelerator(), name, sorted(m for m in sys.modules if m.startswith("torch_infini")))
"""


def entry_point() -> tuple[str, str]:
    """Module and function of the entry point that pyproject.toml declares."""
    text = (ROOT / "pyproject.toml").read_text()
    found = re.search(r'\[project\.entry-points\."torch\.backends"\].*\n\w+ = "([\w.]+):(\w+)"', text)
    assert found, "pyproject.toml must declare the entry point"
    return found[1], found[2]


def test_2_autoload_without_the_variable_does_nothing() -> None:
    """Neither by torch's own loader, where the package is installed, nor by the function itself, in 5 ms."""
    module, function = entry_point()
    assert not module.startswith("torch_infini."), "a module of the package would import the package"
    timed = f"""
import time
start = time.process_time()
import {module}
{module}.{function}()
print(time.process_time() - start)
"""
    done = run_code(ENTRY + timed)
    assert done.returncode == 0, done.stderr
    state, seconds = done.stdout.splitlines()
    accelerator, name, imported = state.split(maxsplit=2)
    assert (accelerator, name) == ("None", "privateuseone")
    assert imported in ("[]", f"['{module}']")
    assert float(seconds) <= 0.005


def test_2_autoload_with_the_variable_enables() -> None:
    module, function = entry_point()
    code = f"import torch, {module}\n{module}.{function}()\nprint(torch.ones(2, device='infini').sum().item())"
    done = run_code(f"{code}\nprint(torch.accelerator.current_accelerator())", TORCH_INFINI_DEVICE="cpu")
    assert done.stdout.splitlines() == ["2.0", "infini"], done.stderr


def test_2_a_wrong_variable_is_named() -> None:
    module, function = entry_point()
    done = run_code(f"import torch, {module}\n{module}.{function}()", TORCH_INFINI_DEVICE="tpu")
    assert done.returncode != 0 and "TORCH_INFINI_DEVICE" in done.stderr and "tpu" in done.stderr, done.stderr


# ---- 3: copies of conjugate and negative views recurse where copy_ is no kernel of its own ----


def conjugate_copies() -> None:
    torch_infini.device.enable("cpu")
    x = torch.randn(3, 4, dtype=torch.complex64)
    want = x.conj().resolve_conj()
    here = x.to("infini")
    for source in (x.conj(), here.conj()):
        assert torch.empty(3, 4, dtype=torch.complex64, device="infini").copy_(source).cpu().equal(want)
        assert torch.empty(3, 4, dtype=torch.complex64).copy_(source).equal(want)
        assert source.to("infini").resolve_conj().cpu().equal(want)
    target = torch.zeros(3, 4, dtype=torch.complex64, device="infini")
    target.conj().copy_(here)
    assert target.cpu().equal(want)
    assert torch.zeros(3, 4, device="infini").copy_(here.conj().imag).cpu().equal(want.imag)


def test_3_copies_of_conjugate_views() -> None:
    in_process(conjugate_copies)


# ---- 4: a host alias that is resized leaves the device's memory dangling ----


def test_4_resizing_an_alias() -> None:
    """Either the alias cannot grow, or both sides see the new memory; what was there stays."""
    x = torch.arange(4.0, device="infini")
    alias = unwrap(x)
    try:
        alias.resize_(1 << 20).fill_(7)
    except RuntimeError as error:
        assert "resiz" in str(error)
    else:
        assert x.data_ptr() == alias.data_ptr()
    gc.collect()
    junk = [torch.full((4,), -1.0) for _ in range(100)]
    assert x.shape == (4,) and (x.tolist() in ([0, 1, 2, 3], [7] * 4)), junk[0]


def test_4_resizing_the_device_tensor() -> None:
    """An op beneath may replace the memory; both sides of the storage follow, views included."""
    x = torch.arange(4.0, device="infini")
    view = x[1:]
    x.resize_(1 << 18)
    x[4:] = 5
    view.mul_(2)
    assert x[:6].tolist() == [0, 2, 4, 6, 5, 5]
    assert unwrap(x).data_ptr() == x.data_ptr() and unwrap(x).untyped_storage().nbytes() >= 4 << 18
    three = view[:3].clone()
    torch.cat([three, three], out=x)
    assert x.tolist() == [2, 4, 6, 2, 4, 6]


# ---- 5: memory of others has no twin ----


def test_5_foreign_memory_is_kept_alive() -> None:
    numpy = torch.arange(6.0).numpy().copy()
    gone = weakref.ref(numpy)
    x = wrap(torch.from_dlpack(numpy))
    numpy[0] = 9
    del numpy
    gc.collect()
    assert gone() is not None and (x + 1).tolist() == [10, 2, 3, 4, 5, 6]
    del x
    gc.collect()
    assert gone() is None, "the memory must be given back"


def test_5_views_of_foreign_memory_share_it() -> None:
    base = torch.arange(12.0).view(3, 4)
    x, y = wrap(base[1:]), wrap(base.t())
    x.zero_()
    assert base[1:].eq(0).all() and y[:, 1:].eq(0).all()
    assert y.stride() == (1, 4) and x.storage_offset() == 4
    assert unwrap(y).data_ptr() == base.data_ptr()


# ---- 6: tensors of two devices ----

MIXED: dict[str, Any] = {
    "add": lambda x, y: x + y,
    "add_": lambda x, y: x.add_(y),
    "reversed": lambda x, y: y + x,
    "matmul": lambda x, y: x @ y,
    "where": lambda x, y: torch.where(x > 0, x, y),
    "cat": lambda x, y: torch.cat([x, y]),
    "stack": lambda x, y: torch.stack([y, x]),
    "out": lambda x, y: torch.mul(x, x, out=y),
    "foreach": lambda x, y: torch._foreach_add([x, x], [y, y]),
    "linear": lambda x, y: F.linear(x, y),
    "rms_norm": lambda x, y: torch.ops.infini.rms_norm(x, y[0], 1e-6),
    "index": lambda x, y: y[x.argmax(0)],
}


@pytest.mark.parametrize("name", MIXED)
def test_6_mixed_devices_are_refused(name: str) -> None:
    x, y = torch.randn(3, 3, device="infini"), torch.randn(3, 3)
    before = y.clone()
    with pytest.raises(
        (RuntimeError, IndexError), match="same device|must be on|should be .* on|indices should be|infini"
    ):
        MIXED[name](x, y)
    assert y.equal(before)


def test_6_what_may_be_on_the_cpu() -> None:
    """0-dim tensors beside others, and index tensors, as on CUDA."""
    x = torch.arange(6.0, device="infini").view(3, 2)
    assert (x * torch.tensor(2.0)).sum().item() == 30
    assert (torch.tensor(1) - x).device.type == "infini"
    assert x[torch.tensor([2, 0])].tolist() == [[4, 5], [0, 1]]
    x[torch.tensor([True, False, False])] = torch.tensor(7.0)
    assert x.tolist() == [[7, 7], [2, 3], [4, 5]]


# ---- 7: devices and generators that are not there ----


@pytest.mark.parametrize(
    "call",
    [
        lambda: torch.empty(2, device="infini:1"),
        lambda: torch.ones(2).to("infini:7"),
        lambda: torch.ones(2, device="infini").to("infini:1"),
        lambda: torch.arange(3, device=torch.device("infini", 2)),
        lambda: torch.accelerator.set_device_index(1),
        lambda: torch.Generator("infini:1"),
        lambda: torch.Stream("infini:1"),
    ],
)
def test_7_indices_out_of_range(call: Any) -> None:
    with pytest.raises((RuntimeError, IndexError), match="out of range|invalid device"):
        call()


def test_7_generators_of_another_device() -> None:
    wrong = torch.Generator().manual_seed(1)
    for call in (
        lambda: torch.rand(2, device="infini", generator=wrong),
        lambda: torch.empty(2, device="infini").normal_(generator=wrong),
        lambda: torch.rand(2, generator=torch.Generator("infini")),
        lambda: torch.ones(4, device="infini").multinomial(2, generator=wrong),
    ):
        with pytest.raises(RuntimeError, match="device type for generator|all tensors to be on the same device"):
            call()


# ---- 8: what torch chooses by device type, not by kernel ----


def test_8_kernels_chosen_by_device_type() -> None:
    """Convolution, LSTM, GRU and attention: forward and backward."""

    def gradients(device: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        x = torch.randn(2, 4, 6, 6).to(device).requires_grad_()
        conv = torch.nn.Conv2d(4, 4, 3, padding=1, bias=False).to(device)
        rnn = [kind(6, 6, batch_first=True).to(device) for kind in (torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN)]
        y = conv(x)
        y = F.scaled_dot_product_attention(y, y, y, is_causal=True)
        for layer in rnn:
            y = y + layer(y.flatten(0, 1))[0].view(y.shape)
        y.sum().backward()
        parameters = [p for layer in (conv, *rnn) for p in layer.parameters()]
        assert x.grad is not None
        return [y.detach(), x.grad, *(p.grad for p in parameters if p.grad is not None)]

    for got, want in zip(gradients("infini"), gradients("cpu"), strict=True):
        assert got.device.type == "infini"
        torch.testing.assert_close(got.cpu(), want)  # torch's CPU and device forms of an LSTM add in another order


# ---- 9: generator=None means the device's own ----


def test_9_manual_seed_reaches_the_device() -> None:
    torch.manual_seed(3)
    on_cpu = torch.randn(9)
    first = torch.randn(9, device="infini")
    torch.randn(100)  # the CPU's own generator is another
    second = torch.randn(9, device="infini")
    torch.manual_seed(3)
    assert torch.randn(9, device="infini").equal(first) and torch.randn(9, device="infini").equal(second)
    assert first.cpu().equal(on_cpu), "the same numbers as the CPU's from the same seed"
    torch.get_device_module("infini").manual_seed(3)
    assert torch.randn(9, device="infini").equal(first)


def test_9_drawing_leaves_the_cpu_generator() -> None:
    state = torch.get_rng_state()
    F.dropout(torch.ones(50, device="infini"))
    torch.randperm(9, device="infini")
    assert torch.get_rng_state().equal(state)


# ---- 10: tensors without memory, and lists that are copied ----


def zero_tensors() -> None:
    torch_infini.device.enable("cpu")
    x = torch.randn(4, device="infini", requires_grad=True)
    (x.sgn() * 3).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [0] * 4
    z = torch._efficientzerotensor((3,), device="infini")
    assert (z + 1).tolist() == [1] * 3 and z.clone().tolist() == [0] * 3
    assert torch.ones(3, device="infini").copy_(z).tolist() == [0] * 3 and torch.ones(3).copy_(z).tolist() == [0] * 3
    primal, tangent = torch.ones(3, device="infini"), torch.ones(3, device="infini")
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(primal, tangent)
        assert torch.autograd.forward_ad.unpack_dual(dual * torch.arange(3.0, device="infini")).tangent.tolist() == [
            0,
            1,
            2,
        ]
    for _ in range(50):
        with pytest.raises(RuntimeError):
            torch.cat([torch.ones(2, device="infini"), torch.ones(2), torch.ones(2, device="infini")])
    assert torch.cat([torch.ones(2, device="infini"), torch.ones(2, device="infini")[:0]]).tolist() == [1, 1]


def test_10_zero_tensors_and_lists() -> None:
    in_process(zero_tensors)
