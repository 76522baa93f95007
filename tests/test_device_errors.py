"""Bad input to the device infini: torch's own types of exception, and a sentence that says what to do."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest
import torch

import torch_infini
from support.device_processes import in_process
from torch_infini import device

pytestmark = pytest.mark.usefixtures("infini")


def raised(function: Any, *arguments: Any) -> tuple[str, str]:
    """The name of the exception's type, and its message; "" where nothing is raised."""
    try:
        function(*arguments)
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


# ---- enable ----


def enable_beside_another() -> tuple[str, str]:
    torch.utils.rename_privateuse1_backend("npu")
    return raised(device.enable, "cpu")


def test_a_second_backend() -> None:
    kind, message = in_process(enable_beside_another)
    assert kind == "RuntimeError" and "npu" in message and "TORCH_INFINI_DEVICE" in message, message


def enable_on_another_torch() -> tuple[str, str]:
    torch.__version__ = "9.87.0+cpu"
    return raised(device.enable, "cpu")


def test_another_torch_than_built_for() -> None:
    kind, message = in_process(enable_on_another_torch)
    built = ".".join(torch.__version__.split(".")[:2])
    assert kind == "ImportError" and "9.87" in message and built in message, message
    assert "pip install --no-build-isolation --force-reinstall --no-deps" in message


def enable_without_cuda() -> list[tuple[str, str]]:
    return [raised(device.enable, "cuda"), raised(device.enable, "tpu")]


def test_backings_that_are_not_there() -> None:
    cuda, tpu = in_process(enable_without_cuda)
    if not torch.cuda.is_available():
        assert cuda[0] == "RuntimeError" and "cuda" in cuda[1].lower(), cuda
    assert tpu[0] == "ValueError" and "'tpu'" in tpu[1] and "cpu" in tpu[1], tpu


def not_enabled() -> list[tuple[str, str]]:
    return [raised(device.wrap, torch.ones(2)), raised(device.unwrap, torch.ones(2)), raised(device.backing)]


def test_before_enable() -> None:
    for kind, message in in_process(not_enabled):
        assert kind == "RuntimeError" and "enable" in message, (kind, message)


def test_enable_twice() -> None:
    device.enable("cpu")
    device.enable()
    assert device.is_enabled() and device.backing() == "cpu"
    with pytest.raises(RuntimeError, match="cpu"):
        device.enable("cuda")


# ---- tensors ----


def test_wrap_and_unwrap() -> None:
    with pytest.raises((TypeError, RuntimeError), match="tensor|Tensor"):
        device.wrap([1, 2])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="must be on infini, got one on cpu"):
        device.unwrap(torch.ones(2))
    with pytest.raises(TypeError, match="must be on cpu, the backing device, got one on meta"):
        device.wrap(torch.ones(2, device="meta"))


def test_out_of_memory() -> None:
    """The bytes that were asked for, and the bytes that are free, in an exception of torch's own type."""
    with pytest.raises(torch.OutOfMemoryError) as caught:
        torch.empty(1 << 48, device="infini")
    message = str(caught.value)
    assert re.search(r"1125899906842624|1024\.00 TiB|1\.00 PiB|1048576\.00 GiB", message) and "free" in message, message
    assert torch.ones(3, device="infini").sum().item() == 3


def test_numpy() -> None:
    with pytest.raises(TypeError, match="Tensor.cpu\\(\\)"):
        torch.ones(2, device="infini").numpy()


def test_errors_of_ops_are_torchs_own() -> None:
    """What a CPU kernel refuses comes through as it is, and the device works on."""
    x = torch.ones(2, 3, device="infini")
    for call in (
        lambda t: t @ t,
        lambda t: t.view(7),
        lambda t: t[5],
        lambda t: torch.linalg.cholesky(-torch.eye(3, device=t.device)),
        lambda t: t.int().uniform_(),
        lambda t: torch.ops.infini.rms_norm(t, torch.ones(5, device=t.device), 1e-6),
    ):
        assert raised(call, x) == raised(call, x.cpu()) != ("", "")
    assert (x + 1).sum().item() == 12


QUANTIZED = (0.1, 0, torch.qint8)


def sparse_gradient() -> None:
    table = torch.nn.Embedding(5, 3, sparse=True).to("infini")
    table(torch.tensor([1, 2], device="infini")).sum().backward()


