"""Dense products that ATen computes where it is faster: which calls it gets, that they are right, the tuned table."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_infini
from support.fresh_python import run_python
from torch_infini._core import products
from torch_infini._core.cpu import cpu_name
from torch_infini._core.library import emulates_cuda
from torch_infini._core.products import aten_below, aten_from, aten_from_set_to, set_aten_from
from torch_infini.commands import tune
from torch_infini.testing import cpu_capability_set_to, kernel_levels
from torch_infini.testing.compare import assert_close

ROOT = Path(__file__).resolve().parent.parent
OPS = torch.ops.infini
TOLERANCES = {torch.float32: (1e-6, 3e-5), torch.bfloat16: (2**-8, 1e-4), torch.float16: (2**-11, 1e-4)}

pytestmark = pytest.mark.skipif(emulates_cuda(), reason="products of the CPU")


@contextmanager
def calls_of_aten() -> Iterator[list[str]]:
    """The names of ATen's products that run within the scope, once it is over."""
    names: list[str] = []
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        yield names
    names += [event.name for event in profile.events() if event.name in ("aten::mm", "aten::bmm", "aten::addmm")]


def operands(dtype: torch.dtype, rows: int, k: int = 512, n: int = 256) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(rows)
    return tuple(torch.randn(*shape, generator=g).to(dtype) for shape in ((rows, k), (n, k), (n,)))


def close(y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    """ATen may add in one chain: of 512 normal products that rounds by 512 / sqrt(6) * 2^-24 in the mean square.

    Four of these, 5e-5, for the worst of 10,000 elements, are less than the usual tolerance and 2^-23 of the sum of
    magnitudes, about 330, together.
    """
    exact = x.double() @ weight.double().t()
    rtol, atol = TOLERANCES[y.dtype]
    atol += torch.finfo(torch.float32).eps * float((x.double().abs() @ weight.double().abs().t()).max())
    assert_close(y, exact if bias is None else exact + bias.double(), rtol, atol, str(y.dtype))


def test_from_so_many_rows_on() -> None:
    with aten_from_set_to(16):
        for rows, called in ((15, 0), (16, 1), (40, 1)):
            x, weight, _ = operands(torch.float32, rows)
            with calls_of_aten() as names:
                OPS.linear(x, weight)
            assert len(names) == called, (rows, names)
        x, weight, bias = operands(torch.float32, 40)
        batch = torch.randn(2, 128, 128)
        for call, count in (
            (lambda: OPS.fused_linear(x, weight, weight[:100], weight[:0], bias), 2),
            (lambda: OPS.matmul(x, weight.t()), 1),
            (lambda: OPS.matmul(x[:15], weight.t()), 0),
            (lambda: OPS.matmul(batch, batch), 1),
            (lambda: OPS.matmul(batch, batch[:1].expand_as(batch)), 1),  # one product with more rows
            (lambda: OPS.matmul(x, weight[:15].t()), 0),
            (lambda: OPS.gemm(x, weight.t()), 1),
            (lambda: OPS.gemm(x, weight.t(), None, 2.0), 0),
            (lambda: OPS.linear(x[:, :4], weight[:, :4]), 0),  # too little to do
        ):
            with calls_of_aten() as names:
                call()
            assert len(names) == count, names
        set_aten_from("batched", torch.float32, 129)
        with calls_of_aten() as names:
            OPS.matmul(batch, batch)
        assert not names
    with aten_from_set_to(None), calls_of_aten() as names:
        OPS.linear(x, weight)
    assert not names


@pytest.mark.parametrize("dtype", products.DTYPES, ids=str)
def test_results(dtype: torch.dtype) -> None:
    x, weight, bias = operands(dtype, 48)
    rows = operands(dtype, 96)[0]
    out = torch.full((48, 600), 7.0, dtype=dtype)
    with aten_from_set_to(1):
        close(OPS.linear(x, weight, bias), x, weight, bias)
        close(OPS.linear(x[0], weight)[None], x[:1], weight)
        close(OPS.linear(x.view(2, 4, 6, 512), weight).reshape(48, 256), x, weight)
        close(OPS.linear(rows[::2], weight), rows[::2], weight)
        strided = rows.view(2, 48, 512)[:, ::3]  # rows at two distances: no matrix
        close(OPS.linear(strided, weight).reshape(32, 256), strided.reshape(32, 512), weight)
        OPS.linear.out(x, weight, bias, out=out[:, 100:356])
        close(out[:, 100:356], x, weight, bias)
        assert (out[:, :100] == 7).all() and (out[:, 356:] == 7).all()
        y = OPS.fused_linear(x, weight, weight[:100], weight[7:10], bias, None, bias[:3])
        both = torch.cat([weight, weight[:100], weight[7:10]])
        close(y, x, both, torch.cat([bias, bias.new_zeros(100), bias[:3]]))
        y = OPS.matmul(rows.view(2, 48, 512), weight.t())
        close(y.reshape(96, 256), rows, weight)
        y = OPS.matmul(rows.view(2, 48, 512).transpose(1, 2), rows.view(2, 48, 512))
        z = OPS.matmul(rows[:48].t().expand(2, 512, 48), rows.view(2, 48, 512))
        for i in range(2):
            part = rows[48 * i : 48 * i + 48]
            close(y[i], part.t(), part.t())
            close(z[i], rows[:48].t(), part.t())


IMAGE_CASES: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "2-D": ((2, 16, 17, 19), (40, 16, 3, 3), {"padding": [1, 2], "stride": [2, 1], "dilation": [1, 2]}),
    "1-D": ((1, 80, 300), (48, 80, 3), {"padding": 1}),
    "3-D": ((1, 4, 9, 10, 11), (33, 4, 3, 2, 3), {}),
    "one image": ((16, 20, 20), (32, 16, 3, 3), {}),
    "patches": ((1, 3, 112, 112), (64, 3, 14, 14), {"stride": 14}),
}


