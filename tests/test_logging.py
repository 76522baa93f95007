"""INFINI_LOG: the lines of each level, from whatever door the call comes, and nothing at all when it is off.

The variable is read at import, hence a process for each test.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from support.fresh_python import run_python

ROOT = Path(__file__).resolve().parent.parent

IMPORTS = "import torch, torch_infini\ninfini = torch.ops.infini\n"


def python(code: str, level: str | None) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "INFINI_LOG"}
    if level is not None:
        environment["INFINI_LOG"] = level
    # A log that is on imports Dynamo, which takes three seconds.
    return run_python(code, env=environment, imported="torch._dynamo" if level in ("1", "2", "3") else "torch")


def run(code: str, level: str | None, before: str = "") -> tuple[list[str], list[str]]:
    """What the code printed, and the lines that it logged; `before` comes before the import."""
    done = python(before + IMPORTS + code, level)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines(), done.stderr.splitlines()


@pytest.mark.parametrize("level", [None, "", "0"])
def test_off(level: str | None) -> None:
    code = (
        "import sys\n"
        "infini.rms_norm(torch.ones(2, 4), torch.ones(4))\n"
        "print(torch._C._dispatch_dump('infini::rms_norm'))\n"
        "print('torch._dynamo' in sys.modules)"
    )
    printed, lines = run(code, level)
    assert lines == []
    (kernel,) = (line for line in printed if line.startswith("CPU"))
    assert "rms_norm_torch.cpp" in kernel
    assert printed[-1] == "False"


@pytest.mark.parametrize("level", ["4", "yes", " "])
def test_bad_level(level: str) -> None:
    assert python(IMPORTS, level).stderr.splitlines()[-1] == (
        "ImportError: torch_infini: INFINI_LOG must be 0 (off), 1 (names of the ops), 2 (and their arguments) or 3 "
        f"(and statistics of the arguments' values), got {level!r}"
    )


CALLS = """
x = torch.arange(8.0).view(2, 4)
weight = torch.ones(4)
infini.rms_norm(x, weight)
infini.rms_norm(x=x.bfloat16(), weight=weight, rounding=1)
infini.rms_norm.out(x[:, :3], weight[:3], 0.5, out=torch.empty(2, 3))
assert infini.silu_(x.clone()) is None
infini.swiglu(x)
infini.swiglu(x, torch.zeros(2, 4))
infini.embedding(torch.tensor([1, 0]), x)
infini.silu(torch.tensor(3.0))
infini.silu(torch.empty(0, 4))
q = torch.ones(1, 1, 1, 4)
infini.attention(q, q, q, torch.tensor([[[[True]]]]), causal=False)
infini.silu(torch.tensor([1.0, float("nan"), -3.0, float("inf"), float("-inf")]))
infini.silu(torch.full((2,), float("nan"), dtype=torch.float16))
"""


def test_names() -> None:
    _, lines = run(CALLS, "1")
    assert lines == [
        "infini::rms_norm",
        "infini::rms_norm",
        "infini::rms_norm.out",
        "infini::silu_",
        "infini::swiglu",
        "infini::swiglu",
        "infini::embedding",
        *["infini::silu"] * 2,
        "infini::attention",
        *["infini::silu"] * 2,
    ]


def test_arguments() -> None:
    _, lines = run(CALLS, "2")
    assert lines == [
        "infini::rms_norm(x=float32[2, 4], weight=float32[4], eps=1e-06, rounding=0)",
        "infini::rms_norm(x=bfloat16[2, 4], weight=float32[4], eps=1e-06, rounding=1)",
        "infini::rms_norm.out(x=float32[2, 3] strides [4, 1], weight=float32[3], eps=0.5, rounding=0, "
        "out=float32[2, 3])",
        "infini::silu_(x=float32[2, 4])",
        "infini::swiglu(gate=float32[2, 4], up=None)",
        "infini::swiglu(gate=float32[2, 4], up=float32[2, 4])",
        "infini::embedding(ids=int64[2], weight=float32[2, 4], first=0, total=None)",
        "infini::silu(x=float32[])",
        "infini::silu(x=float32[0, 4])",
        "infini::attention(q=float32[1, 1, 1, 4], k=float32[1, 1, 1, 4], v=float32[1, 1, 1, 4], mask=bool[1, 1, 1, 1], "
        "kv_lens=None, causal=False, scale=None, softcap=0.0, sinks=None)",
        "infini::silu(x=float32[5])",
        "infini::silu(x=float16[2])",
    ]


def test_statistics() -> None:
    _, lines = run(CALLS, "3")
    x = "{min 0, max 7, mean 3.5, nan 0, inf 0}"
    ones = "{min 1, max 1, mean 1, nan 0, inf 0}"
    assert lines == [
        f"infini::rms_norm(x=float32[2, 4] {x}, weight=float32[4] {ones}, eps=1e-06, rounding=0)",
        f"infini::rms_norm(x=bfloat16[2, 4] {x}, weight=float32[4] {ones}, eps=1e-06, rounding=1)",
        "infini::rms_norm.out(x=float32[2, 3] strides [4, 1] {min 0, max 6, mean 3, nan 0, inf 0}, "
        f"weight=float32[3] {ones}, eps=0.5, rounding=0, out=float32[2, 3])",
        f"infini::silu_(x=float32[2, 4] {x})",
        f"infini::swiglu(gate=float32[2, 4] {x}, up=None)",
        f"infini::swiglu(gate=float32[2, 4] {x}, up=float32[2, 4] {{min 0, max 0, mean 0, nan 0, inf 0}})",
        f"infini::embedding(ids=int64[2], weight=float32[2, 4] {x}, first=0, total=None)",
        "infini::silu(x=float32[] {min 3, max 3, mean 3, nan 0, inf 0})",
        "infini::silu(x=float32[0, 4] {nan 0, inf 0})",
        f"infini::attention(q=float32[1, 1, 1, 4] {ones}, k=float32[1, 1, 1, 4] {ones}, v=float32[1, 1, 1, 4] {ones}, "
        "mask=bool[1, 1, 1, 1], kv_lens=None, causal=False, scale=None, softcap=0.0, sinks=None)",
        "infini::silu(x=float32[5] {min -3, max 1, mean -1, nan 1, inf 2})",
        "infini::silu(x=float16[2] {nan 2, inf 0})",
    ]


@pytest.mark.full
def test_every_overload_of_every_op() -> None:
    """One line for each call of each form, and the results of the op as ever."""
    code = """
