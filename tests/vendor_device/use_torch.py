"""The vendor's device as torch's device infini: memory, kernels, what it has none for, a model, training.

Run by tests/test_vendor_device.py in a separate process, with TORCH_INFINI_DEVICE naming the library: use_torch.py
"""

from __future__ import annotations

import ctypes
import gc
import io
import os
from multiprocessing.reduction import ForkingPickler

import torch
from torch import Tensor, nn

import torch_infini
import torch_infini.device
from torch_infini import LLM, SamplingParams
from torch_infini.demo import MODEL
from torch_infini.testing.checkpoints import random_model

QY = 9


def raised(error: type[BaseException], function: object, *arguments: object) -> str:
    assert callable(function)
    try:
        function(*arguments)
    except error as caught:
        return str(caught)
    raise AssertionError(f"{error.__name__} was not raised")


def main() -> None:
    torch_infini.device.enable()
    vendor = ctypes.CDLL(os.environ["TORCH_INFINI_DEVICE"])
    vendor.qy_last_kernel.restype = ctypes.c_char_p
    vendor.qy_owns.restype = ctypes.c_bool

    def in_vendor_memory(x: Tensor) -> bool:
        owns: bool = vendor.qy_owns(ctypes.c_void_p(x.data_ptr()))
        return owns

    assert torch_infini.device.backing() == "cpu" and torch_infini.device.vendor_device() == "qy"
    assert torch.infini.get_device_name() == "infini (qy)" and torch.accelerator.current_accelerator().type == "infini"
    assert not in_vendor_memory(torch.randn(8))

    # Memory: what is made, copied, computed by torch's kernels and by torch's compositions, resized.
    x, w = torch.randn(5, 8), torch.rand(8)
    there, weight = x.to("infini"), w.to("infini")
    made = [there, torch.zeros(7, device="infini"), there @ there.T, there.softmax(-1), torch.cat([there, there])]
    made += [nn.functional.conv1d(there[None], torch.randn(2, 5, 3).to("infini")), there.new_empty(3).resize_(100)]
    made += [nn.functional.scaled_dot_product_attention(*[there[None, None]] * 3), there.sort().values]
    made += [torch.randperm(10, device="infini"), torch.add(there, 1, out=torch.empty(0, device="infini"))]
    assert all(map(in_vendor_memory, made)), [in_vendor_memory(y) for y in made]
    assert torch.equal((there @ there.T).cpu(), x @ x.T) and torch.equal(torch_infini.device.unwrap(there), x)

    # Its kernels, in each form; the formula in float64, and one rounding of y.
    expected = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-5) * w.double()
    out = torch.empty_like(there)
    torch.ops.infini.rms_norm.out(there, weight, 1e-5, out=out)
    in_place = there.clone()
    torch.ops.infini.rms_norm_(in_place, weight, 1e-5)
    for y in (torch.ops.infini.rms_norm(there, weight, 1e-5), out, in_place):
        torch.testing.assert_close(y.cpu().double(), expected, rtol=2**-22, atol=1e-30)
        assert in_vendor_memory(y)
    assert vendor.qy_last_kernel() == b"rms_norm" and vendor.qy_last_device() == 100 * QY
    assert torch.equal(torch.ops.infini.add(there, there).cpu(), x + x) and vendor.qy_last_kernel() == b"add"
    # Those of the CPU's tensors stay the CPU's.
    torch.ops.infini.rms_norm(x, w, 1e-5)
    assert vendor.qy_last_kernel() == b"add"
    # The rules of the op.
    assert "weight must have" in raised(RuntimeError, torch.ops.infini.rms_norm, there, weight[:3], 1e-5)

    # An op that it has no kernel for, or none for the dtype: the CPU's, counted; or an error.
    torch_infini.device.fallback_report(clear=True)
    assert torch.equal(torch.ops.infini.silu(there).cpu(), torch.ops.infini.silu(x))
    torch.ops.infini.rms_norm(there, weight, 1e-5)
    half = there.bfloat16()
    assert torch.equal(torch.ops.infini.add(half, half).cpu(), (x + x).bfloat16())
    report = torch_infini.device.fallback_report()
    assert report["infini::add"] == 1, report
    assert report["infini::silu"] == 1 and "infini::rms_norm" not in report, report
    with torch_infini.device.fallback("error"):
        assert "silu" in raised(RuntimeError, torch.ops.infini.silu, there)
        assert "qy::add: tensors must be float32" in raised(RuntimeError, torch.ops.infini.add, half, half)
        torch.ops.infini.rms_norm(there, weight, 1e-5)
    assert "in the memory of the vendor's device" in raised(NotImplementedError, torch_infini.device.wrap, x)
    assert in_vendor_memory(torch_infini.device.wrap(torch_infini.device.unwrap(there)))

    assert "send tensor.cpu()" in raised(NotImplementedError, ForkingPickler.dumps, there)

    # Gradients, also through views on the CPU; saving.
    leaf = there.clone().requires_grad_()
    (torch_infini.device.unwrap(leaf) * 3).sum().backward()
    assert leaf.grad is not None and torch.equal(leaf.grad.cpu(), torch.full_like(x, 3)) and in_vendor_memory(leaf.grad)
    file = io.BytesIO()
    torch.save(there, file)
    file.seek(0)
    assert torch.equal(torch.load(file), there) and in_vendor_memory(torch.load(io.BytesIO(file.getvalue())))
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1))
    losses = []
    for device in ("cpu", "infini"):
        trained = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1))
        trained.load_state_dict(layers.state_dict())
        trained.to(device)
        optimizer = torch.optim.AdamW(trained.parameters())
        for _ in range(5):
            loss = trained(x.to(device)).square().sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    assert losses[0] == losses[1]

    # A model, patched: the vendor's norms, the same tokens.
    model = random_model("llama")
    ids = torch.randint(0, model.config.vocab_size, (2, 9))
    tokens = model.generate(ids, max_new_tokens=8, do_sample=False)
    model.to("infini")
    torch_infini.patch_model(model)
    torch_infini.device.fallback_report(clear=True)
    assert torch.equal(model.generate(ids.to("infini"), max_new_tokens=8, do_sample=False).cpu(), tokens)
    assert vendor.qy_last_kernel() in (b"rms_norm", b"add")
    assert not {"infini::rms_norm", "infini::add_rms_norm"} & torch_infini.device.fallback_report().keys()

    # The engine, whose steps are recorded programs of calls.
    prompts, greedy = ["A class definition"], SamplingParams(temperature=0, max_tokens=12)
    texts = []
    for device in ("cpu", "infini"):
        llm = LLM(MODEL, device=device, dtype=torch.float32)
        torch_infini.device.fallback_report(clear=True)
        texts.append(llm.generate(prompts, greedy)[0].text)
    assert texts[0] == texts[1] != ""
    report = torch_infini.device.fallback_report()
    assert "infini::add_rms_norm" not in report and any(count >= 12 for count in report.values()), report

    # Everything is given back.
    gc.collect()
    live = vendor.qy_live()
    for _ in range(100):
        torch.ops.infini.rms_norm(there, weight, 1e-5).softmax(-1).sum().item()
    gc.collect()
    assert vendor.qy_live() == live > 0
    print("fine")


if __name__ == "__main__":
    main()