@pytest.mark.parametrize("dtype", products.DTYPES, ids=str)
@pytest.mark.parametrize("name", IMAGE_CASES)
def test_convolutions(name: str, dtype: torch.dtype) -> None:
    """ATen's equal ours but for rounding: contiguous and strided operands, functional and out."""
    shape, kernels, options = IMAGE_CASES[name]
    g = torch.Generator().manual_seed(1)
    depth = torch.Size(kernels[1:]).numel()
    x, bias = torch.randn(*shape, generator=g).to(dtype), torch.randn(kernels[0], generator=g).to(dtype)
    weight = (torch.randn(*kernels, generator=g) * depth**-0.5).to(dtype)
    spread = torch.stack([x, x], -1)[..., 0]
    function = {3: torch.conv1d, 4: torch.conv2d, 5: torch.conv3d}[weight.dim()]
    exact = function(x.double(), weight.double(), bias.double(), **options)
    with aten_from_set_to(1), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        y = torch_infini.ops.conv(x, weight, bias, **options)
        again = torch_infini.ops.conv(spread.requires_grad_(), weight, bias, **options)
        out = torch.full((*y.shape[:-1], 2 * y.shape[-1]), 7.0, dtype=dtype)
        torch_infini.ops.conv(x, weight, bias, **options, out=out[..., ::2])
    assert sum(event.name == "aten::convolution" for event in profile.events()) == 3
    for result in (y, again.detach(), out[..., ::2]):
        assert_close(result, exact, *TOLERANCES[dtype], name)
    assert y.is_contiguous() and (out[..., 1::2] == 7).all()


def test_which_convolutions() -> None:
    x, weight = torch.randn(1, 16, 60, 60), torch.randn(24, 16, 3, 3)

    def called(*arguments: Any) -> bool:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            OPS.conv(*arguments)
        return any(event.name == "aten::convolution" for event in profile.events())

    with aten_from_set_to(None):
        assert not called(x, weight)
        set_aten_from("conv", torch.float32, 24)
        assert called(x, weight) and not called(x, weight[:23]) and not called(x, weight, None, [3])
        assert not called(torch.randn(1, 512, 8, 4), torch.randn(24, 512, 3, 3))  # 12 positions
        set_aten_from("patches", torch.float32, 1)
        assert called(x, weight, None, [3]) and called(x, weight[:, :, :1, :1])
        assert not called(x, weight[:, :1, :1, :1].expand(24, 16, 1, 1)[:9])  # too little to do
    four = torch.randn(1, 8, 9, 9, 9, 9)
    with aten_from_set_to(1):  # ATen has three dimensions
        OPS.conv(four, torch.randn(16, 8, 3, 3, 3, 3))


def test_gradients_and_modes() -> None:
    """The detour is inside the op: autograd, inference mode and compiled graphs see the same op as ever."""
    x, weight, _ = operands(torch.float32, 32)
    with aten_from_set_to(1):
        expected = OPS.linear(x, weight)
        y = OPS.linear(x.clone().requires_grad_(), weight)
        assert torch.equal(y, expected)
        with pytest.raises(RuntimeError, match="linear"):
            y.sum().backward()
        with torch.inference_mode():
            assert torch.equal(OPS.linear(x, weight), expected)
        compiled = torch.compile(lambda x: OPS.linear(x, weight), fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(x), expected)
        recorded = torch.zeros_like(expected)
        program = torch_infini.runtime.Program(lambda: OPS.linear.out(x, weight, None, out=recorded))
        recorded.zero_()
        program.replay()
        assert torch.equal(recorded, expected)


