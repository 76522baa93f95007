"""Signatures, defaults, properties and reprs of infinilm and _infinilm, as InfiniLM's documents and callers have them.

The tables are written from the documents. A signature here is what callers may write: ours may take more behind it.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch

import torch_infini.compat.infinicore as infinicore
from torch_infini import compat
from torch_infini.compat.infinilm import auto_config, cache_utils, generation, infer_engine, modeling_utils
from torch_infini.compat.infinilm.lib import _infinilm as own
from torch_infini.compat.infinilm.models import llama
from torch_infini.demo import MODEL

ANY = object()  # a default that the documents leave open
NAMES = {
    "infinilm": "LLM AsyncLLMEngine SamplingParams RequestOutput TokenOutput AutoLlamaModel",
    "infinilm.auto_config": "AutoConfig",
    "infinilm.cache": "StaticKVCacheConfig PagedKVCacheConfig",
    "infinilm.cache.cache": "StaticKVCacheConfig PagedKVCacheConfig",
    "infinilm.cache_utils": "Cache DynamicCache",
    "infinilm.configuration_utils": "PretrainedConfig",
    "infinilm.distributed": "DistConfig",
    "infinilm.distributed.dist_config": "DistConfig",
    "infinilm.generation.utils": "GenerationMixin infini_to_numpy",
    "infinilm.infer_engine": "GenerationConfig InferEngine",
    "infinilm.lib": "_infinilm",
    "infinilm.lib._infinilm": "CacheConfig Config DistConfig HookRegistry InferEngine LlamaConfig PagedKVCacheConfig "
    "StaticKVCacheConfig",
    "infinilm.llm": "LLM LLMEngine AsyncLLMEngine EngineConfig SamplingParams RequestOutput TokenOutput FinishReason "
    "InferenceRequest RequestStatus",
    "infinilm.llm.cache_manager": "BlockManager",
    "infinilm.llm.llm": "LLM LLMEngine AsyncLLMEngine EngineConfig",
    "infinilm.llm.request": "FinishReason InferenceRequest RequestOutput RequestStatus TokenOutput",
    "infinilm.llm.sampling_params": "SamplingParams",
    "infinilm.llm.scheduler": "Scheduler",
    "infinilm.modeling_utils": "check_parameters get_model_state_dict load_model_state_dict_by_file "
    "load_model_state_dict_by_tensor",
    "infinilm.models.llama": "AutoLlamaModel",
    "infinilm.server.inference_server": "InferenceServer main",
    "_infinilm": "CacheConfig Config DistConfig HookRegistry InferEngine LlamaConfig PagedKVCacheConfig "
    "StaticKVCacheConfig",
}
# By name: the parameters in order, behind "*" by keyword alone, with their defaults; ... : none.
SIGNATURES: dict[str, dict[str, Any]] = {
    "_infinilm.StaticKVCacheConfig": {"max_batch_size": 1, "max_cache_len": ANY},
    "_infinilm.InferEngine": {"config": ..., "distributed_config": ANY, "device_type": ANY, "cache_config": None},
    "_infinilm.InferEngine.load_param": {"name": ..., "param": ...},
    "_infinilm.InferEngine.forward": {"input": ...},
    "_infinilm.InferEngine.reset_cache": {"cache_config": None},
    "_infinilm.HookRegistry.register_hook": {"name": ..., "callback": ...},
    "infinilm.auto_config.AutoConfig.from_pretrained": {"model_path": ...},
    "infinilm.infer_engine.InferEngine": {
        "model_path": ANY,
        "device": ANY,
        "distributed_config": ANY,
        "cache_config": None,
    },
    "infinilm.infer_engine.InferEngine.forward": {
        "input_ids": ANY,
        "*": None,
        "position_ids": None,
        "past_kv_lengths": None,
        "total_kv_lengths": None,
        "input_offsets": None,
        "block_tables": None,
        "slot_mapping": None,
        "temperature": ANY,
        "top_k": ANY,
        "top_p": ANY,
    },
    "infinilm.infer_engine.InferEngine.generate": {
        "input_ids": ...,
        "generation_config": ANY,
        "*": None,
        "_measure_and_log_time": False,
        "paged_block_size": 16,
    },
    "infinilm.infer_engine.InferEngine.load_state_dict": {"state_dict": ..., "strict": None},
    "infinilm.infer_engine.InferEngine.state_dict_keyname": {},
    "infinilm.infer_engine.GenerationConfig": {
        "*": None,
        "max_new_tokens": ANY,
        "temperature": ANY,
        "top_k": ANY,
        "top_p": ANY,
        "eos_token_id": ANY,
        "stop_on_eos": True,
    },
    "infinilm.generation.utils.infini_to_numpy": {"infini_tensor": ...},
    "infinilm.modeling_utils.load_model_state_dict_by_file": {"model": ..., "model_path": ..., "dtype": None},
    "infinilm.modeling_utils.load_model_state_dict_by_tensor": {"model": ..., "model_path": ..., "dtype": None},
    "infinilm.modeling_utils.get_model_state_dict": {"model_path": ..., "device": ANY, "dtype": ANY},
    "infinilm.modeling_utils.check_parameters": {"model_keys": ..., "already_loaded_keys": ...},
    "infinilm.llm.LLM": {
        "model_path": ...,
        "device": ANY,
        "dtype": "float16",
        "tensor_parallel_size": 1,
        "max_batch_size": 16,
        "max_tokens": 4096,
        "num_blocks": 8192,
        "block_size": 16,
        "temperature": 1.0,
        "top_p": 0.8,
        "top_k": 1,
    },
    "infinilm.llm.LLM.generate": {"prompts": ..., "sampling_params": None, "use_tqdm": True},
    "infinilm.llm.LLM.chat": {"messages": ..., "sampling_params": None},
    "infinilm.llm.LLMEngine": {"config": ...},
    "infinilm.llm.AsyncLLMEngine.start": {},
    "infinilm.llm.AsyncLLMEngine.stop": {},
    "infinilm.llm.AsyncLLMEngine.add_request": {
        "prompt": None,
        "prompt_token_ids": None,
        "sampling_params": None,
        "request_id": None,
    },
    "infinilm.llm.AsyncLLMEngine.add_chat_request": {"messages": ..., "sampling_params": None, "request_id": None},
    "infinilm.llm.AsyncLLMEngine.stream_request": {"request": ...},
    "infinilm.llm.SamplingParams": {
        "temperature": 1.0,
        "top_p": ANY,
        "top_k": ANY,
        "max_tokens": None,
        "*": None,
        "stop": None,
        "stop_token_ids": None,
        "ignore_eos": False,
    },
    "infinilm.llm.SamplingParams.clone": {},
}
CONFIG = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "model_type": "llama",
    "rope_theta": 1e4,
    "attention_bias": True,
    "attention_output_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "use_cache": True,
    "attention_dropout": 0,
    "initializer_range": 0.02,
    "pretraining_tp": 1,
    "name_or_path": "",
    "pad_token_id": -1,
    "bos_token_id": [1],
    "eos_token_id": [2],
    "rope_scaling": None,
}


@pytest.fixture(scope="module", autouse=True)
def installed() -> Iterator[None]:
    compat.install()
    yield
    compat.uninstall()


def found(name: str) -> Any:
    """What an import by its longest module, then attributes, gives."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            thing = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for part in parts[end:]:
            thing = getattr(thing, part)
        return thing
    raise AssertionError(f"no module of {name}")


