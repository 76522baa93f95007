"""torch_infini.compat.infinilm's configs: LlamaConfig, AutoConfig, DistConfig and the caches'.

And how devices and dtypes may be named.
"""

from __future__ import annotations

import dataclasses
import json
import pickle
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from torch_infini.compat import infinicore, infinilm
from torch_infini.compat.infinilm import cache, distributed
from torch_infini.compat.infinilm.auto_config import AutoConfig
from torch_infini.compat.infinilm.convert import as_device, as_dtype
from torch_infini.compat.infinilm.lib import _infinilm
from torch_infini.models import LlamaConfig as ModelConfig

NAMES = (
    "CacheConfig",
    "Config",
    "DistConfig",
    "HookRegistry",
    "InferEngine",
    "LlamaConfig",
    "PagedKVCacheConfig",
    "StaticKVCacheConfig",
)


def message_of(error: type[Exception], call: Any) -> str:
    with pytest.raises(error) as raised:
        call()
    return str(raised.value).removeprefix("infinilm.")


def test_names_are_where_scripts_look() -> None:
    assert sorted(_infinilm.__all__) == sorted(NAMES)
    assert all(getattr(infinilm, name) is getattr(_infinilm, name) for name in NAMES)
    assert infinilm.AutoConfig is AutoConfig
    assert cache.StaticKVCacheConfig is cache.cache.StaticKVCacheConfig is _infinilm.StaticKVCacheConfig
    assert distributed.DistConfig is distributed.dist_config.DistConfig is _infinilm.DistConfig


# DistConfig


def test_dist_config() -> None:
    DistConfig = _infinilm.DistConfig
    assert DistConfig().tp_device_ids == [0]
    assert DistConfig(3).tp_device_ids == DistConfig(tp_size=3).tp_device_ids == [0, 1, 2]
    assert DistConfig([2, 0]).tp_device_ids == DistConfig(tp_device_ids=(2, 0)).tp_device_ids == [2, 0]
    assert repr(DistConfig(2)) == str(DistConfig(2)) == "DistConfig(tp_device_ids=[0, 1])"
    config = DistConfig()
    config.tp_device_ids = [1]
    assert repr(config) == "DistConfig(tp_device_ids=[1])"
    assert config._underlying is config and isinstance(pickle.loads(pickle.dumps(config)), DistConfig)
    config._underlying = "a caller's"
    assert config._underlying == "a caller's"
    with pytest.raises(AttributeError, match="'DistConfig' object has no attribute 'tp_size'"):
        getattr(config, "tp_size")  # noqa: B009


@pytest.mark.parametrize(
    ("args", "error", "message"),
    (
        ({"tp_size": 0}, ValueError, "DistConfig: tp_size must be at least 1, got 0"),
        ({"tp_size": "2"}, TypeError, "DistConfig: tp_size must be an integer or a list of devices, got '2'"),
        ({"tp_size": True}, TypeError, "DistConfig: tp_size must be an integer or a list of devices, got True"),
        ({"tp_device_ids": [0.5]}, TypeError, "DistConfig: tp_device_ids must be integers, got [0.5]"),
        (
            {"tp_device_ids": [1, 1]},
            ValueError,
            "DistConfig: tp_device_ids must be different devices, at least one, from 0 on, got [1, 1]",
        ),
        (
            {"tp_device_ids": []},
            ValueError,
            "DistConfig: tp_device_ids must be different devices, at least one, from 0 on, got []",
        ),
        (
            {"tp_device_ids": [-1]},
            ValueError,
            "DistConfig: tp_device_ids must be different devices, at least one, from 0 on, got [-1]",
        ),
        (
            {"tp_size": 1, "tp_device_ids": [0]},
            ValueError,
            "DistConfig: tp_device_ids must be None where tp_size is given, got both",
        ),
    ),
)
def test_dist_config_refuses(args: dict[str, Any], error: type[Exception], message: str) -> None:
    assert message_of(error, lambda: _infinilm.DistConfig(**args)) == message


