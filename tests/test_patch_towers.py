"""patch_model on models that read images: their towers compute by our ops too, where a trial agrees.

Of each family: logits and tokens with images before and after, copies, gradients, and what is left with its reason.
"""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torch_infini
from support.image_models import GEMMA3, IMAGE_FAMILIES, LLAVA, QWEN2_5_VL, ImageFamily
from torch_infini import PatchReport
from torch_infini.engine.images import ImageReader
from torch_infini.patch import towers
from torch_infini.patch.decoder import find_decoder
from torch_infini.patch.layers.interface_attention import INTERFACE
from torch_infini.patch.swap import Patched

pytest.importorskip("transformers")
Image = pytest.importorskip("PIL.Image")

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore::UserWarning")]
EVERY = pytest.mark.parametrize("family", IMAGE_FAMILIES, ids=lambda family: family.kind)


def inputs_of(family: ImageFamily, folder: Path) -> dict[str, Tensor]:
    """What the family's processor makes of a text with two images."""
    family.save_processor(folder)
    generator = torch.Generator().manual_seed(0)

    def image(width: int, height: int) -> Any:
        pixels = torch.randint(0, 256, (height * width * 3,), generator=generator, dtype=torch.uint8)
        return Image.frombytes("RGB", (width, height), bytes(pixels.tolist()))

    text = f"first {family.image_mark} and {family.image_mark}."
    tokens = ImageReader(folder).read(text, [image(60, 90), image(120, 40)])
    ids = torch.tensor([list(tokens)])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **tokens.inputs}


def logits(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(**inputs, use_cache=False).logits
    return found


def tower_of(model: Any) -> nn.Module:
    found = find_decoder(model)
    assert found is not None
    (tower,) = towers.towers_of(model, found[1])
    return tower.module


def in_tower(model: Any, report: PatchReport) -> list[str]:
    """The ops of the replaced modules in the tower."""
    names = {id(module): name for name, module in model.named_modules()}
    prefix = names[id(tower_of(model))] + "."
    return sorted(row.op for row in report.replaced if row.name.startswith(prefix))


def close(found: Tensor, expected: Tensor, tolerance: float = 2e-5) -> None:
    assert found.dtype == expected.dtype
    assert (found.float() - expected.float()).norm() <= tolerance * expected.float().norm()


@EVERY
def test_images(family: ImageFamily, tmp_path: Path) -> None:
    """Logits are those of before within rounding, tokens the same; unpatched, they are equal to the bit."""
    model, inputs = family.build(), inputs_of(family, tmp_path)
    before = logits(model, inputs)
    settings = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    expected = model.generate(**inputs, **settings)
    kinds = [type(module) for module in model.modules()]
    config = tower_of(model).config
    report = torch_infini.patch_model(model)
    ops = in_tower(model, report)
    assert "attention" in ops and {"layer_norm", "rms_norm"} & set(ops) and not report.towers_left
    assert tower_of(model).config._attn_implementation == "infini" and config._attn_implementation == "sdpa"
    close(logits(model, inputs), before)
    assert torch.equal(model.generate(**inputs, **settings), expected)
    patched = logits(model, inputs)
    fresh = family.build()  # transformers' hooks of a model that was called cannot be pickled
    torch_infini.patch_model(fresh)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(fresh))):
        assert torch.equal(logits(other, inputs), patched)
        torch_infini.unpatch_model(other)
        assert torch.equal(logits(other, inputs), before)
    torch_infini.unpatch_model(model)
    assert [type(module) for module in model.modules()] == kinds and tower_of(model).config is config
    assert torch.equal(logits(model, inputs), before)


@EVERY
def test_half_precision(family: ImageFamily, tmp_path: Path) -> None:
    """No further from the logits in float32 than transformers' own."""
    inputs = inputs_of(family, tmp_path)
    exact = logits(family.build(), inputs)
    model = family.build(torch.bfloat16)
    own = (logits(model, inputs).float() - exact).norm()
    assert "attention" in in_tower(model, torch_infini.patch_model(model))
    assert (logits(model, inputs).float() - exact).norm() <= 1.2 * own