@pytest.mark.parametrize("module", NAMES)
def test_names(module: str) -> None:
    if module.startswith("infinilm.server"):
        pytest.importorskip("fastapi")
        pytest.importorskip("uvicorn")
    for name in NAMES[module].split():
        scope: dict[str, Any] = {}
        exec(f"from {module} import {name}", scope)
        assert scope[name] is not None


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name: str) -> None:
    """Callers' arguments, by position as far as the documents have them so, and by name."""
    parameters = inspect.signature(found(name)).parameters
    own = [p for n, p in parameters.items() if n != "self"]
    keyword_only = False
    for place, (argument, default) in enumerate(SIGNATURES[name].items()):
        if argument == "*":
            keyword_only = True
            continue
        assert argument in parameters or any(p.kind is p.VAR_KEYWORD for p in own), f"{argument} is missing"
        if argument not in parameters:
            continue
        parameter = parameters[argument]
        assert parameter.kind is not parameter.POSITIONAL_ONLY, f"{argument} cannot be given by name"
        if not keyword_only:
            assert own[place] is parameter, f"{argument} is not the argument in place {place}"
            assert parameter.kind is parameter.POSITIONAL_OR_KEYWORD, f"{argument} cannot be given by position"
        if default is not ANY:
            assert parameter.default == (parameter.empty if default is ... else default), argument
    for parameter in own:
        variable = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if parameter.name not in SIGNATURES[name] and not variable:
            assert parameter.default is not parameter.empty, f"{parameter.name} is required, and callers give none"