# Caches


def test_cache_configs() -> None:
    static = _infinilm.StaticKVCacheConfig()
    assert (static.max_batch_size(), static.max_cache_len()) == (1, 2**63 - 1)
    assert repr(static) == "StaticKVCacheConfig(max_batch_size=1)"
    static = _infinilm.StaticKVCacheConfig(4, 128)
    assert (static.max_batch_size(), static.max_cache_len()) == (4, 128)
    assert repr(static) == "StaticKVCacheConfig(max_batch_size=4, max_cache_len=128)"
    paged = _infinilm.PagedKVCacheConfig(1 << 20)
    assert (paged.max_kv_memory_bytes(), paged.num_blocks(), paged.block_size()) == (1 << 20, None, 16)
    assert repr(paged) == "PagedKVCacheConfig(max_kv_memory_bytes=1048576, block_size=16)"
    paged = _infinilm.PagedKVCacheConfig(num_blocks=9, block_size=8)
    assert (paged.max_kv_memory_bytes(), paged.num_blocks(), paged.block_size()) == (None, 9, 8)
    assert repr(paged) == "PagedKVCacheConfig(num_blocks=9, block_size=8)"
    assert _infinilm.PagedKVCacheConfig(1 << 20, 8).block_size() == 8
    assert all(isinstance(config, _infinilm.CacheConfig) for config in (static, paged))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    (
        (
            lambda: _infinilm.CacheConfig(),
            TypeError,
            "CacheConfig: it must be a StaticKVCacheConfig or a PagedKVCacheConfig, got the base class",
        ),
        (
            lambda: _infinilm.StaticKVCacheConfig(0),
            ValueError,
            "StaticKVCacheConfig: max_batch_size must be an integer of at least 1, got 0",
        ),
        (
            lambda: _infinilm.StaticKVCacheConfig(max_cache_len=-1),
            ValueError,
            "StaticKVCacheConfig: max_cache_len must be an integer of at least 0, got -1",
        ),
        (
            lambda: _infinilm.StaticKVCacheConfig(max_cache_len=1.5),
            ValueError,
            "StaticKVCacheConfig: max_cache_len must be an integer of at least 0, got 1.5",
        ),
        (
            lambda: _infinilm.PagedKVCacheConfig(),
            ValueError,
            "PagedKVCacheConfig: one of max_kv_memory_bytes and num_blocks must be given, got none",
        ),
        (
            lambda: _infinilm.PagedKVCacheConfig(1024, num_blocks=4),
            ValueError,
            "PagedKVCacheConfig: one of max_kv_memory_bytes and num_blocks must be given, got both",
        ),
        (
            lambda: _infinilm.PagedKVCacheConfig(num_blocks=0),
            ValueError,
            "PagedKVCacheConfig: num_blocks must be an integer of at least 1, got 0",
        ),
        (
            lambda: _infinilm.PagedKVCacheConfig(0),
            ValueError,
            "PagedKVCacheConfig: max_kv_memory_bytes must be an integer of at least 1, got 0",
        ),
        (
            lambda: _infinilm.PagedKVCacheConfig(1024, 0),
            ValueError,
            "PagedKVCacheConfig: block_size must be an integer of at least 1, got 0",
        ),
    ),
)
def test_cache_configs_refuse(make: Any, error: type[Exception], message: str) -> None:
    assert message_of(error, make) == message


# LlamaConfig


def test_llama_config_is_written() -> None:
    config = _infinilm.LlamaConfig(num_key_value_heads=8)
    config.head_dim, config.eos_token_id, config.bos_token_id, config.pad_token_id = 64, [5, 6], 7, None
    assert (config.kv_dim(), config.eos_token_id, config.bos_token_id) == (512, [5, 6], [7])
    assert repr(config) == (
        "LlamaConfig(num_key_value_heads=8, head_dim=64, pad_token_id=None, bos_token_id=[7], eos_token_id=[5, 6])"
    )
    config.eos_token_id = None
    assert config.eos_token_id == [] and config.validate()
    other = _infinilm.LlamaConfig()
    other.eos_token_id.append(3)
    assert _infinilm.LlamaConfig().eos_token_id == [2]  # nothing is shared
    assert message_of(TypeError, lambda: _infinilm.LlamaConfig(hidden=4)) == (
        "LlamaConfig: values must be attributes of a LlamaConfig, got hidden"
    )


