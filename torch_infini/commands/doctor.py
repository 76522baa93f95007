"""doctor: checks an installation: every op on every available backend against its float64 reference, and more.

Ops are checked on the CPU with each instruction set that the machine has, and on each GPU if the build has kernels for
it; then threads, and a patched model. The exit status is 1 on failure.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from .._core import products
from .._core.library import cpu_capabilities, cpu_tiles
from ..ops import awaited_providers, chosen_providers
from .env import build
from .errors import CommandError

if TYPE_CHECKING:
    from ..testing.ops import OpInfo

HELP = "check every op on every backend present, and the installation"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ops", help="names, separated by commas (default: all)")
    parser.add_argument("--verbose", action="store_true", help="a line for each op, backend and instruction set")


def check_op(spec: OpInfo, device: str = "cpu") -> None:
    from ..testing import call, check_against_reference, moved, on_cpu

    with torch.no_grad():
        for dtype in spec.dtypes:
            for sample in spec.samples(dtype):
                check_against_reference(spec, sample, dtype, on_cpu(call(spec, moved(sample, device))), device != "cpu")


def check_op_with(spec: OpInfo, capability: str) -> None:
    from ..testing import cpu_capability_set_to

    with cpu_capability_set_to(capability):
        check_op(spec)


def check_threads() -> None:
    """Check that the process has one OpenMP runtime: with two, torch's thread count would not be ours."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return
    runtimes = {line.split()[-1] for line in maps.splitlines() if "libgomp" in line or "libiomp5" in line}
    assert len(runtimes) <= 1, f"two OpenMP runtimes are loaded, so torch.set_num_threads may not reach us: {runtimes}"


def check_providers() -> None:
    """Check that every provider named in INFINI_PROVIDERS is registered, as far as this process can know."""
    missing = awaited_providers()
    assert not missing, f"nothing that this command imports registers {', '.join(missing)}: our kernels compute"


def check_patched_model() -> None:
    """Check that patch_model does not change the logits of a small random LLaMA."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from ..patch import patch_model

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=128,
        max_position_embeddings=64,
    )
    model = LlamaForCausalLM(config).eval()
    ids = torch.randint(0, 128, (2, 16))
    with torch.no_grad():
        before = model(ids).logits
        patch_model(model)
        difference = (model(ids).logits - before).abs().max().item()
    assert difference < 1e-4, f"the patched model's logits differ by {difference}"


def why_not_patched() -> str:
    """Why patch_model cannot be checked here; empty where it can."""
    if not find_spec("transformers"):
        return "transformers is not installed"
    found = version("transformers")
    return "" if found.partition(".")[0] not in ("3", "4") else f"it needs transformers >= 5, found {found}"


def gpus() -> list[str]:
    return [f"cuda:{index}" for index in range(torch.cuda.device_count())]


def checks(ops: Iterable[OpInfo]) -> Iterator[tuple[str, Callable[[], None]]]:
    from ..testing import kernel_levels

    chosen = {(provider.op, provider.device): provider.name for provider in chosen_providers()}
    for spec in ops:
        for backend in spec.backends:
            provider = chosen.get((spec.name, backend))
            by = "" if provider is None else f" by {provider}"
            if backend == "cpu":
                for capability in kernel_levels(spec.name) if provider is None else ():
                    yield f"{spec.name} on cpu, {capability}", partial(check_op_with, spec, capability)
                if provider is not None:
                    yield f"{spec.name} on cpu{by}", partial(check_op, spec)
            elif backend == "cuda":
                for gpu in gpus():
                    yield f"{spec.name} on {gpu}{by}", partial(check_op, spec, gpu)
    yield "INFINI_PROVIDERS", check_providers
    yield "one OpenMP runtime", check_threads
    if not why_not_patched():
        yield "patch_model on a small LLaMA", check_patched_model


def run(arguments: argparse.Namespace) -> int:
    from ..testing.ops import OP_INFOS, all_op_infos

    for name in arguments.ops.split(",") if arguments.ops else ():
        if name not in OP_INFOS:
            raise CommandError(f"there is no op {name!r}; `python -m torch_infini ops` lists them")
    ops = [OP_INFOS[name] for name in arguments.ops.split(",")] if arguments.ops else all_op_infos()
    failed = passed = 0
    print(f"build: {build()}")
    for name, check in checks(ops):
        try:
            check()
        except Exception as error:  # any exception is a finding
            failed += 1
            print(f"FAILED  {name}: {error}")
        else:
            passed += 1
            if arguments.verbose:
                print(f"ok      {name}")
    if why_not_patched():
        print(f"skipped patch_model: {why_not_patched()} (pip install 'torch_infini[hf]')")
    if " " in torch.__path__[0]:  # torch 2.13 does not quote the path for the linker
        print(f"torch.compile: Inductor links nothing where torch's path has a space: {torch.__path__[0]}")
    print(f"tile registers (AMX): {cpu_tiles() or 'in use at level avx512_amx'}")
    for dtype in products.DTYPES:
        print(f"dense products of {str(dtype).removeprefix('torch.')}: {products.described(dtype)}")
    print(f"doctor: {passed} checks passed, {failed} failed ({', '.join(cpu_capabilities() + gpus())})")
    return 1 if failed else 0