def in_words(function: Any) -> list[str]:
    """Parameters as `name`, `name=default` or `*, name`; without self."""
    shown, keywords = [], False
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name == "self":
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not keywords:
            shown, keywords = [*shown, "*"], True
        default = "" if parameter.default is parameter.empty else f"={parameter.default!r}"
        shown.append(parameter.name + default)
    return shown


@pytest.mark.parametrize(
    ("function", "expected"),
    (
        (auto_config.AutoConfig.from_pretrained, "model_path"),
        (
            infer_engine.InferEngine.forward,
            "input_ids, *, position_ids=None, past_kv_lengths=None, total_kv_lengths=None, input_offsets=None, "
            "block_tables=None, slot_mapping=None, temperature=None, top_k=None, top_p=None, seed=None",
        ),
        (
            infer_engine.InferEngine.generate,
            "input_ids, generation_config=None, *, tokenizer=None, _measure_and_log_time=False, paged_block_size=16, "
            "settings",
        ),
        (infer_engine.InferEngine.load_state_dict, "state_dict, strict=None"),
        (infer_engine.InferEngine.reset_cache, "cache_config=None"),
        (
            infer_engine.GenerationConfig,
            "max_new_tokens=None, temperature=1.0, top_k=50, top_p=1.0, eos_token_id=None, stop_on_eos=True, seed=None",
        ),
        (
            llama.AutoLlamaModel.from_pretrained,
            "model_path, device=None, dtype=None, backend='cpp', distributed_config=None, cache_config=None",
        ),
        (modeling_utils.load_model_state_dict_by_file, "model, model_path, dtype=None"),
        (modeling_utils.load_model_state_dict_by_tensor, "model, model_path, dtype=None"),
        (modeling_utils.get_model_state_dict, "model_path, device=None, dtype=None"),
        (modeling_utils.check_parameters, "model_keys, already_loaded_keys"),
        (generation.utils.infini_to_numpy, "infini_tensor"),
        (cache_utils.DynamicCache.update, "key_states, value_states, layer_idx, cache_kwargs=None"),
    ),
)
def test_whole_signature(function: Any, expected: str) -> None:
    """All of it: a further argument of ours is added here on purpose."""
    assert ", ".join(in_words(function)) == expected


class TestConfigs:
    def test_llama_config_defaults(self) -> None:
        low = found("_infinilm")
        config = low.LlamaConfig()
        assert {name: getattr(config, name) for name in CONFIG} == CONFIG
        assert isinstance(config, low.Config) and config.validate() is True and config.kv_dim() == 32 * 128
        assert repr(config) == "LlamaConfig()"

    def test_llama_config_is_written(self) -> None:
        config = found("_infinilm").LlamaConfig()
        for name, value in CONFIG.items():
            new = {int: lambda v: v + 3, float: lambda v: v * 2, str: lambda v: v + "x", bool: lambda v: not v}.get(
                type(value)
            )
            if new is not None:
                setattr(config, name, new(value))
                assert getattr(config, name) == new(value)
        config.bos_token_id, config.eos_token_id = 7, [8, 9]
        assert (config.bos_token_id, config.eos_token_id) == ([7], [8, 9])
        scaling = {"rope_type": "linear", "factor": 2.0}
        config.rope_scaling = scaling
        assert config.rope_scaling == scaling
        for value in ("a", 1.5, True, ["a"], [True], [2.5]):
            with pytest.raises(TypeError):
                config.eos_token_id = value
        assert config.eos_token_id == [8, 9]

    def test_auto_config(self) -> None:
        config = found("infinilm.auto_config.AutoConfig").from_pretrained(MODEL)
        assert isinstance(config, found("_infinilm.LlamaConfig"))
        assert (config.hidden_size, config.num_key_value_heads, config.head_dim) == (256, 4, 32)
        assert (config.bos_token_id, config.eos_token_id, config.rope_theta) == ([1], [2], 10000.0)
        assert config.dtype in (torch.bfloat16, infinicore.bfloat16)

    def test_dist_config(self) -> None:
        DistConfig = found("_infinilm.DistConfig")
        given = [DistConfig(), DistConfig(2), DistConfig(tp_size=3), DistConfig([1, 0]), DistConfig(tp_device_ids=[5])]
        assert [config.tp_device_ids for config in given] == [[0], [0, 1], [0, 1, 2], [1, 0], [5]]
        assert repr(given[1]) == str(given[1]) == "DistConfig(tp_device_ids=[0, 1])"
        for config in given:
            assert config._underlying.tp_device_ids == config.tp_device_ids
        config = DistConfig()
        config.tp_device_ids = [3, 4]
        assert config.tp_device_ids == [3, 4]

    def test_static_cache_config(self) -> None:
        low = found("_infinilm")
        config = low.StaticKVCacheConfig()
        assert isinstance(config, low.CacheConfig) and config.max_batch_size() == 1
        assert low.StaticKVCacheConfig(4, 100).max_cache_len() == 100
        named = low.StaticKVCacheConfig(max_batch_size=16, max_cache_len=4096)
        assert (named.max_batch_size(), named.max_cache_len()) == (16, 4096)
        with pytest.raises(TypeError):
            low.CacheConfig()

    @pytest.mark.parametrize(
        "module", ["_infinilm", "infinilm.lib._infinilm", "infinilm.cache", "infinilm.cache.cache"]
    )
    def test_paged_cache_config_of_scripts(self, module: str) -> None:
        """By position: blocks; by keyword what the keyword says."""
        Paged = found(module).PagedKVCacheConfig
        assert issubclass(Paged, own.PagedKVCacheConfig) and issubclass(Paged, found("_infinilm.CacheConfig"))
        assert (Paged(64).num_blocks(), Paged(64).block_size()) == (64, 16)
        assert (Paged(64, 8).num_blocks(), Paged(64, 8).block_size()) == (64, 8)
        assert Paged(num_blocks=3, block_size=32).num_blocks() == 3
        assert Paged(max_kv_memory_bytes=1 << 20, block_size=16).max_kv_memory_bytes() == 1 << 20

    def test_paged_cache_config_of_ours(self) -> None:
        from torch_infini.compat.infinilm import PagedKVCacheConfig

        assert PagedKVCacheConfig(1 << 20, 16).max_kv_memory_bytes() == 1 << 20
        assert PagedKVCacheConfig(num_blocks=3).num_blocks() == 3