def test_levels_have_their_own_table() -> None:
    for name in torch_infini.cpu_capabilities():
        with cpu_capability_set_to(name), aten_from_set_to("default"):
            built_in = aten_from("linear", torch.float32)
            assert built_in == (256 if name == "avx512_amx" else None)
            assert aten_from("conv", torch.bfloat16) == {"avx512_bf16": 32, "avx512_amx": 1}.get(name)
            assert aten_below("conv", torch.bfloat16) == (128 if name == "avx512_amx" else None)
            with aten_from_set_to(1):
                assert aten_below("conv", torch.bfloat16) is None
            assert aten_from("batched", torch.bfloat16) == (512 if name == "avx512_amx" else None)
            assert aten_from("patches", torch.float32) == (1 if name == "avx512_amx" else None)
            with aten_from_set_to(12):
                assert aten_from("linear", torch.float32) == 12
            assert aten_from("linear", torch.float32) == built_in
    with pytest.raises(ValueError, match="must be at least 1, got 0"):
        set_aten_from("linear", torch.float32, 0)


def test_never_aten() -> None:
    code = (
        "import torch; from torch_infini._core import products as p; print(p.SOURCE);"
        "print({p.aten_from(product, dtype) for product in p.PRODUCTS for dtype in p.DTYPES})"
    )
    environment = {**os.environ, "INFINI_PRODUCTS": "ours"}
    done = run_python(code, env=environment)
    assert "never ATen" in done.stdout and done.stdout.endswith("{None}\n"), done


def test_the_report_says_so() -> None:
    from support.tiny_llama import tiny

    with aten_from_set_to(64):
        report = torch_infini.patch_model(tiny())
    assert str(report).endswith("dense products of float32: torch_infini, from 64 rows on ATen")
    with aten_from_set_to(None):
        set_aten_from("linear", torch.float32, 8)
        set_aten_from("patches", torch.float32, 9)
        described = products.described(torch.float32)
    ours, aten = "torch_infini", "torch_infini, from 9 rows on ATen"
    assert (
        described
        == f"torch_infini, from 8 rows on ATen (matmul: {ours}; batched: {ours}; conv: {ours}; patches: {aten})"
    )


def test_where_aten_wins() -> None:
    def lines(*ratios: float) -> list[dict[str, Any]]:
        return [{"rows": 2**i, "infini_us": 100 * r, "aten_us": 100.0} for i, r in enumerate(ratios)]

    assert tune.aten_from(lines(0.5, 0.9, 1.0)) is None
    assert tune.aten_from(lines(0.5, 1.2, 1.5)) == 2
    assert tune.aten_from(lines(1.5, 0.9, 1.02)) is None
    assert tune.aten_from(lines(1.5, 0.9, 1.2)) == 4
    assert tune.aten_from(lines(1.1, 1.2)) == 1


def test_tune_gives_up() -> None:
    """Where ATen takes many times as long at two sizes in a row."""

    def lines(*shares: float) -> list[dict[str, Any]]:
        return [{"rows": 2**i, "infini_us": 1.0, "aten_us": share} for i, share in enumerate(shares)]

    assert tune.is_hopeless(lines(40, 80)) and tune.is_hopeless(lines(1, 9, 9))
    assert not any(map(tune.is_hopeless, (lines(80), lines(80, 2), lines(9, 9, 7))))
    assert tune.aten_from(lines(0.5, 9, 9)) is None


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **environment}
    return run_python(code, env=env)


SHOW = """
from torch_infini._core import products
from torch_infini._core.cpu import cpu_name
import torch
print(products.aten_from("linear", torch.bfloat16), products.aten_from("matmul", torch.float32), products.SOURCE)
"""


