"""patch_model on the device infini: for every family the modules, tokens and bits of the CPU, and no weight copied."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from torch_infini.device import unwrap, wrap
from torch_infini.nn import Linear
from torch_infini.patch import load_patched, patch_model, patched, save_patched, unpatch_model
from torch_infini.testing.patched_families import FAMILIES, Family, logits, prompts
from torch_infini.weights import FORMATS

pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("infini", "one_thread")

LLAMA = FAMILIES[0]
NEW = 16


def generated(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Greedy tokens behind 4 prompts, the second of them padded."""
    mask = torch.ones_like(ids[:4])
    mask[1, :7] = 0
    settings = {"attention_mask": mask.to(model.device), "max_new_tokens": NEW, "do_sample": False}
    made: torch.Tensor = model.generate(ids[:4].masked_fill(mask == 0, 0).to(model.device), **settings)
    return made.cpu()


@pytest.mark.full(beyond=12)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_families(family: Family, dtype: torch.dtype) -> None:
    """The same report, bits and tokens as on the CPU."""
    model, ids = family.build(dtype), prompts()
    there = copy.deepcopy(model).to("infini")
    patch = patch_model(model)
    report = patch_model(there)
    assert [(row.name, row.op, row.reason) for row in report.rows] == [(r.name, r.op, r.reason) for r in patch.rows]
    assert len(report.replaced) == sum(family.sites.values()) and report.products == patch.products
    assert torch.equal(logits(there, ids.to("infini")).cpu(), logits(model, ids))
    assert torch.equal(generated(there, ids), generated(model, ids))