def test_config_is_the_base() -> None:
    assert isinstance(_infinilm.LlamaConfig(), _infinilm.Config)
    assert message_of(TypeError, _infinilm.Config) == "Config: it must be a LlamaConfig, got the base class"


@pytest.mark.parametrize("value", ("a", True, 2.0, [1, "a"], [False], [0.5], {3}), ids=str)
@pytest.mark.parametrize("name", ("bos_token_id", "eos_token_id", "pad_token_id"))
def test_token_ids_of_wrong_types(name: str, value: Any) -> None:
    config = _infinilm.LlamaConfig()
    kinds = "a token id or None" if name == "pad_token_id" else "a token id, several or None"
    message = f"LlamaConfig: {name} must be {kinds}, got {value!r}"
    assert message_of(TypeError, lambda: setattr(config, name, value)) == message
    assert message_of(TypeError, lambda: _infinilm.LlamaConfig(**{name: value})) == message
    assert repr(config) == "LlamaConfig()"


def test_token_ids_of_numpy() -> None:
    config = _infinilm.LlamaConfig(eos_token_id=[numpy.int64(3), 4], bos_token_id=numpy.int32(5), pad_token_id=None)
    values = [*config.eos_token_id, *config.bos_token_id]
    assert values == [3, 4, 5] and {type(value) for value in values} == {int} and config.validate()


def test_dtype_of_llama_config() -> None:
    """Read as infinicore's, whose functions take it; what was set stays as `_dtype`."""
    config = _infinilm.LlamaConfig()
    assert (config.dtype, config._dtype) == (infinicore.float32, None)
    for value in (torch.bfloat16, "bfloat16", infinicore.bfloat16, infinicore.bfloat16._underlying):
        config.dtype = value
        assert config._dtype is value and config.dtype == infinicore.bfloat16
        assert _infinilm.LlamaConfig(dtype=value).dtype == _infinilm.LlamaConfig(_dtype=value).dtype == config.dtype
    assert infinicore.ones([2], dtype=config.dtype, device="cpu").dtype == config.dtype
    for wrong in ("int8", torch.int64, infinicore.float64):
        with pytest.raises(ValueError, match="LlamaConfig: dtype must be float32, bfloat16 or float16, got"):
            config.dtype = wrong
    assert config.dtype == infinicore.bfloat16


def test_biases_and_windows_reach_the_model() -> None:
    config = _infinilm.LlamaConfig(num_hidden_layers=2)
    model = config.to_model()
    assert (model.qkv_bias, model.out_bias, model.mlp_bias, model.windows) == (True, False, False, (0, 0))
    config.attention_bias, config.attention_output_bias, config.mlp_bias, config.sliding_window = False, True, True, 7
    model = config.to_model()
    assert (model.qkv_bias, model.out_bias, model.mlp_bias, model.windows) == (False, True, True, (7, 7))
    config.model_type = "qwen2"  # whose config.json says nothing of biases
    assert (config.to_model().qkv_bias, config.to_model().out_bias) == (False, True)
    config.layer_types = ["full_attention", "sliding_attention"]
    assert config.to_model().windows == (0, 7)