def test_a_stored_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """tune writes one; the next start uses it, unless it is another machine's or none, and says so."""
    from torch_infini.__main__ import main

    file = tmp_path / "torch_infini" / "products.json"
    options = ["--dtypes", "float32", "--rows", "1,4", "--rounds", "1", "--file", str(file)]
    assert main(["tune", *options]) == 0
    out = capsys.readouterr().out
    assert f"stored in {file}: set INFINI_PRODUCTS to it" in out and "linear   float32       4" in out
    stored = json.loads(file.read_text())
    assert [(line["product"], line["rows"]) for line in stored["measured"]] == [
        (product, rows) for product in products.PRODUCTS for rows in (1, 4)
    ]
    stored["aten_from"] = {"linear": {"bfloat16": 33}, "matmul": {"float32": None}} | {
        product: {} for product in ("batched", "conv", "patches")
    }
    file.write_text(json.dumps(stored))
    environment = {"INFINI_CPU_CAPABILITY": torch_infini.cpu_capability()}
    assert python(SHOW, INFINI_PRODUCTS=str(file), **environment).stdout == f"33 None measured here, {file}\n"
    assert python(SHOW, INFINI_PRODUCTS="", XDG_CACHE_HOME=str(tmp_path), **environment).stdout.startswith("33 None")
    assert python(SHOW, INFINI_PRODUCTS="default", XDG_CACHE_HOME=str(tmp_path), **environment).stdout.endswith(
        "built in\n"
    )
    file.write_text(json.dumps({**stored, "cpu": "Z80"}))
    said = python(SHOW, INFINI_PRODUCTS=str(file), **environment).stdout
    assert said.partition("built in (")[2] == (
        f"{file} is for cpu 'Z80', here it is {cpu_name()!r}: run `tune --store` again)\n"
    )


def test_without_a_home() -> None:
    """A user without a home folder, or with an unreadable cache, has the built-in table."""
    nobody = "import os, pwd\npwd.getpwuid = lambda uid: {}[uid]\ndel os.environ['HOME']\n"
    done = python(nobody + SHOW, HOME="/", XDG_CACHE_HOME="", INFINI_PRODUCTS="")
    assert done.stdout.endswith("built in\n"), done.stderr
    assert python(SHOW, XDG_CACHE_HOME="/dev/null", INFINI_PRODUCTS="").stdout.endswith("built in\n")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[", "Expecting value: line 1 column 2 (char 1)"),
        ("{}", "it has no valid entry 'format'"),
        ('{"format": 9}', "its format is 9, not 3"),
        ("WRONG SIZE", "0 for torch.float32 is neither a number of rows nor null"),
        ("WRONG DTYPE", "5 for torch.int8 is neither a number of rows nor null"),
    ],
)
def test_files_that_are_no_table(tmp_path: Path, text: str, why: str) -> None:
    file = tmp_path / "products.json"
    sizes = {"WRONG SIZE": {"float32": 0}, "WRONG DTYPE": {"int8": 5}}.get(text)
    if sizes:
        all_sizes = dict.fromkeys(products.PRODUCTS, sizes)
        text = json.dumps({"format": products.FORMAT, **products.machine(), "aten_from": all_sizes})
    file.write_text(text)
    done = python("import torch_infini", INFINI_PRODUCTS=str(file))
    assert done.stderr.splitlines()[-1] == (
        "ImportError: torch_infini: INFINI_PRODUCTS must be a file that `python -m torch_infini tune --store` wrote, "
        f"'default' or 'ours', got {file}: {why}"
    )


def test_bad_options_of_tune(capsys: pytest.CaptureFixture[str]) -> None:
    from torch_infini.__main__ import main

    quick = ["--dtypes", "float32", "--rows", "1", "--rounds", "1"]
    for options, sentence in (
        ([*quick, "--file", "/dev/null/table"], "the table cannot be stored in /dev/null/table ("),
        (["--rows", "4,x"], "--rows must be positive integers with commas between, got '4,x'"),
        (["--dtypes", "int8"], "--dtypes must be of float32, bfloat16 and float16, got 'int8'"),
        (["--rounds", "0"], "--rounds must be at least 1, got 0"),
    ):
        assert main(["tune", *options]) != 0
        assert sentence in capsys.readouterr().err


@pytest.mark.parametrize("capability", kernel_levels())
def test_denormal_products(capability: str) -> None:
    """What docs/ops.md says: zero where an instruction multiplies bfloat16, else as all others."""
    flushed = capability in ("avx512_bf16", "avx512_amx", "neon_bf16")
    for dtype in (torch.bfloat16, torch.float32):
        for element, factor in ((1e-39, 100.0), (2.0**-100, 2.0**-36)):  # denormal operands; denormal sums
            for rows in (1, 2, 17, 130):
                x, w = torch.full((rows, 64), element).to(dtype), torch.full((48, 64), factor).to(dtype)
                exact = (x.double() @ w.double().t()).to(dtype)
                with cpu_capability_set_to(capability), aten_from_set_to(None):
                    for y in (OPS.linear(x, w), OPS.matmul(x, w.t())):
                        torch.testing.assert_close(
                            y, exact * (not (flushed and dtype == torch.bfloat16)), atol=0, rtol=1e-6
                        )
