"""linear_blocks and embedding_blocks on CUDA (or its emulation) where tests/test_cuda.py does not reach.

Ids outside of the table, a bias in float32, panels, rows whose bits depend on no others, and models that are read from
GGUF files there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from support.gguf_architectures import write
from torch_infini import LLM, SamplingParams
from torch_infini.ops._block_panels import packed_shape
from torch_infini.testing import cuda_device
from torch_infini.testing.ops.embedding_blocks import INFO as EMBEDDING
from torch_infini.testing.ops.embedding_blocks import inputs as embedding_inputs
from torch_infini.testing.ops.linear_blocks import BY_NUMBER, inputs
from torch_infini.weights import Integers, in_panels, served_on

DEVICE = cuda_device()
pytestmark = pytest.mark.skipif(DEVICE is None, reason="no GPU, and the libraries are not the emulated ones")
infini = torch.ops.infini


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_ids_outside_of_the_table(dtype: torch.dtype) -> None:
    _, weight, kind, _ = embedding_inputs(dtype, 1, "q6_k", 2, 11)
    ids = torch.tensor([3, -1, 11, 10, 2**40])
    got = infini.embedding_blocks(ids.to(DEVICE), weight.to(DEVICE), kind, dtype).cpu()
    right = torch.tensor([0, 3])
    assert torch.equal(got[right].double(), EMBEDDING.reference(ids[right], weight, kind, dtype).to(dtype).double())
    assert got[[1, 2, 4]].isnan().all()


def test_panels_stay_on_the_cpu() -> None:
    ids, weight, kind, dtype = next(sample for sample in EMBEDDING.samples(torch.float32) if sample.cpu_only).args
    with pytest.raises(RuntimeError, match="embedding_blocks: weight must be in rows of blocks on CUDA, got panels"):
        infini.embedding_blocks(ids.to(DEVICE), weight.to(DEVICE), kind, dtype)


@pytest.mark.parametrize("rows", [1, 8, 9, 40])
def test_bias_in_float32(rows: int) -> None:
    """For few rows, and for those whose weight is decoded first."""
    x, weight, kind, _ = inputs(torch.bfloat16, rows, kind="q4_k", blocks=2, n=70)
    bias = torch.linspace(-1, 1, 70)
    got = infini.linear_blocks(x.to(DEVICE), weight.to(DEVICE), kind, bias.to(DEVICE)).cpu()
    want = x.double() @ BY_NUMBER[kind].dequantize(weight).double().T + bias.double()
    torch.testing.assert_close(got.double(), want, rtol=2**-8, atol=2**-6)


@pytest.mark.parametrize("rows", [1, 2, 5, 8])
def test_bits_do_not_depend_on_the_batch(rows: int) -> None:
    x, weight, kind, _ = inputs(torch.float16, 8, kind="mxfp4", blocks=5, n=33)
    x, weight = x.to(DEVICE), weight.to(DEVICE)
    whole = infini.linear_blocks(x, weight, kind)
    assert torch.equal(infini.linear_blocks(x[:rows], weight, kind), whole[:rows])


@pytest.mark.parametrize("name", ["phi3", "gemma2"])
def test_gguf_files(name: str, tmp_path: Path) -> None:
    """Layers stay in the file's blocks; the tokens are those of their dequantized form."""
    path = tmp_path / "model.gguf"
    sizes = {"hidden_size": 256, "intermediate_size": 256}
    dense = write(path, name, lambda key: "Q6_K" if key.endswith("down_proj.weight") else "Q8_0", **sizes)
    llm = LLM(path, dtype="float32", device=DEVICE, block_size=4, chunk_size=8, cache_blocks=40, progress=False)
    of_llm: Any = llm.engine.model
    buffers = list(of_llm.model.buffers())
    assert sum(one.dtype == torch.uint8 and one.numel() > 0 for one in buffers) >= 4 * dense.config.num_hidden_layers
    ids = list(range(7, 30))
    (output,) = llm.generate([ids], SamplingParams(max_tokens=6, temperature=0, ignore_eos=True))
    tokens = list(output.outputs[0].token_ids)
    with torch.no_grad():
        scores = dense(input_ids=torch.tensor([ids + tokens]), use_cache=False).logits
    assert tokens == scores[0, len(ids) - 1 : -1].argmax(-1).tolist()


def test_another_device() -> None:
    """Panels go into rows where only these have a kernel, and blocks nowhere that has none."""
    _, weight, kind, _ = inputs(torch.bfloat16, 1, kind="q4_0", blocks=3, n=32)
    name, panels = in_panels("q4_0", Integers(weight), torch.bfloat16)
    if name == "q4_0":  # on this CPU, or in the emulation
        packed = torch.empty(packed_shape(kind, 32, 96), dtype=torch.uint8)
        infini.pack_blocks(packed, weight, kind, 0)
        name, panels = "q4_0_panels", Integers(packed)
    moved = served_on(torch.device("cuda"), name, panels)
    assert moved is not None and moved[0] == "q4_0" and torch.equal(moved[1].weight, weight)
    assert served_on(torch.device("meta"), name, panels) is None