from torch_infini.testing.ops import all_op_infos
from torch_infini.testing import as_tuple, call, check_against_reference

for spec in all_op_infos():
    for dtype in spec.dtypes:
        for sample in list(spec.samples(dtype))[:3]:
            print(f"infini::{spec.name}(")
            result = call(spec, sample)
            check_against_reference(spec, sample, dtype, result)
            if spec.outputs:
                print(f"infini::{spec.name}.out(")
                outs = dict(zip(spec.out_names, map(torch.empty_like, as_tuple(result)), strict=True))
                returned = spec.out(*sample.args, **sample.kwargs, **outs)
                assert all(a is b for a, b in zip(as_tuple(returned), outs.values(), strict=True))
                check_against_reference(spec, sample, dtype, returned)
            if spec.inplace:
                print(f"infini::{spec.name}_(")
                place = spec.arguments.index(spec.inplace)
                args = [a.clone() if i == place else a for i, a in enumerate(sample.args)]
                assert getattr(infini, f"{spec.name}_")(*args, **sample.kwargs) is None
                check_against_reference(spec, sample, dtype, args[place])
"""
    printed, lines = run(code, "3")
    assert [line[: line.index("(") + 1] for line in lines] == printed
    assert len({line.split("(")[0] for line in lines}) >= 20


@pytest.mark.full
def test_compiled_graph() -> None:
    """A line when the graph runs, none while it is made; also where Dynamo leaves the call itself to Python."""
    code = """
import sys
f = torch.compile(lambda x, w: infini.silu(infini.rms_norm(x + 1, w)) * 2, fullgraph=True, dynamic=True)
w = torch.ones(4)
for rows in (2, 3):
    f(torch.zeros(rows, 4), w)
    print("ran", file=sys.stderr)

@torch._dynamo.disable(recursive=False)
def left_to_python(x):
    return infini.silu(x)

g = torch.compile(lambda x: left_to_python(x) + 1)
torch._dynamo.utils.counters.clear()
g(torch.ones(2, 3))
frames = torch._dynamo.utils.counters["frames"]["total"]
assert frames <= 3, f"Dynamo compiled {frames} frames: the lambda, its rest, left_to_python, and what else?"
"""
    _, lines = run(code, "2")
    expected = []
    for rows in (2, 3):
        expected += [
            f"infini::rms_norm(x=float32[{rows}, 4], weight=float32[4], eps=1e-06, rounding=0)",
            f"infini::silu(x=float32[{rows}, 4])",
            "ran",
        ]
    assert lines == [*expected, "infini::silu(x=float32[2, 3])"]


@pytest.mark.full
def test_patched_model() -> None:
    code = """
from transformers import LlamaConfig, LlamaForCausalLM

config = LlamaConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, vocab_size=64)
model = LlamaForCausalLM(config).eval()
torch_infini.patch_model(model)
with torch.no_grad():
    model(torch.tensor([[1, 2, 3]]))
"""
    _, lines = run(code, "1")
    assert {"infini::rms_norm", "infini::attention", "infini::swiglu"} <= set(lines)


def test_trials_of_patch_model() -> None:
    """Calls that patch_model makes for itself are marked, those of the model are not."""
    code = """
import sys
from transformers import LlamaConfig, LlamaForCausalLM

config = LlamaConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, vocab_size=64)
model = LlamaForCausalLM(config).eval()
torch_infini.patch_model(model, verify=True)
print("patched", file=sys.stderr)
with torch.no_grad():
    model(torch.tensor([[1, 2, 3]]))
"""
    _, lines = run(code, "1")
    at = lines.index("patched")
    assert at > 20 and all(line.startswith("[patch_model trial] infini::") for line in lines[:at])
    assert len(lines) > at + 5 and all(line.startswith("infini::") for line in lines[at + 1 :])


def test_line_comes_before_the_kernel() -> None:
    """What ends the process at once leaves the line behind; so does an error, and its sentence is the op's."""
    code = """
import os, sys
try:
    infini.rms_norm(torch.ones(2, 4), torch.ones(3))
except RuntimeError as error:
    os.write(2, f"{error}\\n".encode())
os._exit(0)
"""
    _, lines = run(code, "1")
    assert lines == [
        "infini::rms_norm",
        "infini::rms_norm: weight must have shape [4] to match the last dimension of x, got [3]",
    ]


def test_what_the_ops_refuse() -> None:
    """The log describes it, and the op's own sentence is raised: no tensor, no memory, a dtype without arithmetic."""
    code = """
gone = torch.ones(3, 8)
gone.untyped_storage().resize_(0)
packed = torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
for x in (None, gone, torch.ones(2, 8).to(torch.float8_e4m3fn), packed):
    try:
        infini.rms_norm(x, torch.ones(8))
    except RuntimeError as error:
        print(str(error)[:32])
"""
    printed, lines = run(code, "3")
    assert [line.split(", weight")[0].split("=", 1)[1] for line in lines] == [
        "None",
        "float32[3, 8] {no memory}",
        "float8_e4m3fn[2, 8] {min 1, max 1, mean 1, nan 0, inf 0}",
        "float4_e2m1fn_x2[4] {no statistics: \"copy_kernel\" not implemented for 'Float4_e2m1fn_x2'}",
    ]
    assert printed[:3] == ["infini::rms_norm: x must be a te", "infini::rms_norm: x must have it", printed[2]]
    assert len(printed) == 4


def test_statistics_are_seen_by_nobody() -> None:
    """Neither by autograd, nor by modes, nor by code that asks whether gradients or inference are on."""
    code = """
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

class Functions(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        print("function", function)
        return function(*args, **(kwargs or {}))

class Dispatches(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        print("dispatch", function)
        return function(*args, **(kwargs or {}))

x = torch.ones(2, 3, requires_grad=True)
kernel, keys = torch.library.get_kernel("infini::silu", "CPU"), torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
with Functions(), Dispatches():
    infini.silu(x)
with Functions():
    kernel.call_boxed(keys, x)  # straight to the kernel, as compiled C++ does
with torch.autograd.graph.saved_tensors_hooks(lambda t: print("saved"), lambda t: t):
    y = infini.silu(x)
try:
    y.sum().backward()
except RuntimeError as said:
    print(str(said)[:29], torch.is_grad_enabled(), y._version)
with torch.inference_mode():
    print(infini.silu(x).is_inference(), torch.is_inference_mode_enabled())
"""
    printed, lines = run(code, "3")
    assert len(lines) == 4
    assert printed == [
        "function infini.silu",
        "dispatch infini.silu.default",
        "infini::silu has no backward: True 0",
        "True True",
    ]


def test_handlers_of_the_program() -> None:
    """Those configured before the import are used, and no other; the logger's own level can silence it."""
    configured = "import logging, sys\nlogging.basicConfig(stream=sys.stdout, format='%(name)s %(message)s')\n"
    calls = (
        "infini.silu(torch.ones(2))\n"
        "import logging\n"
        "logging.getLogger('torch_infini.ops').setLevel('WARNING')\n"
        "infini.silu(torch.ones(2))"
    )
    printed, lines = run(calls, "1", before=configured)
    assert (printed, lines) == (["torch_infini.ops infini::silu"], [])
    # A handler set up later does not double the lines.
    printed, lines = run(configured + calls, "1")
    assert (printed, lines) == ([], ["infini::silu"])
