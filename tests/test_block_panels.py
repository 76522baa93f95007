"""Blocks in panels of 16 rows: models hold them so where that is faster, files do not, and no row depends on others."""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import torch_infini
from support.checkpoint_writers import write_gguf
from support.gguf_architectures import write
from torch_infini._core import library
from torch_infini.models import Llama
from torch_infini.nn import Linear
from torch_infini.ops._block_panels import NUMBERS, blocks_of
from torch_infini.ops._blocks import KINDS
from torch_infini.testing import threads_set_to
from torch_infini.testing.ops.fused_experts import ExpertsCall, in_blocks, reference
from torch_infini.testing.ops.linear_block_panels import inputs
from torch_infini.testing.ops.linear_block_panels import reference as reference_of_blocks
from torch_infini.testing.ops.linear_blocks import random_weight
from torch_infini.weights import FORMATS, Integers, experts_in_panels, experts_out_of_panels, in_panels, out_of_panels
from torch_infini.weights.blocks import PANEL_LEVELS

PREFERS = library.capability in PANEL_LEVELS


@pytest.mark.parametrize("kind", NUMBERS.values())
def test_rows_alone_and_in_batches(kind: str) -> None:
    """The bits of a row are those of every number of rows: each part of up to eight, and tiles of more."""
    x, weight, number, _ = inputs(torch.bfloat16, 40, kind=kind, blocks=600 // KINDS[kind].elements + 1, panels=3)
    op = torch.ops.infini.linear_block_panels
    alone = torch.cat([op(row[None], weight, number) for row in x])
    for rows in (*range(2, 18), 23, 40):
        with threads_set_to(1 + rows % 2):
            assert torch.equal(op(x[:rows], weight, number), alone[:rows]), rows


def test_weights_are_not_rounded() -> None:
    """Where panels have a kernel, the only error is that of the result; linear_blocks rounds weights too."""
    if not PREFERS:
        pytest.skip("it takes AVX-512 BF16, or AVX2 alone")
    x, weight, number, _ = inputs(torch.bfloat16, 64, kind="q4_k", blocks=8, panels=8)
    values = KINDS["q4_k"].values(random_weight(KINDS["q4_k"], 128, 2048)).flatten(1)
    exact = x.double() @ values.T
    error = (torch.ops.infini.linear_block_panels(x, weight, number) - exact).square().mean()
    rounding = (exact.bfloat16() - exact).square().mean()
    assert float(error) < 1.02 * float(rounding)


# Products of smaller codes sooner fall below 2^-126, where multiplying bfloat16 in pairs gives zero.
SMALLEST = {"q2_k": 1e-36, "q3_k": 1e-36}


@pytest.mark.parametrize("size", [None, 1e-20, 1e30])
@pytest.mark.parametrize("kind", ["q4_0", "q2_k", "q3_k", "q4_k", "q6_k", "mxfp4"])
def test_x_of_any_size(kind: str, size: float | None) -> None:
    """Also where groups of a row differ by 2^60, with groups of zeros, and elements that hardly count in theirs."""
    x, weight, number, _ = inputs(torch.float32, 5, kind=kind, blocks=768 // KINDS[kind].elements, panels=2)
    x = x * (size or SMALLEST.get(kind, 1e-37))
    x[1, ::32] *= 1e-4
    x[2, 32:96] = 0
    x[3, : x.shape[1] // 2] *= 2.0**-60
    small = x.bfloat16()
    values = reference_of_blocks(small.double(), weight, number)
    found = torch.ops.infini.linear_block_panels(small, weight, number).double()
    error = (found - values).square().mean(1).sqrt() / values.square().mean(1).sqrt()
    assert float(error.max()) < 0.004, error


@pytest.mark.skipif(library.capability not in ("avx2", "avx2_vnni"), reason="of x as integers")
@pytest.mark.parametrize("kind", ["q4_0", "q2_k", "q4_k", "q6_k", "iq4_xs", "mxfp4", "int4_128"])
def test_infinity_and_nan(kind: str) -> None:
    """Rows that hold some have those of linear_blocks; the others keep their bits."""
    op, elements = torch.ops.infini.linear_block_panels, KINDS[kind].elements
    for rows in (1, 20):
        x, weight, number, _ = inputs(torch.bfloat16, rows, kind=kind, blocks=512 // elements, panels=2)
        before = op(x, weight, number)
        x[0, 7], x[0, 300] = torch.inf, -torch.inf
        x[-1, 40] = torch.inf if rows == 1 else torch.nan
        expected = torch.ops.infini.linear_blocks(x, blocks_of(weight, number), number)
        found = op(x, weight, number)
        assert torch.equal(found.isnan(), expected.isnan()) and torch.equal(found.isinf(), expected.isinf())
        assert not found[0].isfinite().any() and torch.equal(found[1:-1], before[1:-1])


@pytest.mark.parametrize("kind", NUMBERS.values())
def test_formats(kind: str) -> None:
    """There and back is the same; values of any rows are those of the blocks; other weights stay as they are."""
    blocks = Integers(random_weight(KINDS[kind], 48, 3 * KINDS[kind].elements))
    k = 3 * KINDS[kind].elements
    format, integers = in_panels(kind, blocks, torch.bfloat16)
    assert format == (f"{kind}_panels" if PREFERS else kind)
    name, back = out_of_panels(format, integers)
    assert name == kind and torch.equal(back.weight, blocks.weight)
    values = FORMATS[kind].dequantize(blocks, 0, 48, k, torch.float32)
    for first, rows in ((0, 48), (5, 20), (17, 1), (47, 1), (30, 0)):
        some = FORMATS[format].dequantize(integers, first, rows, k, torch.float32)
        assert torch.equal(some, values[first : first + rows])
    for other in (
        in_panels(kind, blocks, torch.float32),
        in_panels(kind, Integers(blocks.weight[:40]), torch.bfloat16),
    ):
        assert other[0] == kind and other[1].weight.data_ptr() == blocks.weight.data_ptr()


def test_rows_that_fill_no_panel() -> None:
    with pytest.raises(ValueError, match=r"out_features must be a multiple of 16 for 'q4_k_panels', got 17"):
        Linear(512, 17, format="q4_k_panels")


def test_models_of_the_engine(tmp_path: Path) -> None:
    """A Llama in bfloat16 holds panels; in float32 rows, with the same values."""
    pytest.importorskip("gguf")
    write_gguf(tmp_path / "model.gguf", lambda module: "Q4_K")
    model = Llama.from_pretrained(tmp_path / "model.gguf", dtype=torch.bfloat16, progress=False)
    layers = [layer for one in model.layers for layer in (one.attention.qkv, one.mlp.gate_up, one.mlp.down)]
    if library.capability == "avx512_amx":
        pytest.skip("with tiles weights are dense")
    assert {layer.format for layer in layers} == {"q4_k_panels" if PREFERS else "q4_k"}
    values = [layer.dense() for layer in layers]
    model.float()
    assert model.embed(torch.tensor([1, 2])).dtype == torch.float32
    assert {layer.format for layer in layers} == {"q4_k"}
    assert all(torch.equal(layer.dense().bfloat16(), value) for layer, value in zip(layers, values, strict=True))


def test_patched_models_and_their_files(tmp_path: Path) -> None:
    """save_patched writes rows, which any CPU multiplies; loading lays them out again."""
    pytest.importorskip("gguf")
    pytest.importorskip("transformers")
    if library.capability == "avx512_amx":
        pytest.skip("with tiles weights are dense")
    write_gguf(tmp_path / "model.gguf", lambda module: "Q6_K")
    model: Any = torch_infini.load(tmp_path / "model.gguf", torch.bfloat16)
    name = "model.layers.0.mlp.down_proj"
    wanted = "q6_k_panels" if PREFERS else "q6_k"
    assert model.get_submodule(name).plan.format == wanted
    ids = torch.arange(3, 12)[None]
    with torch.no_grad():
        logits = model(ids).logits
    torch_infini.save_patched(model, tmp_path / "saved")
    again: Any = torch_infini.load(tmp_path / "saved")
    assert again.get_submodule(name).plan.format == wanted
    with torch.no_grad():
        assert torch.equal(again(ids).logits, logits)
    stored = (tmp_path / "saved" / "config.json").read_text(encoding="utf-8")
    assert '"q6_k"' in stored and "panels" not in stored
    weight = model.get_submodule(name).weight
    model.float()
    assert model.get_submodule(name).plan.format == "q6_k"
    assert torch.equal(model.get_submodule(name).weight.bfloat16(), weight)


# ---- experts ----

QUICK = ("q8_0", "q4_k", "mxfp4")


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in QUICK else pytest.mark.full) for kind in NUMBERS.values()]
)
def test_experts(kind: str) -> None:
    """The bits of linear_block_panels for each expert; nearer to float64 than rows whose weights bfloat16 rounds."""
    of, op = KINDS[kind], torch.ops.infini
    hidden, inner = of.elements * (3 if of.elements < 100 else 1), of.elements * (5 if of.elements < 100 else 2)
    for tokens in (1, 2, 5, 33):
        for chosen in (1, 2, 8):
            args = in_blocks(torch.bfloat16, (kind, kind), tokens, hidden, inner, 11, chosen).args
            x, gate_up, down, index, weights, _ = args
            (name, first), (_, second) = (experts_in_panels(kind, w, x.dtype) for w in (gate_up, down))
            assert name == (f"{kind}_panels" if PREFERS else kind)
            kinds = {"gate_up_kind": of.number, "down_kind": of.number}
            found = op.fused_experts(x, first, second, index, weights, **kinds)
            exact = reference(ExpertsCall(x=x, gate_up=gate_up, down=down, index=index, weights=weights, **kinds))
            error, by_rows = (y.double() - exact for y in (found, op.fused_experts(*args[:5], **kinds)))
            assert float(error.norm() / exact.norm()) < (0.003 if PREFERS else 0.02)
            if library.capability == "avx512_bf16":
                assert float(error.norm()) <= 1.1 * float(by_rows.norm())
            if not PREFERS:
                continue
            sums = torch.zeros(tokens, hidden)
            for j in range(chosen):
                for t, e in enumerate(index[:, j].tolist()):
                    both = op.linear_block_panels(x[t : t + 1], first[e], of.number)
                    h = op.swiglu(both, None)
                    sums[t] += weights[t, j].float() * op.linear_block_panels(h, second[e], of.number)[0].float()
            assert torch.equal(found, sums.bfloat16()), (tokens, chosen)
            for t in range(0, tokens, 7):
                one = (part[t : t + 1] for part in (index, weights))
                assert torch.equal(op.fused_experts(x[t : t + 1], first, second, *one, **kinds)[0], found[t])


def test_experts_with_many_and_few_rows() -> None:
    """Experts are computed together, or alone if they have many rows: a token's bits are the same."""
    number, generator = KINDS["q8_0"].number, torch.Generator().manual_seed(0)
    x, gate_up, down, _, _, _ = in_blocks(torch.bfloat16, ("q8_0", "q8_0"), 300, 64, 32, 40, 2).args
    first, second = (experts_in_panels("q8_0", w, x.dtype)[1] for w in (gate_up, down))
    kinds = {"gate_up_kind": number, "down_kind": number}
    weights = torch.rand(300, 2, generator=generator)
    for favourite in (0, 17, 39):  # it has all 300 tokens, more than share a pass over a weight
        index = torch.stack((torch.full((300,), favourite), torch.randint(40, (300,), generator=generator)), 1)
        for on_input in (False, True):
            op = partial(torch.ops.infini.fused_experts, weights_on_input=on_input, **kinds)
            together = op(x, first, second, index, weights)
            with threads_set_to(2):
                assert torch.equal(op(x, first, second, index, weights), together)
            for t in range(0, 300, 13):
                one = slice(t, t + 1)
                assert torch.equal(op(x[one], first, second, index[one], weights[one])[0], together[t])


def test_formats_of_experts() -> None:
    """There and back is the same; experts whose rows fill no panels, and no experts, keep their rows."""
    blocks = random_weight(KINDS["mxfp4"], 3 * 32, 64).unflatten(0, (3, 32))
    format, packed = experts_in_panels("mxfp4", blocks, torch.bfloat16)
    assert (format == "mxfp4_panels") == PREFERS
    name, back = experts_out_of_panels(format, packed)
    assert name == "mxfp4" and torch.equal(back, blocks)
    for e in range(3):
        assert torch.equal(packed[e], in_panels("mxfp4", Integers(blocks[e]), torch.bfloat16)[1].weight)
    for some, dtype in ((blocks, torch.float32), (blocks[:, :24], torch.bfloat16)):
        assert experts_in_panels("mxfp4", some, dtype) == ("mxfp4", some)
    format, packed = experts_in_panels("mxfp4", blocks[:0], torch.bfloat16)
    assert experts_out_of_panels(format, packed)[1].shape == (0, 32, 2, 17)


@pytest.mark.parametrize("kinds", [("MXFP4", "MXFP4"), pytest.param(("Q4_K", "Q6_K"), marks=pytest.mark.full)])
def test_experts_of_models(kinds: tuple[str, str], tmp_path: Path) -> None:
    """In bfloat16 they are in panels, after .float() in rows with the same values; a copy computes the same bits."""
    pytest.importorskip("gguf")
    pytest.importorskip("transformers")
    if library.capability == "avx512_amx":
        pytest.skip("with tiles weights are dense")
    of = dict(zip(("gate_up_proj", "down_proj"), kinds, strict=True))
    sizes = {"hidden_size": 256, "intermediate_size": 256}
    name, path = "model.layers.1.mlp.experts", tmp_path / "model.gguf"
    write(path, "gpt-oss", lambda name: of.get(name.rpartition(".")[2], "Q8_0"), head_dim=64, **sizes)
    model: Any = torch_infini.load(path, torch.bfloat16)
    experts = model.get_submodule(name)
    formats = lambda: [experts.plan.format_of(one).name for one in of]
    rows = [kind.lower() for kind in kinds]
    assert formats() == [f"{kind}_panels" if PREFERS else kind for kind in rows]
    assert experts.sizes == (4, 256, 256) and not experts.is_savable
    ids = torch.arange(3, 12)[None]
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits
        assert torch.equal(deepcopy(model)(ids, use_cache=False).logits, logits)
    values = {one: getattr(experts, one) for one in of}
    model.float()
    assert formats() == rows and experts.sizes == (4, 256, 256)
    for one, value in values.items():
        assert torch.equal(getattr(experts, one).bfloat16(), value)
    with torch.no_grad():
        wide = model(ids, use_cache=False).logits
    assert float((logits - wide).norm() / wide.norm()) < 0.05