@pytest.mark.parametrize(
    "call",
    [
        lambda: torch.eye(3).to_sparse().to("infini"),
        lambda: torch.eye(3).to_sparse_csr().to("infini"),
        lambda: torch.eye(3).to_sparse_csc().to("infini"),
        lambda: torch.eye(4).to_sparse_bsr((2, 2)).to("infini"),
        lambda: torch.eye(3, device="infini").to_sparse(),
        lambda: torch.empty(3, 3, layout=torch.sparse_coo, device="infini"),
        lambda: torch.empty(3, 3, device="infini").copy_(torch.eye(3).to_sparse()),
        lambda: torch.sparse_coo_tensor(torch.tensor([[0], [1]]), torch.ones(1), (2, 2), device="infini"),
        lambda: torch.sparse_csr_tensor([0, 1], [0], [1.0], (1, 1), device="infini"),
        lambda: torch.sparse.mm(torch.eye(3).to_sparse(), torch.eye(3, device="infini")),
        sparse_gradient,
        lambda: torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)], device="infini").unbind(),
        lambda: torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)]).to("infini"),
        lambda: torch.quantize_per_tensor(torch.ones(3), *QUANTIZED).to("infini"),
        lambda: torch.quantize_per_tensor(torch.ones(3, device="infini"), *QUANTIZED),
        lambda: torch.empty(3, device="infini").copy_(torch.quantize_per_tensor(torch.ones(3), *QUANTIZED)),
    ],
)
def test_tensors_that_are_not_dense(call: Any) -> None:
    """One sentence instead of the dispatcher's list of all backends."""
    kind, message = raised(call)
    assert kind == "NotImplementedError" and message.startswith("infini: the device has dense strided tensors only, ")
    assert "\n" not in message and ("unwrap" in message or "got layout" in message), message


def test_nested_tensors_that_are_jagged() -> None:
    """Those are made of dense ones, and work."""
    parts = [torch.randn(2, 3), torch.randn(4, 3)]
    x = torch.nested.nested_tensor(parts, layout=torch.jagged)
    assert torch.equal((x.to("infini") * 2).values().cpu(), (x * 2).values())


def test_flex_attention() -> None:
    """Torch's own sentence, eager and compiled: it knows the devices by name."""
    from torch.nn.attention.flex_attention import flex_attention

    q = torch.randn(1, 2, 16, 8, device="infini")
    for function in (flex_attention, torch.compile(flex_attention)):
        with pytest.raises(ValueError, match="FlexAttention is only supported on .*infini") as caught:
            function(q, q, q)
        assert "\n" not in str(caught.value)


# ---- fallback ----


def test_fallback_modes() -> None:
    x = torch.ones(4, 8, device="infini")
    weight = torch.ones(8, device="infini")
    with device.fallback("error"):
        torch.ops.infini.rms_norm(x, weight, 1e-6)
        with pytest.raises(NotImplementedError, match="aten::cosh"):
            x.cosh()
    with device.fallback("warn"), pytest.warns(UserWarning, match="aten::cosh"):
        x.cosh()
    before = device.fallback_report().get("aten::cosh", 0)
    x.cosh()
    x.cosh()
    report = device.fallback_report()
    assert report["aten::cosh"] == before + 2 and not any(name.startswith("infini::") for name in report)
    with pytest.raises(ValueError, match="allow, warn, error, got 'never'"):
        device.fallback("never")  # type: ignore[arg-type]


# ---- processes ----


def test_fork() -> None:
    """On the backing device cpu a forked child computes, and its parent too afterwards."""
    x = torch.arange(4.0, device="infini")
    child = os.fork()
    if child == 0:
        ok = (x + torch.ones(4, device="infini")).tolist() == [1, 2, 3, 4]
        os._exit(0 if ok else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert (x + 1).tolist() == [1, 2, 3, 4]


def received(x: torch.Tensor) -> list[float]:
    return torch_infini.ops.softmax(x * 0).tolist()


def enabled_and_received(values: list[float]) -> list[float]:
    device.enable("cpu")
    return received(torch.tensor(values, device="infini"))


def test_spawn() -> None:
    assert in_process(enabled_and_received, [1.0, 2.0]) == [0.5, 0.5]
