"""The import lines of scripts that are written for InfiniLM: each gives torch_infini's own objects.

PagedKVCacheConfig's first argument is a number of blocks where a script imports it, and bytes in compat.infinilm.
"""

from __future__ import annotations

import importlib
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from torch_infini import compat
from torch_infini.compat import infinilm
from torch_infini.compat.infinilm import cache
from torch_infini.compat.infinilm.cache.sized_in_blocks import PagedKVCacheConfig
from torch_infini.compat.infinilm.lib import _infinilm

ROOT = Path(__file__).resolve().parent.parent
LINES = (
    "import _infinilm",
    "import infinilm",
    "import infinilm.cache.cache",
    "import infinilm.distributed.dist_config",
    "import infinilm.lib._infinilm as _infinilm",
    "from infinilm.lib import _infinilm",
    "from _infinilm import CacheConfig, Config, DistConfig, HookRegistry, InferEngine, LlamaConfig",
    "from _infinilm import PagedKVCacheConfig, StaticKVCacheConfig",
    "from infinilm import AutoConfig, DistConfig, InferEngine, LlamaConfig",
    "from infinilm.cache import CacheConfig, PagedKVCacheConfig, StaticKVCacheConfig",
    "from infinilm.cache.cache import CacheConfig, PagedKVCacheConfig, StaticKVCacheConfig",
    "from infinilm.distributed import DistConfig",
    "from infinilm.distributed.dist_config import DistConfig",
    "from infinilm.infer_engine import GenerationConfig, InferEngine",
    "from infinilm.lib._infinilm import InferEngine, LlamaConfig, PagedKVCacheConfig",
    "from infinilm.auto_config import AutoConfig",
    "from infinilm.cache_utils import Cache, DynamicCache, StaticCache",
    "from infinilm.configuration_utils import PretrainedConfig",
    "from infinilm.generation import GenerationMixin",
    "from infinilm.generation.utils import GenerationMixin, infini_to_numpy",
    "from infinilm.llm import LLM, AsyncLLMEngine, EngineConfig, FinishReason, LLMEngine, SamplingParams",
    "from infinilm.llm import InferenceRequest, RequestOutput, RequestStatus, TokenOutput",
    "from infinilm.llm.cache_manager import BlockManager",
    "from infinilm.llm.llm import LLM, AsyncLLMEngine, EngineConfig, LLMEngine",
    "from infinilm.llm.request import FinishReason, InferenceRequest, RequestOutput, RequestStatus, TokenOutput",
    "from infinilm.llm.sampling_params import SamplingParams",
    "from infinilm.llm.scheduler import Scheduler",
    "from infinilm.modeling_utils import check_parameters, get_model_state_dict",
    "from infinilm.modeling_utils import load_model_state_dict_by_file, load_model_state_dict_by_tensor",
    "from infinilm.models.llama import AutoLlamaModel, LlamaConfig, LlamaForCausalLM",
    "from infinilm import LLM, AsyncLLMEngine, AutoLlamaModel, RequestOutput, SamplingParams, TokenOutput",
    "from infinilm import *",
)
WAYS = (
    "_infinilm",
    "infinilm",
    "infinilm.cache",
    "infinilm.cache.cache",
    "infinilm.infer_engine",
    "infinilm.lib._infinilm",
)


@pytest.fixture(autouse=True)
def installed() -> Iterator[None]:
    compat.install()
    yield
    compat.uninstall()


@pytest.mark.parametrize("line", LINES)
def test_a_line(line: str) -> None:
    scope: dict[str, Any] = {}
    exec(line, scope)
    del scope["__builtins__"]
    assert scope
    _, _, module = line.partition("from ")
    module = module.partition(" ")[0].replace("_infinilm", "infinilm.lib._infinilm") if module[:1] == "_" else module
    for name, found in scope.items():
        if name == "PagedKVCacheConfig":
            assert found is PagedKVCacheConfig
        elif line.startswith("from "):
            real = importlib.import_module(f"torch_infini.compat.{module.partition(' ')[0]}")
            alias = f"{module.partition(' ')[0]}.{name}"
            assert found is (sys.modules[alias] if alias in compat.OVERRIDES else getattr(real, name))
        else:
            assert found.LlamaConfig is infinilm.LlamaConfig
    if "_infinilm" in scope:
        assert scope["_infinilm"] is sys.modules["infinilm.lib._infinilm"]


@pytest.mark.parametrize("way", WAYS)
def test_blocks_by_position(way: str) -> None:
    """By name both numbers mean the same everywhere; the class is a subclass, which workers can unpickle."""
    theirs, ours = importlib.import_module(way).PagedKVCacheConfig, _infinilm.PagedKVCacheConfig
    config = pickle.loads(pickle.dumps(theirs(9, 8)))
    assert isinstance(config, ours) and type(config).__name__ == "PagedKVCacheConfig"
    assert (config.num_blocks(), config.max_kv_memory_bytes(), config.block_size()) == (9, None, 8)
    assert repr(config) == "PagedKVCacheConfig(num_blocks=9, block_size=8)"
    assert (theirs(9).block_size(), theirs(num_blocks=3).num_blocks()) == (16, 3)
    for cls in (theirs, ours):
        by_name = cls(max_kv_memory_bytes=1 << 20, block_size=4)
        assert (by_name.num_blocks(), by_name.max_kv_memory_bytes(), by_name.block_size()) == (None, 1 << 20, 4)
        with pytest.raises(ValueError, match="one of max_kv_memory_bytes and num_blocks must be given, got none"):
            cls()
    assert infinilm.PagedKVCacheConfig(9).max_kv_memory_bytes() == 9
    assert infinilm.PagedKVCacheConfig is cache.PagedKVCacheConfig is ours is not theirs


def test_the_server_line() -> None:
    """Which needs the extra [serve]."""
    pytest.importorskip("fastapi")
    scope: dict[str, Any] = {}
    exec("from infinilm.server.inference_server import InferenceServer, main", scope)
    assert scope["InferenceServer"].__module__ == "torch_infini.compat.infinilm.server.inference_server"


def test_modules_below_one_that_is_imported() -> None:
    """infinilm imports its cache itself: what scripts reach so is what they import."""
    module = importlib.import_module("infinilm")
    assert module.cache.PagedKVCacheConfig is module.cache.cache.PagedKVCacheConfig is PagedKVCacheConfig
    assert module.lib._infinilm is importlib.import_module("_infinilm")


def test_by_run(tmp_path: Path) -> None:
    """All lines in a process of their own, through the command; infinilm itself does without infinicore's module."""
    script = tmp_path / "script.py"
    begins = ["import sys, infinilm", 'print("torch_infini.compat.infinicore" in sys.modules)']
    ends = ["import infinilm", "print(infinilm.cache.PagedKVCacheConfig(9), _infinilm.PagedKVCacheConfig(7))"]
    ends += ["print(type(InferEngine.Output()).__name__, _infinilm.InferEngine.Input().top_k)"]
    script.write_text("\n".join([*begins, *LINES, *ends, ""]))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "error", "-m", "torch_infini", "run", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "False",
        "PagedKVCacheConfig(num_blocks=9, block_size=16) PagedKVCacheConfig(num_blocks=7, block_size=16)",
        "Output 50",
    ]