@pytest.mark.parametrize(
    ("changes", "message"),
    (
        ({"hidden_size": 0}, "hidden_size must be a positive integer, got 0"),
        ({"num_key_value_heads": 5}, "num_key_value_heads must be a divisor of num_attention_heads, 32, got 5"),
        ({"hidden_act": "gelu"}, "hidden_act must be 'silu', got 'gelu'"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps must be a number from 0 to less than 1, got -1.0"),
        ({"model_type": "gpt2"}, "model_type must be one of llama, mistral, qwen2, qwen3, got 'gpt2'"),
        ({"rope_scaling": "llama3"}, "rope_scaling must be a dict or None, got 'llama3'"),
        ({"sliding_window": 0}, "sliding_window must be a positive integer or None, got 0"),
        (
            {"sliding_window": 4, "layer_types": ["full_attention"]},
            "layer_types must name sliding_attention or full_attention for each of 32 layers, got ['full_attention']",
        ),
        (
            {"sliding_window": 4, "layer_types": 5},
            "layer_types must name sliding_attention or full_attention for each of 32 layers, got 5",
        ),
    ),
)
def test_validate(changes: dict[str, Any], message: str) -> None:
    config = _infinilm.LlamaConfig(**changes)
    assert config.validate() is False
    got = message_of(ValueError, lambda: _infinilm.InferEngine(config))
    assert got.removeprefix("torch_infini.models.").removeprefix("LlamaConfig: ") == message


# AutoConfig

SIZES = {
    "vocab_size": 99,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-3,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {"attention_bias": True, "tie_word_embeddings": True, "eos_token_id": [4, 5], "pad_token_id": None},
    "Mistral": {"sliding_window": 9},
    "Qwen2": {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    "Qwen3": {"head_dim": 32},
}


def in_words_of_4(entries: dict[str, Any]) -> dict[str, Any]:
    """A config.json of transformers 5 in the spelling of transformers 4."""
    entries = dict(entries)
    rope = dict(entries.pop("rope_parameters"))
    entries["rope_theta"] = rope.pop("rope_theta")
    entries["rope_scaling"] = None if rope == {"rope_type": "default"} else rope
    entries["torch_dtype"] = entries.pop("dtype")
    return entries


@pytest.mark.parametrize("spelling", (dict, in_words_of_4), ids=("5", "4"))
@pytest.mark.parametrize("rope", ({"rope_type": "default"}, {"rope_type": "linear", "factor": 2.0}), ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_auto_config(family: str, rope: dict[str, Any], spelling: Any, tmp_path: Path) -> None:
    import transformers

    rope = {**rope, "rope_theta": 1234.0}
    made = getattr(transformers, f"{family}Config")(**SIZES, **FAMILIES[family], dtype="bfloat16", rope_parameters=rope)
    made.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(spelling(json.loads(file.read_text()))))
    config = AutoConfig.from_pretrained(str(tmp_path))
    assert isinstance(config, _infinilm.LlamaConfig) and config.validate()
    assert config.model_type == family.lower() and config.name_or_path == str(tmp_path)
    assert {name: getattr(config, name) for name in SIZES} == SIZES
    assert config.kv_dim() == (64 if family == "Qwen3" else 16)
    assert (config.rope_theta, config._dtype) == (1234.0, torch.bfloat16)
    assert config.rope_scaling == (None if rope["rope_type"] == "default" else {"rope_type": "linear", "factor": 2.0})
    assert config.attention_bias is (family in ("Llama", "Qwen2"))
    assert config.attention_output_bias is (family == "Llama")
    if family == "Llama":
        assert (config.eos_token_id, config.pad_token_id, config.tie_word_embeddings) == ([4, 5], -1, True)
    expected = ModelConfig.from_pretrained(tmp_path)
    assert config.to_model() == dataclasses.replace(expected, dtype=None, bos_token_id=None)
    windows = {"Mistral": (9, 9, 9), "Qwen2": (0, 9, 9)}.get(family, (0, 0, 0))
    assert config.to_model().windows == windows


def test_auto_config_takes_the_end_tokens_of_generation(tmp_path: Path) -> None:
    entries = {**SIZES, "model_type": "llama", "eos_token_id": 2, "bos_token_id": None, "partial_rotary_factor": 0.5}
    (tmp_path / "config.json").write_text(json.dumps(entries))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8]}))
    config = AutoConfig.from_pretrained(tmp_path)
    assert (config.eos_token_id, config.bos_token_id, config._dtype) == ([7, 8], [], None)
    assert config.rope_scaling == {"partial_rotary_factor": 0.5}


