"""Scripts of tests/infinicore_scripts, written from InfiniCore's documents, under `run`: their results are torch's.

A script prints its inputs beside its results, so that expectations are computed here, in float64, from what it printed.
"""

from __future__ import annotations

import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as TF
from torch import Tensor

from support.script_runs import ROOT, Done, run_here, run_process

SCRIPTS = ROOT / "tests" / "infinicore_scripts"
KINDS = ("float32", "float16", "bfloat16")


class Shown:
    """What a script showed: tensors in float64, or their record; and which of it a test has looked at."""

    def __init__(self, done: Done) -> None:
        assert done.returncode == 0, done.stderr
        self.values, self.seen = done.shown(), set[str]()
        self.text = [line for line in done.stdout.splitlines() if not line.startswith('{"name"')]

    def __getitem__(self, name: str) -> Any:
        self.seen.add(name)
        return self.values[name]

    def tensor(self, name: str) -> Tensor:
        record = self[name]
        dtype = torch.float64 if "float" in record["dtype"] else torch.int64
        return torch.tensor(record["values"], dtype=dtype).reshape(record["shape"])

    def check(self, name: str, expected: Tensor, dtype: str = "float32", terms: int = 0) -> None:
        """Compare with float64: an ulp of the dtype, and sums of so many terms of size 4 at most in float32."""
        found = self.tensor(name)
        assert self[name]["dtype"] == f"infinicore.{dtype}", (name, self[name]["dtype"])
        step = torch.finfo(getattr(torch, dtype)).eps if "float" in dtype else 0
        torch.testing.assert_close(
            found, expected.to(found.dtype), rtol=step, atol=4 * (terms + 4) * 2**-24, msg=lambda m: f"{name}: {m}"
        )

    def exactly(self, name: str, expected: Tensor, dtype: str | None = None) -> None:
        assert torch.equal(self.tensor(name), expected.to(self.tensor(name).dtype)), name
        assert self[name]["shape"] == list(expected.shape)
        if dtype is not None:
            assert self[name]["dtype"] == f"infinicore.{dtype}"

    def refused(self, *names: str) -> None:
        for name in names:
            assert self.values.get(f"refused: {name}") is True, f"{name} was not refused, or without a sentence"
            self.seen.add(f"refused: {name}")

    def all_seen(self) -> None:
        assert not set(self.values) - self.seen, "nobody looked at these"


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def rotated(x: Tensor, sin: Tensor, cos: Tensor, interleaved: bool = False) -> Tensor:
    """x [s, h, d], tables [s, d / 2]."""
    sin, cos = sin[:, None], cos[:, None]
    half = x.shape[-1] // 2
    a, b = (x[..., ::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
    pair = (a * cos - b * sin, b * cos + a * sin)
    return torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """q [heads, s, d] over the cache k, v [kv heads, n, d], its last s positions q's own; gives [s, heads, d]."""
    k, v = (t.repeat_interleave(q.shape[0] // t.shape[0], 0) for t in (k, v))
    s, n = q.shape[1], k.shape[1]
    mask = torch.ones(s, n, dtype=torch.bool).tril(n - s)
    scores = (q @ k.mT * scale).masked_fill(~mask, -math.inf)
    return (scores.softmax(-1) @ v).transpose(0, 1)


def numbers_in(text: str) -> Tensor:
    """Those that debug() prints, in brackets."""
    return torch.tensor([float(n) for n in re.findall(r"[^\s,\[\]]+", text)], dtype=torch.float64)


def shown(script: str) -> Shown:
    return Shown(run_here(SCRIPTS / script))


def test_names() -> None:
    """Each of the 123: it is there, a call by the documented signature passes."""
    s = shown("names.py")
    assert len(set(s["names"])) == 123
    assert s["wrong"] == {}


def test_constructors() -> None:
    s = shown("constructors.py")
    assert all(s["devices are equal"]) and s["cuda"] == ["cuda", 1, True] and s["cpu is cuda"] is False
    assert s["index twice"] == "ValueError"
    short = {
        "float": "float32",
        "double": "float64",
        "chalf": "complex32",
        "cfloat": "complex64",
        "cdouble": "complex128",
    }
    short |= {"half": "float16", "short": "int16", "int": "int32", "long": "int64"}
    for name, said in s["dtypes"].items():
        assert said == f"infinicore.{short.get(name, name)}"
    assert len(s["dtypes"]) == 22
    assert s["a dict's key"] == "found" and s["are dtypes"] and s["built from the enum"]
    s.exactly("copied", torch.ones(4, 8), "float16")
    for name in ("float32", "float64", "float16", "bfloat16", "int8", "int16", "int32", "int64", "uint8"):
        s.exactly(f"zeros {name}", torch.zeros(2, 3), name)
        s.exactly(f"ones {name}", torch.ones(2, 3), name)
    s.exactly("zero-dimensional", torch.ones([]), "float32")
    s.exactly("nothing in it", torch.zeros(0, 3), "float32")
    assert s["pinned"] is False
    assert s["like"] == [[4, 8], [8, 1], "infinicore.float16", True]
    assert s["like, but for"] == [[4, 8], "infinicore.int32"]
    s.exactly("strided", torch.arange(12).view(3, 4))
    assert s["strided"]["strides"] == [1, 3]
    array = torch.arange(24)
    array[0] = 100
    s.exactly("blob", array.view(2, 12), "float32")
    s.exactly("strided blob", array.as_strided((3, 4), (1, 6)), "float32")
    s.exactly("ctypes", torch.arange(1, 5), "int64")
    t = torch.tensor([[0, 1, 2], [3, 4, -1]])
    s.exactly("torch", t, "float32")
    assert s["torch's memory"]
    s.exactly("torch transposed", t.t())
    assert s["torch transposed"]["strides"] == [1, 3]
    for name in ("float16", "bfloat16", "int8", "int16", "int32", "int64", "uint8"):
        s.exactly(f"torch torch.{name}", torch.arange(5), name)
    s.exactly("numpy", torch.arange(6).view(3, 2), "int32")
    s.exactly("numpy as half", torch.tensor([0.5, 1.5]), "float16")
    s.exactly("numpy as bfloat16", torch.tensor([0.5, 1.5]), "bfloat16")
    s.exactly("list", torch.tensor([[1.5, 2.5], [3.5, 4.5]]), "float64")
    s.exactly("list of integers", torch.tensor([1, 2, 3]), "int64")
    s.exactly("list as int32", torch.tensor([1, 2, 3]), "int32")
    s.exactly("tuple", torch.tensor([[1, 2], [3, 4]]), "float32")
    s.refused("numpy of a list", "numpy of nothing", "list of an array", "list of nothing")
    s.all_seen()


def test_tensors(capfd: pytest.CaptureFixture[str]) -> None:
    s = shown("tensors.py")
    x = s.tensor("x")
    assert s["about x"] == [[2, 3, 4], [2, 3, 4], 3, [12, 4, 1], 12, 3, 24, True]
    assert (
        s["shape is a list"]
        and s["its dtype and device"] == [True, True, "cpu:0"]
        and s["an element each"] == [1, True]
    )
    views = {
        "permute": x.permute(2, 0, 1),
        "view": x.view(6, 4),
        "view as one": x.view(24),
        "as_strided": x.as_strided((2, 4), (12, 1)),
        "narrow": x.narrow(1, 1, 2),
        "unsqueeze": x.unsqueeze(1),
        "squeeze": x,
        "top narrow": x.narrow(2, 1, 3),
        "top unsqueeze": x.unsqueeze(0),
    }
    for name, expected in views.items():
        s.exactly(name, expected, "float32")
    assert s["top squeeze"]["shape"] == [3]
    assert s["permute"]["strides"] == [1, 12, 4] and s["narrow"]["strides"] == [12, 4, 1]
    assert s["at the same address"] == [0, 0, 4 * 4]
    # InfiniCore's unsqueeze gives stride 0, which its is_contiguous does not pass over.
    contiguous = {"view", "view as one", "squeeze", "top squeeze"}
    assert {name for name, is_one in s["contiguous views"].items() if is_one} == contiguous
    x[:, 1:] = 0
    s.exactly("x after a write through a view", x)
    s.exactly("made contiguous", x.permute(1, 2, 0))
    assert s["made contiguous"]["strides"] == [8, 2, 1]
    assert s["is its own"] and s["already contiguous"] and s["to where it is"] and s["copy_ returns"] is None
    s.exactly("copied between layouts", x.permute(1, 2, 0))
    a, b = s.tensor("a"), s.tensor("b")
    s.check("a + b", a + b)
    s.check("a * b", a * b)
    s.check("a @ b'", a @ b.T, terms=5)
    s.check("c += b", a + b)
    assert s["in place"] and s["a method of one's own"] == 2
    assert torch.equal(torch.tensor(s["debug to a file"], dtype=torch.float64), a.flatten())
    numbers = numbers_in(capfd.readouterr().out.partition("\n")[2])  # C++ writes to the file descriptor
    torch.testing.assert_close(numbers, a.flatten(), rtol=1e-5, atol=0)
    s.refused(
        "view of other size", "view that strides forbid", "narrow out of range", "squeeze of 3", "copy of another shape"
    )
    s.all_seen()


def test_operators() -> None:
    s = shown("operators.py")
    for kind in KINDS:
        a, b, m, n, p, q, w, c, d = (s.tensor(f"{name} {kind}") for name in "abmnpqwcd")
        s.check(f"add {kind}", a + b, kind)
        s.check(f"mul {kind}", a * b, kind)
        s.check(f"add out {kind}", a + b, kind)
        s.check(f"mul over a {kind}", a * b, kind)
        assert s[f"returned {kind}"]
        s.check(f"matmul {kind}", m @ n, kind, 8)
        s.check(f"matmul alpha {kind}", m @ n / 2, kind, 8)
        s.check(f"matmul out {kind}", m @ n, kind, 8)
        s.check(f"batched {kind}", p @ q, kind, 8)
        for suffix in ("", "_"):
            s.check(f"its sum{suffix} {kind}", c + d, kind)
            rounded = s.tensor(f"its sum{suffix} {kind}")  # whether the norm is of the rounded sum is the kernel's
            y, step = s.tensor(f"add_rms_norm{suffix} {kind}"), torch.finfo(getattr(torch, kind)).eps
            for sums in (c + d, rounded):
                torch.testing.assert_close(y, rms_norm(sums, w, 1e-6), rtol=3 * step, atol=1e-5)
            s.check(f"add_rms_norm{suffix} {kind}", y, kind)
        assert s[f"add_rms_norm_ returns {kind}"] is None
    x = s.tensor("x")
    for name in ("rearranged", "rearranged out"):
        s.exactly(name, x.permute(2, 1, 0))
        assert s[name]["strides"] == [12, 3, 1]
    s.exactly("narrowed", x.narrow(1, 1, 2))

    keys = torch.cat([s.tensor("ak 0"), s.tensor("ak 1")], 1)
    values = torch.cat([s.tensor("av 0"), s.tensor("av 1")], 1)
    s.check("attention 0", attention(s.tensor("aq 0"), keys[:, :3], values[:, :3], 32**-0.5), terms=40)
    s.check("attention 1", attention(s.tensor("aq 1"), keys, values, 32**-0.5), terms=40)
    for name, expected in (("k_cache", keys), ("v_cache", values)):
        s.exactly(name, TF.pad(expected, (0, 0, 0, 12)))

    assert s["caches are returned"] == [True, True]
    k, v, q = (s.tensor(name) for name in ("pk", "pv", "pq"))
    cache = torch.zeros(6, 4, 2, 16, dtype=torch.float64)
    cache.view(24, 2, 16)[[16, 17, 18, 19, 4, 8, 9]] = k
    s.exactly("paged cache", cache.transpose(1, 2))
    parts = [slice(0, 5), slice(5, 7)]
    heads_first = [[t[part].transpose(0, 1) for t in (q, k, v)] for part in parts]
    s.check("prefill", torch.cat([attention(*each, 0.25) for each in heads_first]), terms=40)
    k1, v1, q1 = (s.tensor(name) for name in ("pk1", "pv1", "pq1"))
    longer = [
        [q1[i, :, None], *(torch.cat([old, new[i, :, None]], 1) for old, new in ((each[1], k1), (each[2], v1)))]
        for i, each in enumerate(heads_first)
    ]
    s.check("decode", torch.cat([attention(*each, 0.25) for each in longer]), terms=40)
    assert s["tables"]["values"] == [4, 1, 2, -1]
    s.refused("shapes", "dtypes", "products", "too far")
    assert s.seen | {f"r{i}" for i in range(1, 10)} >= set(s.values)


def test_end_to_end() -> None:
    """Through the command line, its arguments and its standard output, which C++ writes to as well."""
    done = run_process(SCRIPTS / "end_to_end.py", "cpu")
    assert done.returncode == 0, done.stderr
    *printed, last = done.stdout.splitlines()
    assert last == "shape [1, 8, 128] infinicore.float16 cpu:0"
    numbers = numbers_in(" ".join(printed[1:])).tolist()
    assert printed[0].startswith("Tensor: ") and numbers == [0.75] * 8 * 128  # of one position, v's own row


def test_end_to_end_without_a_gpu() -> None:
    """What the document's own device gives on a machine that has none: an error, in the script's line."""
    if torch.cuda.is_available():
        pytest.skip("this machine has one")
    done = run_here(SCRIPTS / "end_to_end.py")
    assert done.returncode == 1
    assert 'there is no device "cuda:0"' in done.stderr.splitlines()[-1]
    assert "end_to_end.py" in done.stderr and "torch_infini/commands" not in done.stderr


def test_contexts() -> None:
    s = shown("contexts.py")
    assert (
        s["raw"] and s["is a CPU"] and s["as a device"] and s["CPUs"] == [1, 1] and s["same functions"] == [True, True]
    )
    assert s["synchronised"] == [None] * 4 and s["a stream"]
    assert s["of another thread"] == 0
    s.check("computed there", TF.silu(torch.ones(2, dtype=torch.float64)))
    assert s["not recorded"] == [False, True, True] and s["milliseconds"] and s["recorded"] == [True, True]
    assert s["without timing"] == [True, False]
    s.refused("elapsed_time")
    s.all_seen()


def test_graphs() -> None:
    s = shown("graphs.py")
    assert s["before"] is False and s["during"] is True and s["after"] == [False, True] and s["not recording"] is False
    weight, table, norm = s.tensor("weight"), s.tensor("table"), s.tensor("norm")
    for step in (0, 1, 2, "thread"):
        hidden = rms_norm(2 * s.tensor(f"x {step}"), norm, 1e-6)
        s.check(f"y {step}", TF.silu(hidden @ weight.T), terms=40)
        if step != "thread":
            s.check(f"z {step}", 2 * hidden @ weight.T, terms=40)
            s.exactly(f"rows {step}", table[[step, 9 - step, 5]])
    s.exactly("the document's product", torch.zeros(4))
    x = s.tensor("x with")
    s.check("out with", x * TF.silu(x))
    s.exactly("nothing yet", torch.zeros(3))
    s.exactly("counted", torch.full((3,), 5.0))
    s.refused("shapes", "a graph")
    # What the document calls for is a pair of calls; InfiniCore warns of a recording inside one, and so do we.
    s.all_seen()


def test_modules() -> None:
    s = shown("modules.py")
    layers = [f"layers.{i}.{name}" for i in (0, 1) for name in ("mlp.down_proj.bias", "mlp.down_proj.weight")]
    layers += [
        f"layers.{i}.{name}" for i in (0, 1) for name in ("mlp.gate_proj.weight", "mlp.up_proj.weight", "norm.weight")
    ]
    parameters = sorted(["embed.weight", "head", *layers])
    buffers = ["layers.0.scale", "layers.1.scale"]
    assert s["parameters"] == parameters and s["buffers"] == buffers and s["names"] == sorted(parameters + buffers)
    assert s["children"] == ["embed", "layers"]
    inner = ["", ".norm", ".mlp", ".mlp.gate_proj", ".mlp.up_proj", ".mlp.down_proj"]
    assert s["modules"] == sorted(["", "embed", "layers", *(f"layers.{i}{name}" for i in (0, 1) for name in inner)])
    assert s["counts"] == [12, 2, 15, 2] and s["list"] == [True, True, 1] and s["copied into place"]
    state = {name: s.tensor(name) for name in s["names"]}
    x = state["embed.weight"][torch.tensor([[3, 0, 19], [5, 5, 1]])]
    for i in (0, 1):
        of = {name: state[f"layers.{i}.{name}"] for name in ("norm.weight", "mlp.down_proj.bias")}
        down, gate, up = (state[f"layers.{i}.mlp.{name}_proj.weight"] for name in ("down", "gate", "up"))
        h = rms_norm(x, of["norm.weight"], 1e-5)
        x = x + (h @ up.T * TF.silu(h @ gate.T)) @ down.T + of["mlp.down_proj.bias"]
    found, expected = s.tensor("logits"), x @ state["head"].T
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-6 * float(expected.abs().max()))
    assert s["eval"] == [True, False] and s["appended"] == 3
    s.refused("missing", "surplus", "parameter")
    assert s["linear"] == [[4, 6], True, "infinicore.float32", "cpu:0"]
    s.check("linear y", s.tensor("linear x") @ s.tensor("linear weight").T + s.tensor("linear bias"), terms=7)
    s.check("norm y", rms_norm(s.tensor("norm x"), s.tensor("norm weight"), 1e-6), terms=8)
    angles = torch.outer(torch.tensor([4.0, 5.0, 6.0]), 10000.0 ** -(torch.arange(0, 8, 2) / 8)).double()
    s.check("rope y", rotated(s.tensor("rope x")[0], angles.sin(), angles.cos())[None], terms=8)
    s.check("gptj y", rotated(s.tensor("gptj x")[0], angles.sin(), angles.cos(), interleaved=True)[None], terms=8)
    assert s["rope in place"] and s["a tensor too"]
    s.all_seen()


def sampled(logits: Tensor, random_val: float, topp: float, topk: int, temperature: float) -> int:
    """The rule of InfiniCore's random_sample."""
    if 0 in (random_val, topp, temperature) or topk == 1:
        return int(logits.argmax())
    ordered, places = logits.sort(descending=True, stable=True)
    sums = ((ordered - ordered[0]) / temperature).exp().cumsum(0)
    threshold = random_val * min(float(sums[min(topk, len(sums)) - 1]), topp * float(sums[-1]))
    return int(places[int((sums >= threshold).nonzero()[0])])


def test_functional() -> None:
    s = shown("functional.py")
    for kind in KINDS:
        scores = s.tensor(f"scores {kind}")
        mask = torch.ones(3, 5, dtype=torch.bool).tril(2)
        for name in ("causal_softmax", "causal_softmax over"):
            s.check(f"{name} {kind}", scores.masked_fill(~mask, -math.inf).softmax(-1), kind, 5)
        x, w, up, gate = (s.tensor(f"{name} {kind}") for name in ("x", "w", "up", "gate"))
        s.check(f"rms_norm {kind}", rms_norm(x, w, 1e-5), kind, 8)
        s.check(f"rms_norm eps {kind}", rms_norm(x, w, 0.5), kind, 8)
        s.check(f"rms_norm out {kind}", rms_norm(x, w, 1e-6), kind, 8)
        for name in ("silu", "silu in place"):
            s.check(f"{name} {kind}", TF.silu(x), kind)
        for name in ("swiglu", "swiglu out"):
            s.check(f"{name} {kind}", up * TF.silu(gate), kind)
        weight, bias = s.tensor(f"weight {kind}"), s.tensor(f"bias {kind}")
        s.check(f"linear {kind}", x @ weight.T, kind, 8)
        for name in ("linear bias", "linear out"):
            s.check(f"{name} {kind}", x @ weight.T + bias, kind, 9)
        table = s.tensor(f"table {kind}")
        s.exactly(f"embedding {kind}", table[torch.tensor([[1, 9], [0, 4]])], kind)
        s.exactly(f"embedding out {kind}", table[[7, 7, 2]], kind)
    s.check("rms_norm of both", rms_norm(s.tensor("x16"), s.tensor("w32"), 1e-5), "bfloat16", 8)
    x, sin, cos = (s.tensor(name) for name in ("rope x", "sin", "cos"))
    tables = sin[[3, 0, 15]], cos[[3, 0, 15]]
    for name in ("rope", "rope neox", "rope over"):
        s.check(name, rotated(x, *tables), terms=2)
    s.check("rope gptj", rotated(x, *tables, interleaved=True), terms=2)
    logits = s.tensor("logits")
    tokens = {name: s[name] for name in s.values if name.startswith("sample ")}
    assert len({record["values"][0] for record in tokens.values()}) > 2
    for name, record in tokens.items():
        if name == "sample out":
            assert (record["dtype"], record["shape"]) == ("infinicore.int64", [])
            assert record["values"] == [sampled(logits, 0.5, 0.9, 50, 1.3)]
        else:
            random_val, topp, topk, temperature = map(float, name.split()[1:])
            assert (record["dtype"], record["shape"]) == ("infinicore.int32", [])
            assert record["values"] == [sampled(logits, random_val, topp, int(topk), temperature)], name
    s.refused("normalized_shape")
    s.all_seen()


def test_conversion() -> None:
    s = shown("conversion.py")
    common = ("float16", "float32", "bfloat16", "int8", "int16", "int32", "int64", "uint8")
    assert s["torch's"] == {name: f"torch.{name}" for name in common}
    assert s["ours"] == {name: f"infinicore.{name}" for name in common}
    numbers = {name: name for name in common if name != "bfloat16"}
    assert s["numpy's"] == numbers
    assert s["of numpy"] == {name: f"infinicore.{name}" for name in [*numbers, "float64"]}
    assert s["of numpy's types"] == "infinicore.float32"
    s.refused("to_torch_dtype", "to_infinicore_dtype", "numpy_to_infinicore_dtype", "infinicore_to_numpy_dtype")
    assert s["there and back"] and s["one memory"] == [7, True] and s["an array"] == [True, 7, True]
    assert s["numpy by DLPack"] and s["strides"] == [[4, 3], [1, 4], [4, 3]] and s["turned"]
    s.all_seen()


def test_low_level() -> None:
    s = shown("low_level.py")
    a, b, w, n = (s.tensor(name) for name in "abwn")
    assert s["DataType"] and s["Device.Type"] == s["types"] and s["Device"] == [True, 0, True]
    assert s["about a"] == [[3, 4], [4, 1], 2, 12, 4, 4, True, False] and s["its dtype"] == [True, True, True]
    for name, expected in {"add": a + b, "add_": a + b, "mul_": a * b, "silu": TF.silu(a), "replayed": 1 + b}.items():
        s.check(name, expected)
    s.check("linear", a @ w.T, terms=4)
    s.check("matmul_", a @ w.T / 2, terms=4)
    s.check("swiglu_", a * TF.silu(b))
    for name in ("rms_norm", "rms_norm_"):
        s.check(name, rms_norm(a, n, 1e-6), terms=4)
    mask = torch.ones(3, 4, dtype=torch.bool).tril(1)
    s.check("softmax", a.masked_fill(~mask, -math.inf).softmax(-1), terms=4)
    s.exactly("ones", torch.ones(2), "int64")
    s.exactly("blob", torch.arange(6).view(2, 3), "float32")
    s.exactly("strided", torch.arange(6).view(2, 3).T, "float32")
    s.exactly("view", a.flatten()[2:5])
    assert s["event"] is True and s["RoPEAlgo"] == ["GPT_J", "GPT_NEOX"]
    s.all_seen()


NTOPS = """
import torch as torch_itself
import torch

def silu(input, inplace=False):
    raise AssertionError("only for CUDA")
"""


def test_without_ntops() -> None:
    done = run_here(SCRIPTS / "with_ntops.py")
    assert done.stdout.splitlines()[:3] == ["use_ntops False", "has ntops False", "switched off False"], done


def test_with_ntops(tmp_path: Path) -> None:
    """In a process: a package beside the script that says it is ntops."""
    shutil.copy(SCRIPTS / "with_ntops.py", tmp_path)
    (tmp_path / "ntops").mkdir()
    (tmp_path / "ntops" / "__init__.py").write_text("from . import torch\n")
    (tmp_path / "ntops" / "torch.py").write_text(NTOPS)
    done = run_process(tmp_path / "with_ntops.py")
    assert done.returncode == 0, done.stderr
    expected = ["use_ntops True", "has ntops True", "module ntops True", "switched off False"]
    assert [line for line in done.stdout.splitlines() if line in expected] == expected, done.stdout