def test_hooks_and_gradients(tmp_path: Path) -> None:
    """Hooks of a tower's modules see what they saw, and training goes through the original forward."""
    model, inputs = QWEN2_5_VL.build(), inputs_of(QWEN2_5_VL, tmp_path)
    mlp = tower_of(model).blocks[0].mlp  # type: ignore[union-attr, index]
    seen: list[Tensor] = []
    handle = mlp.up_proj.register_forward_hook(lambda module, args, output: seen.append(output))
    logits(model, inputs)
    model(**inputs, use_cache=False).logits.sum().backward()
    expected = mlp.up_proj.weight.grad.clone()
    model.zero_grad()
    report = torch_infini.patch_model(model)
    assert isinstance(mlp, Patched) and "fused_linear, swiglu, linear" in in_tower(model, report)
    logits(model, inputs)
    model(**inputs, use_cache=False).logits.sum().backward()
    handle.remove()
    assert len(seen) == 4 and all(torch.equal(one, seen[0]) or (one - seen[0]).norm() < 1e-5 for one in seen)
    close(mlp.up_proj.weight.grad, expected, 1e-4)


def test_quantized_weights_are_the_decoders(tmp_path: Path) -> None:
    model, inputs = LLAVA.build(), inputs_of(LLAVA, tmp_path)
    with torch.no_grad():
        before = model.get_image_features(inputs["pixel_values"]).pooler_output
    weights = {name: p.clone() for name, p in tower_of(model).named_parameters()}
    torch_infini.patch_model(model, weights="int8")
    assert all(torch.equal(p, weights[name]) for name, p in tower_of(model).named_parameters())
    with torch.no_grad():
        after = model.get_image_features(inputs["pixel_values"]).pooler_output
    for one, other in zip(after, before, strict=True):
        close(one, other)


def test_selection(tmp_path: Path) -> None:
    model = GEMMA3.build()
    report = torch_infini.patch_model(model, skip=["*vision_tower*"])
    assert in_tower(model, report) == [] and tower_of(model).config._attn_implementation == "sdpa"
    torch_infini.unpatch_model(model)
    report = torch_infini.patch_model(model, skip=["*vision_tower*layers.1.self_attn"])
    assert set(in_tower(model, report)) == {"layer_norm"}  # one config names the attention of both layers
    torch_infini.unpatch_model(model)
    report = torch_infini.patch_model(model, only=["*vision_tower*norm*"])
    assert set(in_tower(model, report)) == {"layer_norm"}


def scaled_for_ours(forward: Callable[..., Any]) -> Callable[..., Any]:
    def changed(self: Any, *args: Any, **more: Any) -> Any:
        y, weights = forward(self, *args, **more)
        return (y * 1.5 if self.config._attn_implementation == "infini" else y), weights

    return changed


def raising_for_ours(forward: Callable[..., Any]) -> Callable[..., Any]:
    def changed(self: Any, *args: Any, **more: Any) -> Any:
        if self.config._attn_implementation == "infini":
            raise KeyError("cu_seqlens")
        return forward(self, *args, **more)

    return changed


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (scaled_for_ours, r"patched, its first layer differs by \S+ \(root mean square\), and rounding explains"),
        (raising_for_ours, "patched, its first layer does not run: KeyError: 'cu_seqlens'"),
    ],
)
def test_a_tower_that_computes_something_else(
    change: Callable[..., Any], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is left as it was, and the report says why; the decoder is patched all the same."""
    model, inputs = LLAVA.build(), inputs_of(LLAVA, tmp_path)
    before = logits(model, inputs)
    kind = type(tower_of(model).encoder.layers[0].self_attn)  # type: ignore[union-attr, index]
    changed = change(kind.forward)
    # By this name in its code it is known to call transformers' attention interface.
    changed.__code__ = changed.__code__.replace(co_names=(*changed.__code__.co_names, INTERFACE))
    monkeypatch.setattr(kind, "forward", changed)
    tower = tower_of(model)
    parts = [type(module) for module in tower.modules()]
    report = torch_infini.patch_model(model)
    ((name, found),) = report.towers_left
    assert name == "model.vision_tower" and re.match(reason, found), found
    assert f"{name} stays as it was: {found}" in str(report) and report.replaced
    assert [type(module) for module in tower.modules()] == parts and tower.config._attn_implementation == "sdpa"
    close(logits(model, inputs), before)


def test_a_tower_with_other_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    model = LLAVA.build()

    def forward(self: Any, sound: Tensor, **more: Any) -> Any:
        raise AssertionError

    monkeypatch.setattr(type(tower_of(model)), "forward", forward)
    report = torch_infini.patch_model(model)
    assert report.towers_left == (("model.vision_tower", "its inputs are of no known form"),)
    assert not report.left and report.replaced


def test_a_tower_with_another_config() -> None:
    """What is said of its input is no number: the report has the reason, and nothing is raised."""
    model = LLAVA.build()
    vars(tower_of(model).config)["patch_size"] = {"height": 14}
    report = torch_infini.patch_model(model)
    ((name, reason),) = report.towers_left
    assert name == "model.vision_tower" and reason.startswith("an image of noise could not be tried: TypeError")
    assert not report.left and report.replaced