def test_auto_config_refuses(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="must have a config.json"):
        AutoConfig.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(ValueError, match="model_type must be one of llama, mistral, qwen2, qwen3, got 'gpt2'"):
        AutoConfig.from_pretrained(tmp_path)


# Devices and dtypes


class Kind(IntEnum):
    CPU = 0
    NVIDIA = 1
    CAMBRICON = 2


class NativeEnum:
    """An enum as pybind11 makes it: no int, but with a value and a name."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __str__(self) -> str:
        return f"Type.{Kind(self.value).name}"


class Carrier:
    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)

    def __repr__(self) -> str:  # without an address: it is in tests' names, which all workers must agree on
        return f"Carrier({', '.join(vars(self))})"


CPU = (
    None,
    0,
    "cpu",
    "CPU",
    "cpu:0",
    torch.device("cpu"),
    Kind.CPU,
    NativeEnum(0),
    Carrier(type="cpu", index=0),
    Carrier(_underlying=Carrier(type=NativeEnum(0), index=0)),
)


@pytest.mark.parametrize("value", CPU, ids=str)
def test_the_cpu_by_its_names(value: Any) -> None:
    assert as_device("here", value) == torch.device("cpu")


GPUS = {
    "cuda:0": (1, "cuda:0", "nvidia:0", torch.device("cuda", 0), Carrier(type="cuda", index=0)),
    "cuda": ("cuda", "NVIDIA", Kind.NVIDIA, NativeEnum(1), Carrier(_underlying=Carrier(type=NativeEnum(1)))),
    "cuda:1": ("cuda:1", "nvidia:1", Carrier(_underlying=Carrier(type=Kind.NVIDIA, index=1))),
}


def test_a_gpu_by_its_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for name, values in GPUS.items():
        for value in values:
            assert as_device("here", value) in {torch.device(name), torch.device(name.removesuffix(":0"))}, value


@pytest.mark.parametrize(
    "value",
    (2, Kind.CAMBRICON, NativeEnum(2), 10, -1, True, "ascend", "qy", "meta", "cpu:x", "", torch.device("meta"), 1.5),
    ids=str,
)
def test_devices_that_are_not_served(value: Any) -> None:
    known = "cpu or nvidia" if torch.cuda.is_available() else "cpu, for torch finds no NVIDIA GPU"
    with pytest.raises(ValueError) as error:
        as_device("here", value)
    assert str(error.value) == f"here: device_type must be {known}, got {value!r}"


def test_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for value in ("cuda:1", torch.device("cuda", 3), Carrier(type="nvidia", index=2)):
        with pytest.raises(ValueError, match="device_type must be"):
            as_device("here", value)


@pytest.mark.parametrize(
    ("dtype", "names"),
    (
        (torch.float32, (None, torch.float32, "float32", "torch.float32", "F32", 13, Carrier(_underlying=13))),
        (torch.bfloat16, (torch.bfloat16, "bfloat16", "bf16", "infinicore.bfloat16", 19)),
        (torch.float16, (torch.float16, "float16", "half", 12, Carrier(_underlying=NativeEnum(12)))),
    ),
    ids=str,
)
def test_dtypes_by_their_names(dtype: torch.dtype, names: tuple[Any, ...]) -> None:
    assert [as_dtype("here", name) for name in names] == [dtype] * len(names)


@pytest.mark.parametrize("value", (torch.float64, "int8", 14, 0))
def test_dtypes_that_are_not_served(value: Any) -> None:
    with pytest.raises(ValueError) as error:
        as_dtype("here", value)
    assert str(error.value) == f"here: dtype must be float32, bfloat16 or float16, got {value!r}"