class TestInput:
    def longs(self, *values: int) -> Any:
        return infinicore.from_list(list(values), dtype=infinicore.int64)

    def test_by_position(self) -> None:
        Input = found("_infinilm.InferEngine").Input
        tensors = [self.longs(i) for i in range(7)]
        given = Input(*(tensor._underlying for tensor in tensors), temperature=0.5, top_k=3, top_p=0.9)
        order = ["input_ids", "position_ids", "past_sequence_lengths", "total_sequence_lengths", "input_offsets"]
        order += ["block_tables", "slot_mapping"]
        values = [int(infinicore.Tensor(getattr(given, name)).to_numpy()[0]) for name in order]
        assert values == list(range(7))
        assert (given.temperature, given.top_k, given.top_p) == (0.5, 3, 0.9)
        with pytest.raises(TypeError):
            Input(*tensors, self.longs(7))

    def test_defaults_of_both_vocabularies(self) -> None:
        Input = found("_infinilm.InferEngine").Input
        ids = self.longs(1)
        older = Input(input_ids=ids, position_ids=ids, cache_lengths=ids, input_lengths=ids)
        newer = Input(ids, past_sequence_lengths=ids, total_sequence_lengths=ids, input_offsets=ids)
        assert (older.temperature, older.top_k, older.top_p) == (1.0, 50, 1.0)
        assert (newer.temperature, newer.top_k, newer.top_p) == (1.0, 1, 1.0)
        newer.temperature, newer.top_k, newer.top_p = 0.7, 9, 0.6
        assert (newer.temperature, newer.top_k, newer.top_p) == (0.7, 9, 0.6)

    def test_unknown_keyword(self) -> None:
        with pytest.raises(ValueError, match="top_a"):
            found("_infinilm.InferEngine").Input(self.longs(1), top_a=1)

    def test_output(self) -> None:
        output = found("_infinilm.InferEngine").Output()
        output.output_ids = self.longs(5)
        assert output.output_ids.shape == [1]


def test_hooks() -> None:
    hooks = found("_infinilm").HookRegistry()
    assert hooks.has_hooks() is False
    hooks.register_hook("name", lambda name, tensor, layer: None)
    assert hooks.has_hooks() is True
    hooks.clear()
    assert hooks.has_hooks() is False