def count_ops(function: Any) -> dict[str, int]:
    """How often each op of infini ran on the device."""
    from torch.utils._python_dispatch import TorchDispatchMode

    counts: dict[str, int] = {}

    class Counter(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.namespace == "infini":
                counts[func._schema.name] = counts.get(func._schema.name, 0) + 1
            return func(*args, **(kwargs or {}))

    with Counter():
        function()
    return counts


def test_the_same_ops_run() -> None:
    model, ids = LLAMA.build(), prompts()
    there = copy.deepcopy(model).to("infini")
    with patched(model), patched(there):
        expected = count_ops(lambda: generated(model, ids))
        assert expected and count_ops(lambda: generated(there, ids)) == expected
    assert count_ops(lambda: generated(there, ids)) == {}


def test_weights_stay_where_they_are() -> None:
    """Patching and running copy no weight: the memory is the one that the model had on the CPU before."""
    model = LLAMA.build()
    before = {name: p.data_ptr() for name, p in model.named_parameters()}
    model._apply(wrap)
    report = patch_model(model)
    assert report.replaced and not report.left
    after = {name: p.data_ptr() for name, p in model.named_parameters() if before[name] % 64 == 0}
    assert after == {name: before[name] for name in after} and after
    assert all(unwrap(p.data).data_ptr() == p.data_ptr() for p in model.parameters())
    assert logits(model, prompts().to("infini")).device.type == "infini"


def test_misaligned_weights_are_moved() -> None:
    """As on the CPU: a weight off a cache line, as files are mapped, is copied to one, on infini."""
    model, ids = LLAMA.build().to("infini"), prompts().to("infini")
    linear = model.get_submodule("model.layers.0.mlp.up_proj")
    weight = linear.weight.data.cpu()
    memory = bytearray(weight.nbytes + 128)
    odd = torch.frombuffer(memory, dtype=torch.uint8)
    start = (4 - odd.data_ptr()) % 64
    mapped = torch.frombuffer(memory, dtype=torch.float32, offset=start, count=weight.numel()).view(weight.shape)
    linear.weight.data = wrap(mapped.copy_(weight))
    assert linear.weight.data_ptr() % 64 == 4
    assert patch_model(model).replaced
    assert mapped.untyped_storage().nbytes() == weight.nbytes  # else it would be a part of another's memory
    assert linear.weight.data_ptr() % 64 == 0 and linear.weight.device.type == "infini"
    assert torch.equal(linear.weight.cpu(), weight) and logits(model, ids).isfinite().all()


@pytest.mark.parametrize("weights", ["int8", "int4", "int8_rows", "int4_groups", "auto:6"])
def test_quantized(weights: Any) -> None:
    model, ids = LLAMA.build(torch.bfloat16), prompts()
    there = copy.deepcopy(model).to("infini")
    patch_model(model, weights=weights)
    report = patch_model(there, weights=weights)
    assert {row.op for row in report.replaced} & {f"linear_{name}" for name in FORMATS}
    assert torch.equal(logits(there, ids.to("infini")).cpu(), logits(model, ids))


def test_moving_a_patched_model() -> None:
    model, ids = LLAMA.build(), prompts()
    original = logits(model, ids)
    patch_model(model)
    expected = logits(model, ids)
    model.to("infini")
    assert torch.equal(logits(model, ids.to("infini")).cpu(), expected)
    model.to("cpu")
    assert torch.equal(logits(model, ids), expected)
    model.to("infini")
    unpatch_model(model)
    assert torch.equal(logits(model, ids.to("infini")).cpu(), original)


def test_saving(tmp_path: Path) -> None:
    model, ids = LLAMA.build(), prompts()
    model.to("infini")
    patch_model(model)
    expected = logits(model, ids.to("infini")).cpu()
    save_patched(model, tmp_path)
    loaded = load_patched(tmp_path)
    assert torch.equal(logits(loaded, ids), expected)
    assert torch.equal(logits(loaded.to("infini"), ids.to("infini")).cpu(), expected)


def test_autocast_and_gradients_take_the_original() -> None:
    """As on the CPU: a patched module computes neither under autocast nor where a gradient is wanted."""
    model, ids = LLAMA.build(), prompts().to("infini")
    model.to("infini")
    patch_model(model)

    def under_autocast() -> None:
        with torch.autocast("infini", dtype=torch.bfloat16), torch.no_grad():
            model(ids)

    assert count_ops(under_autocast) == {}
    loss: list[torch.Tensor] = []
    assert count_ops(lambda: loss.append(model(ids, labels=ids).loss)) == {}
    loss[0].backward()
    gradients = [p.grad for p in model.parameters()]
    model.zero_grad()
    unpatch_model(model)
    model(ids, labels=ids).loss.backward()
    assert all(torch.equal(a, p.grad) for a, p in zip(gradients, model.parameters(), strict=True))


def test_packed_weights() -> None:
    """nn.Linear packs on infini as on the CPU, in place, and its bits are the same."""
    weight, x = torch.randn(100, 64, dtype=torch.bfloat16), torch.randn(3, 64, dtype=torch.bfloat16)
    layers = [Linear(64, 100, format="packed", dtype=torch.bfloat16, device=device) for device in ("cpu", "infini")]
    for layer in layers:
        layer.load(weight.to(layer.weight.device))
    here, there = layers
    assert there.format == "packed" and torch.equal(there.weight.cpu(), here.weight)
    assert torch.equal(there(x.to("infini")).cpu(), here(x))
    assert torch.equal(there.dense().cpu(), weight)
    assert there.to("cpu").format == "packed" and torch.equal(there(x), here(x))


def test_from_pretrained_and_back(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model, ids = LLAMA.build(), prompts()
    expected = logits(model, ids)
    model.to("infini").save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, device_map="infini")
    assert {p.device.type for p in loaded.parameters()} == {"infini"}
    assert torch.equal(logits(loaded, ids.to("infini")).cpu(), expected)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32])
def test_histogram(dtype: torch.dtype) -> None:
    """Mixtures of experts count integers with histc on devices other than the CPU."""
    x = torch.tensor([0, 3, 3, 1, 2, 3, 7])
    made = torch.histc(x.to("infini", dtype), bins=4, min=0, max=3)
    assert made.dtype == dtype and made.tolist() == [1, 1, 1, 3]
