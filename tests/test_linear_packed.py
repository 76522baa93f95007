"""linear_packed beyond the generic tests: rows do not depend on their batch, a weight that threads pack in odd pieces,
the layers that hold one, and that the tolerances notice a single lost product.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

import torch_infini
from torch_infini._core.library import emulates_cuda
from torch_infini.nn import Linear
from torch_infini.nn.linear import fastest
from torch_infini.ops._packed import packed_shape, unpack_linear
from torch_infini.testing import check_against_reference, cpu_capability_set_to, kernel_levels, threads_set_to
from torch_infini.testing.compare import assert_close
from torch_infini.testing.ops import OP_INFOS, Sample
from torch_infini.testing.ops.linear_packed import inputs
from torch_infini.weights import best

SPEC = OP_INFOS["linear_packed"]
BF16 = torch.bfloat16


def weight_of(n: int, k: int) -> Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(n * k)).to(BF16)


@pytest.mark.parametrize("capability", kernel_levels())
@pytest.mark.parametrize("k", [5, 700, 3001])
def test_a_row_has_the_same_bits_in_any_batch(k: int, capability: str) -> None:
    x, weight, n, bias = inputs(BF16, 70, k=k, n=150, bias=True)  # a panel is left by three threads
    with cpu_capability_set_to(capability):
        alone = torch.cat([SPEC.op(row, weight, n, bias) for row in x.split(1)])
        for rows in (*range(2, 30), 36, 37, 70):
            for threads in (1, 3):
                with threads_set_to(threads):
                    assert torch.equal(SPEC.op(x[:rows], weight, n, bias), alone[:rows]), (rows, threads)


@pytest.mark.parametrize("capability", kernel_levels())
@pytest.mark.parametrize(("rows", "k"), [(1100, 37), (500, 40000)])
def test_rows_that_are_packed_in_several_passes(rows: int, k: int, capability: str) -> None:
    x, weight, n, bias = inputs(BF16, rows, k=k, n=35, bias=True)
    with cpu_capability_set_to(capability):
        parts = torch.cat([SPEC.op(part, weight, n, bias) for part in x.split(40)])
        assert torch.equal(SPEC.op(x, weight, n, bias), parts)


def test_a_lost_product_is_noticed() -> None:
    args = inputs(BF16, 2, k=5125, n=64)
    less = args[1].clone()
    less[:, 5124 // 2, :, 0] = 0
    sample = Sample("call", args)
    check_against_reference(SPEC, sample, BF16, SPEC.op(*args))
    with pytest.raises(AssertionError):
        check_against_reference(SPEC, sample, BF16, SPEC.op(args[0], less, *args[2:]))


def test_threads_pack_pieces_of_a_weight() -> None:
    weight, pieces = weight_of(1000, 77), [1, 16, 30, 2, 47, 48, 100, 333, 7, 400, 16]
    whole, parts = (torch.full(packed_shape(1000, 77), torch.nan, dtype=BF16) for _ in range(2))
    torch.ops.infini.pack_linear(whole, weight)
    starts = [sum(pieces[:i]) for i in range(len(pieces))]
    with ThreadPoolExecutor(4) as pool:
        rows = [weight[start : start + count] for start, count in zip(starts, pieces, strict=True)]
        list(pool.map(lambda piece, first: torch.ops.infini.pack_linear(parts, piece, first), rows, starts))
    assert sum(pieces) == 1000 and torch.equal(unpack_linear(parts, 1000, 77), weight)
    assert torch.equal(unpack_linear(whole, 1000, 77), weight)
    assert torch.equal(unpack_linear(whole, 130, 77, 40), weight[40:170])
    assert whole.view(-1, 39, 48, 2)[-1, :, 1000 % 48 :].isnan().all()  # nobody's rows


def test_layer() -> None:
    weight, x = weight_of(130, 39), torch.randn(3, 39).to(BF16)
    packed, dense = (Linear(39, 130, True, format, BF16) for format in ("packed", "dense"))
    for layer in (packed, dense):
        layer.load(weight[50:].float(), 50)  # converted
        layer.load(weight[:50])
        layer.bias.copy_(weight[:, 0])
    assert torch.equal(packed.dense(), weight) and torch.equal(packed.dense(slice(47, 99)), weight[47:99])
    assert_close(packed(x), dense(x).double(), 2**-7, 1e-5, "packed")
    out = torch.empty(3, 130, dtype=BF16)
    assert packed(x, out) is out and torch.equal(out, packed(x))
    assert packed.dense(slice(5, 3)).shape == (0, 39)
    packed.load(weight.t().contiguous().t())  # its columns apart
    assert torch.equal(packed.dense(), weight)
    with pytest.raises(ValueError, match=r"x must have in_features columns, 39, got \[3, 40\]$"):
        packed(torch.zeros(3, 40, dtype=BF16))  # packed as 39 columns are
    with pytest.raises(ValueError, match=r"load's rows must be below out_features, 130, got 2 from 129 on$"):
        packed.load(weight[:2], 129)  # there is room in the last panel


def test_a_layer_that_is_moved() -> None:
    """What cannot stay packed becomes dense."""
    weight, x = weight_of(50, 8), torch.randn(3, 8)
    layer = Linear(8, 50, format="packed", dtype=BF16)
    layer.load(weight)
    assert layer.cpu().bfloat16().format == "packed"
    assert layer.float().format == "dense" and torch.equal(layer.weight, weight.float())
    assert_close(layer(x), x.double() @ weight.double().t(), 1e-6, 1e-5, "float32")
    assert Linear(8, 50, format="packed", dtype=BF16).to("meta").weight.shape == (50, 8)


def test_layers_that_cannot_be_packed() -> None:
    rule = r"^torch_infini.nn.Linear: format 'packed' must be of bfloat16 on the CPU, got "
    with pytest.raises(ValueError, match=rule + "float32 on cpu$"):
        Linear(8, 8, format="packed", dtype=torch.float32)
    with pytest.raises(ValueError, match=rule + "bfloat16 on meta$"):
        Linear(8, 8, format="packed", dtype=BF16, device="meta")


def test_which_models_pack() -> None:
    highest = torch_infini.cpu_capabilities()[-1]
    packs = highest in ("avx512_bf16", "neon_bf16") and not emulates_cuda()
    assert fastest("dense", BF16, "cpu") == (
        "packed" if packs and torch_infini.cpu_capability() == highest else "dense"
    )
    assert fastest("dense", torch.float32, "cpu") == fastest("dense", BF16, "cuda") == "dense"
    assert fastest("int8", BF16, "cpu") == best("int8", "cpu").name
    with cpu_capability_set_to(torch_infini.cpu_capabilities()[0]):
        assert fastest("dense", BF16, "cpu") == "dense"
    with pytest.raises(ValueError, match=r"weights must be one of 'dense', 'int4', 'int8', .*, got 'packed'$"):
        fastest("packed", BF16, "cpu")  # type: ignore[arg-type]


def test_other_devices_are_refused() -> None:
    x, weight, n, _ = inputs(BF16, 2, k=8, n=5)
    assert SPEC.op(x.to("meta"), weight.to("meta"), n).shape == (2, 5)
    if torch.cuda.is_available():
        with pytest.raises(NotImplementedError, match="linear_packed"):
            SPEC.op(x.cuda(), weight.cuda(), n)