@pytest.fixture(scope="module")
def engine(installed: None) -> Any:
    InferEngine = found("infinilm.infer_engine").InferEngine
    cache_config = found("_infinilm").StaticKVCacheConfig(2, 64)
    return InferEngine(MODEL, device=infinicore.device("cpu", 0), cache_config=cache_config)


class TestEngine:
    def test_properties(self, engine: Any) -> None:
        low = found("_infinilm")
        assert isinstance(engine, low.InferEngine)
        assert engine.use_cache in (True, False) and engine.enable_paged_attn is False
        assert isinstance(engine.config, low.LlamaConfig) and engine.config.hidden_size == 256
        assert engine.device == infinicore.device("cpu", 0) and engine.dtype in (torch.bfloat16, infinicore.bfloat16)
        assert engine.get_cache_config().max_batch_size() == 2
        assert "DistConfig(tp_device_ids=[0])" in repr(engine)
        engine.reset_cache(low.PagedKVCacheConfig(8, 16))
        assert engine.enable_paged_attn is True and engine.get_cache_config().num_blocks() == 8
        engine.reset_cache()

    def test_names_of_its_state(self, engine: Any) -> None:
        names = engine.state_dict_keyname()
        assert "model.layers.3.self_attn.q_proj.weight" in names and "model.norm.weight" in names
        (state,) = engine.state_dict()
        assert set(names) <= set(state) and all(isinstance(tensor, infinicore.Tensor) for tensor in state.values())

    def test_own_classes(self) -> None:
        """Several bases, attributes before super().__init__(), an attribute that hides one of the base."""
        low = found("_infinilm")

        class Mixin:
            def twice(self) -> int:
                return 2 * int(self.number)  # type: ignore[attr-defined]

        class Engine(low.InferEngine, Mixin):  # type: ignore[misc, name-defined]
            Input = None

            def __init__(self, config: Any) -> None:
                self.number, self.config, self.dtype = 4, "mine", "mine too"
                super().__init__(config, low.DistConfig(1), infinicore.lib._infinicore.Device.Type.CPU)

        class Config(low.LlamaConfig, Mixin):  # type: ignore[misc, name-defined]
            def __init__(self) -> None:
                self.number = 5
                super().__init__()

        engine = Engine(found("infinilm.auto_config.AutoConfig").from_pretrained(MODEL))
        assert (engine.twice(), engine.config, engine.dtype, engine.Input) == (8, "mine", "mine too", None)
        assert Config().twice() == 10 and Config().hidden_size == 4096


class TestLLM:
    def test_settings(self) -> None:
        llm = found("infinilm.llm")
        params = llm.SamplingParams(0.5, 0.9, 7, 30)
        assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (0.5, 0.9, 7, 30)
        copy = params.clone()
        copy.max_tokens = 3
        assert params.max_tokens == 30 and copy.temperature == 0.5
        config = llm.EngineConfig(model_path=MODEL)
        fields = ("tensor_parallel_size", "max_batch_size", "max_tokens", "num_blocks", "block_size", "top_p", "top_k")
        assert [getattr(config, name) for name in fields] == [1, 16, 4096, 8192, 16, 0.8, 1]
        assert config.model_path == MODEL

    def test_enums(self) -> None:
        llm = found("infinilm.llm")
        assert issubclass(llm.FinishReason, Enum) and issubclass(llm.RequestStatus, Enum)
        assert {"LENGTH", "EOS_TOKEN", "STOP_STRING", "CANCELED"} <= set(llm.FinishReason.__members__)
        assert {"WAITING", "RUNNING", "FINISHED", "CANCELED"} <= set(llm.RequestStatus.__members__)

    def test_one_class_each(self) -> None:
        for module, names in NAMES.items():
            if module.startswith("infinilm.llm"):
                for name in names.split():
                    at_root = getattr(found("infinilm.llm"), name, None)
                    assert at_root is None or getattr(found(module), name) is at_root

    def test_own_requests(self) -> None:
        request = found("infinilm.llm").InferenceRequest
        for name in ("request_id", "prompt", "prompt_token_ids", "generated_token_ids", "generated_text", "status"):
            assert name in dir(request) or name in inspect.signature(request).parameters, name
        for name in ("is_finished", "abort"):
            assert callable(getattr(request, name))


def test_no_second_package() -> None:
    """What scripts import is torch_infini's own code, the finder's module for blocks by position apart."""
    import torch_infini.compat.infinilm as ours

    assert found("infinilm").LLM is ours.LLM and found("infinilm.infer_engine").__file__.startswith(
        str(Path(ours.__file__).parent)
    )
