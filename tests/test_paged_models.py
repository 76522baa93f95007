"""Models of transformers in the engine, over its paged cache: the tokens of the model's own forward.

Of each family and each kind of attention: alone, in batches of mixed lengths, with reused prefixes, under preemption.
"""

from __future__ import annotations

import copy
import gc
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from support.rounding import assert_likeliest, sums_of
from torch_infini import LLM, SamplingParams, is_patched, patch_model, runtime
from torch_infini.nn import KVCache, MixedKVCache
from torch_infini.nn.linear import fastest
from torch_infini.patch import save_patched
from torch_infini.patch.files.foreign import load
from torch_infini.patch.layers.packed_linear import PackedLinear
from torch_infini.patch.paged import PagedModel, sites
from torch_infini.testing import causal_types
from torch_infini.testing.families import VOCABULARY
from torch_infini.testing.patched_families import FAMILIES, Family

pytest.importorskip("transformers")
pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore::UserWarning")]

HEAD = {"head_dim": 16}
WINDOWS = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"moe_intermediate_size": 32, "num_experts_per_tok": 4}
SINKS = Family("GptOss", config={**HEAD, **WINDOWS, "num_local_experts": 4, "num_experts_per_tok": 4})
# What patch_model leaves, in part or whole: norms with means, sinks, keys wider than values, no rotation.
OTHERS = (
    Family("GPTNeoX"),
    Family("OPT"),
    Family("Phi"),
    Family("StableLm"),
    Family("Starcoder2"),
    Family("Cohere"),
    Family("Olmo"),
    Family("Nemotron"),
    SINKS,
    Family(
        "DeepseekV3",
        config={
            **EXPERTS,
            "num_key_value_heads": 4,
            "q_lora_rank": 24,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
            "n_routed_experts": 4,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
        },
    ),
)
EVERY = pytest.mark.parametrize("family", (*FAMILIES, *OTHERS), ids=lambda family: family.name)
COUNT = 12


def greedy(count: int = COUNT) -> SamplingParams:
    return SamplingParams(max_tokens=count, temperature=0, ignore_eos=True)


def prompts(lengths: tuple[int, ...], seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(2, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]


def assert_continues(model: Any, given: list[list[int]], outputs: list[Any]) -> None:
    """Each output's tokens are the likeliest by one ordinary call of the model, but for what rounding may decide."""
    sums = sums_of(model.config.get_text_config())
    for prompt, output in zip(given, outputs, strict=True):
        assert len(output.token_ids) == COUNT
        ids = torch.tensor([prompt + output.token_ids[:-1]])
        with torch.no_grad():
            scores = model(ids, use_cache=False).logits[0, len(prompt) - 1 :]
        assert_likeliest(torch.tensor(output.token_ids), scores, *sums)


def served(model: nn.Module, **settings: Any) -> LLM:
    return LLM(model, block_size=4, chunk_size=8, **settings)


@EVERY
def test_tokens(family: Family) -> None:
    """Alone, with others of other lengths, behind a reused prefix, and under preemption: those of the model itself."""
    model = family.build()
    original = copy.deepcopy(model)
    llm = served(model)
    given = prompts((3, 17, 40, 9, 1))
    together = llm.generate(given, greedy())
    assert_continues(original, given, together)
    longer = [given[2] + [5, 6], given[2][:30] + [7, 8, 9]]
    assert_continues(original, longer, llm.generate(longer, greedy()))
    assert llm.metrics().reused_tokens > 0
    assert_continues(original, given[:1], llm.generate(given[:1], greedy()))
    few = served(model, cache_blocks=16, enable_prefix_caching=False)
    many = prompts((20, 22, 21), seed=1)
    assert_continues(original, many, few.generate(many, greedy()))
    assert few.metrics().preemptions > 0


@pytest.mark.parametrize("family", (*FAMILIES, SINKS), ids=lambda family: family.name)
def test_decode_steps_are_recorded(family: Family) -> None:
    """Recorded and not, one text."""
    model = family.build()
    llm = served(model)
    given = prompts((5, 11))
    texts = [output.token_ids for output in llm.generate(given, greedy())]
    assert llm.engine.model.is_recordable
    assert [output.token_ids for output in served(model, enforce_eager=True).generate(given, greedy())] == texts


def test_steps_that_cannot_be_recorded(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Are tried once, and run op by op from then on, for every number of sequences; the log says why, in one line."""
    tried: list[object] = []
    record = runtime.record
    monkeypatch.setattr(runtime, "record", lambda step: tried.append(step) or record(step))
    model = causal_types.build("jetmoe")  # its router reads from tensors how many rows each expert has
    llm = served(model)
    with caplog.at_level("INFO", "torch_infini"):
        outputs = llm.generate(prompts((3, 4, 5)), [greedy(4), greedy(8), greedy(12)])
    assert len(tried) == 1 and not llm.engine.model.is_recordable
    assert caplog.text.count("decode steps are not recorded") == 1 and "Traceback" not in caplog.text
    assert [len(output.token_ids) for output in outputs] == [4, 8, 12]


def test_bfloat16_and_int8_cache() -> None:
    """The cache has the model's dtype, or int8: then the first token is that of exact keys."""
    model = FAMILIES[0].build(torch.bfloat16)
    assert served(model).engine.model.dtype == torch.bfloat16
    given = prompts((9, 20))
    first = [output.token_ids[0] for output in served(model).generate(given, greedy(1))]
    llm = served(model, kv_cache_dtype="int8")
    assert [output.token_ids[0] for output in llm.generate(given, greedy(1))] == first
    assert llm.engine.bytes_per_token == 2 * 2 * 2 * (16 + 4)


def test_the_model_stays_the_callers() -> None:
    """It is patched, its attention is again its own after each step, and both may be used in turn."""
    model: Any = FAMILIES[0].build()
    expected = model.generate(torch.tensor([[3, 4, 5]]), max_new_tokens=4, do_sample=False)
    llm = served(model)
    assert is_patched(model)
    name = model.config._attn_implementation
    llm.generate([[3, 4, 5]], greedy(4))
    assert model.config._attn_implementation == name
    assert torch.equal(model.generate(torch.tensor([[3, 4, 5]]), max_new_tokens=4, do_sample=False), expected)


def test_weights_lie_in_one_stretch(tmp_path: Path) -> None:
    """Of large pages, each aligned to a cache line and with a storage of its own: the model is saved as before."""
    model: Any = FAMILIES[0].build(num_hidden_layers=2, hidden_size=512, intermediate_size=1024)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    kept = model.lm_head.weight
    served(model)
    weights = [p for p in model.parameters() if p.dim() == 2]
    assert model.lm_head.weight is kept
    assert all(p.data_ptr() % 64 == 0 and p.untyped_storage().nbytes() == p.nbytes for p in weights)
    assert max(p.data_ptr() for p in weights) - min(p.data_ptr() for p in weights) < 2 * sum(p.nbytes for p in weights)
    model.save_pretrained(tmp_path)
    again: Any = type(model).from_pretrained(tmp_path, trust_remote_code=False)
    assert all(torch.equal(value, before[name]) for name, value in again.state_dict().items())


def test_weights_are_read_where_they_are() -> None:
    """A change of a weight changes the next step, a recorded one too."""
    model: Any = FAMILIES[0].build()
    llm = served(model, enable_prefix_caching=False)
    before = llm.generate([[3, 4, 5]], greedy())[0].token_ids
    with torch.no_grad():
        model.lm_head.weight.copy_(model.lm_head.weight.roll(1, 0))
    after = llm.generate([[3, 4, 5]], greedy())[0].token_ids
    assert before != after
    assert_continues(model, [[3, 4, 5]], [llm.generate([[3, 4, 5]], greedy())[0]])


def test_quantized_and_wrapped() -> None:
    """A model with int8 weights, patched before or by the LLM, and one inside of another module."""
    model = FAMILIES[0].build()
    patch_model(model, weights="int8")
    given = prompts((9, 20))
    tokens = [output.token_ids for output in served(model).generate(given, greedy())]
    assert [o.token_ids for o in served(FAMILIES[0].build(), quantization="int8").generate(given, greedy())] == tokens

    class Wrapper(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, **kwargs: Any) -> Any:
            return self.inner(**kwargs)

    assert [o.token_ids for o in served(Wrapper(model)).generate(given, greedy())] == tokens


def test_peft() -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(FAMILIES[0].build(), peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(generator=torch.Generator().manual_seed(0))
    original = copy.deepcopy(model)
    given = prompts((9, 20))
    assert_continues(original.base_model.model, given, served(model).generate(given, greedy()))


@pytest.mark.parametrize("name", ["Gemma3", "Phi3", "Mixtral", "GPTNeoX"])
def test_folders(name: str, tmp_path: Path) -> None:
    """Types that are not Llama's are read by transformers, dense and quantized, and patched where they can be."""
    family = next(family for family in (*FAMILIES, *OTHERS) if family.name == name)
    model: Any = family.build()
    model.save_pretrained(tmp_path)
    given = prompts((9, 20))
    llm = LLM(tmp_path)
    assert type(llm.engine.model).__name__ == "PagedModel"
    assert_continues(model, given, llm.generate(given, greedy()))
    assert is_patched(llm.engine.model.model)
    patch_model(model, weights="int8")
    expected = [output.token_ids for output in served(model).generate(given, greedy())]
    assert [output.token_ids for output in LLM(tmp_path, quantization="int8").generate(given, greedy())] == expected


@pytest.mark.skipif(fastest("dense", torch.bfloat16, "cpu") != "packed", reason="panels are no faster on this CPU")
@pytest.mark.parametrize(
    "name", ["StableLm", "Gemma2", *(pytest.param(name, marks=pytest.mark.full) for name in ("Granite", "GPTNeoX"))]
)
def test_folders_are_packed(name: str, tmp_path: Path) -> None:
    """A folder's bfloat16 weights are packed: a request has the same bits alone and beside others, steps are recorded.

    A model that the caller holds stays as it is, and so do other dtypes.
    """
    family = next(family for family in (*FAMILIES, *OTHERS) if family.name == name)
    model: Any = family.build(torch.bfloat16, tie_word_embeddings=False)
    model.save_pretrained(tmp_path)
    params = SamplingParams(max_tokens=COUNT, temperature=0, ignore_eos=True, logprobs=5)
    llm = LLM(tmp_path, block_size=4, chunk_size=64, enable_prefix_caching=False)
    inner = llm.engine.model.model
    linear = [module for module in inner.modules() if isinstance(module, nn.Linear)]
    assert linear and all(isinstance(module, PackedLinear) for module in linear)
    read = sum(p.nbytes for p in model.parameters()) - model.get_input_embeddings().weight.nbytes
    assert read <= llm.engine.model.bytes_per_step < read + 256  # the rotary embedding's buffers
    given = prompts((9, 20, 3, 17))
    together = llm.generate(given, params)
    assert llm.engine.model.is_recordable
    alone = [output for prompt in given for output in llm.generate([prompt], params)]
    for one, other in zip(alone, together, strict=True):
        assert one.token_ids == other.token_ids and one.outputs[0].logprobs == other.outputs[0].logprobs
    held = LLM(model, block_size=4, chunk_size=64).engine.model.model
    wide = LLM(tmp_path, dtype="float32").engine.model.model
    assert not [module for one in (held, wide) for module in one.modules() if isinstance(module, PackedLinear)]


@pytest.mark.skipif(fastest("dense", torch.bfloat16, "cpu") != "packed", reason="panels are no faster on this CPU")
def test_saved_folders_are_packed(tmp_path: Path) -> None:
    """A folder of save_patched too: integers stay integers, and what `skip` names stays as it is."""
    for weights, skip, packed in ((None, ["lm_head"], 14), ("int8", ["model.layers.1.mlp"], 0)):
        model: Any = FAMILIES[0].build(torch.bfloat16)
        patch_model(model, weights=weights, skip=skip)
        save_patched(model, tmp_path / str(weights))
        loaded = load(tmp_path / str(weights), packs=True)
        assert [isinstance(module, PackedLinear) for module in loaded.modules()].count(True) == packed


def test_values_wider_than_keys() -> None:
    """The cache has rows as wide as the keys."""
    backend = sites._RecordingBackend(64)
    q, k, v = torch.randn(1, 3, 4, 16), torch.randn(1, 3, 2, 16), torch.randn(1, 3, 2, 24)
    with pytest.raises(sites.Unserved, match=r"its values have 2 heads of 24 columns, its keys \[2, 16\]"):
        backend.attend(nn.Identity(), q, k, v, None, sites.ScoreTerms(1.0))


def test_unlike_layers() -> None:
    """Layers whose heads differ have caches of their own size."""
    cache = MixedKVCache([(2, 16), (1, 32), (2, 16)], 5, 4)
    assert [tuple(cache.layer(i).keys.shape) for i in range(3)] == [(5, 2, 4, 16), (5, 1, 4, 32), (5, 2, 4, 16)]
    assert cache.bytes_per_token == sum(KVCache(1, 1, h, 1, d).bytes_per_token for h, d in ((2, 16), (1, 32), (2, 16)))
    for i in range(3):
        cache.layer(i).keys[1] = i + 1
    cache.copy_blocks([(1, 4)])
    assert [float(cache.layer(i).keys[4].mean()) for i in range(3)] == [1, 2, 3]
    assert len({cache.layer(i).keys.data_ptr() for i in range(3)}) == 3
    with pytest.raises(ValueError, match="layers must name at least one layer, got none"):
        MixedKVCache([], 1, 1)


def test_refused() -> None:
    """States beside keys and values, attention of its own, later tokens, parts of models, models that are nowhere."""
    states: Any = causal_types.build("recurrent_gemma")
    with pytest.raises(ValueError, match="RecurrentGemmaForCausalLM cannot be served: .* keeps states other than keys"):
        PagedModel(states)
    with pytest.raises(ValueError, match="BloomForCausalLM cannot be served: no layer of it calls transformers'"):
        PagedModel(Family("Bloom").build())
    both: Any = FAMILIES[0].build()
    both.config.is_causal = False
    for layer in both.model.layers:
        layer.self_attn.is_causal = False
    with pytest.raises(ValueError, match="its attention sees later tokens"):
        served(both)
    with pytest.raises(ValueError, match="must be a causal language model of transformers, a Decoder or a folder, got"):
        LLM(nn.Linear(2, 2))
    model: Any = FAMILIES[0].build()
    with pytest.raises(ValueError, match="must be a causal language model of transformers"):
        LLM(model.model)
    with pytest.raises(ValueError, match=r"dtype must be left out for a model that is loaded, got torch\.float16"):
        LLM(model, dtype=torch.float16)
    for wrong in (True, "int9"):
        with pytest.raises(ValueError, match=f"quantization must be .*, got {wrong!r}"):
            LLM(model, quantization=wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="quantization must be left out for a model that is loaded, got 'int8'"):
        LLM(served(FAMILIES[0].build()).engine.model, quantization="int8")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"must be float32, bfloat16 or float16, got torch\.float64"):
        LLM(FAMILIES[0].build().double())
    broken: Any = FAMILIES[0].build()
    with torch.no_grad():
        broken.model.layers[1].mlp.up_proj.weight.fill_(torch.nan)
    with pytest.raises(
        ValueError, match=r"its logits are NaN or infinite, as model\.layers\.1\.mlp\.up_proj\.weight is"
    ):
        LLM(broken)
    assert not is_patched(broken)
    odd: Any = FAMILIES[0].build()
    odd.model.layers[0].mlp.down_proj = nn.Linear(3, 64)
    with pytest.raises(ValueError, match="it does not run 15 tokens: RuntimeError"):
        LLM(odd)
    patch_model(model)
    with pytest.raises(ValueError, match="quantization must be left out for a model that is patched, got 'int8'"):
        LLM(model, quantization="int8")
    with pytest.raises(ValueError, match=r"the model must be loaded, got .*weight on meta"):
        LLM(FAMILIES[0].build().to("meta"))


def test_positions_end_where_the_rule_does(caplog: pytest.LogCaptureFixture) -> None:
    """Chunks of attention bound the sequences that are served: the first one is all keys."""
    model: Any = causal_types.build("llama4_text")
    model.config.attention_chunk_size = 32
    original = copy.deepcopy(model)
    llm = served(model)
    assert llm.engine.max_model_len == 32
    assert "sequences must be shorter than 32 tokens" in caplog.text
    given = prompts((18,))
    assert_continues(original, given, llm.generate(given, greedy()))


def test_windows_of_a_config_that_no_module_has() -> None:
    """A model with a vision part makes masks by the config inside its own, which no module of the decoder keeps."""
    model = causal_types.build("gemma3")
    original = copy.deepcopy(model)
    given = prompts((33, 18, 3))
    assert_continues(original, given, served(model).generate(given, greedy()))


def test_a_window_that_no_mask_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPT-Neo's local attention masks keys by a buffer of its own."""
    monkeypatch.setitem(causal_types.MORE, "gpt_neo", {**causal_types.MORE["gpt_neo"], "window_size": 8})
    model: Any = causal_types.build("gpt_neo")
    original = copy.deepcopy(model)
    original.config.intermediate_size = 4 * original.config.hidden_size
    given = prompts((33, 18, 3))
    llm = served(model)
    assert_continues(original, given, llm.generate(given, greedy()))
    assert is_patched(model)
    windows = [site.window.size for site in llm.engine.model._sites.attention.values()]  # type: ignore[attr-defined]
    assert windows == [0, 8, 0, 8] and llm.engine.model.is_recordable


@pytest.mark.parametrize("kind", ["roberta", "bart", "gemma4_unified"])
def test_positions_and_masks_of_other_models(kind: str) -> None:
    """Positions behind padding's, positions that count from a cache, and a mask with a rule for images."""
    model = causal_types.build(kind)
    original = copy.deepcopy(model)
    if kind == "bart":  # the bound of rounding reads the name of others
        original.config.intermediate_size = original.config.decoder_ffn_dim
    llm = served(model)
    given = prompts((33, 18, 3))
    assert_continues(original, given, llm.generate(given, greedy()))
    first = 1 if kind == "roberta" else 0
    assert llm.engine.max_model_len == 256 - first
    del llm
    gc.collect()
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_only_the_engine_calls_it() -> None:
    """The implementation's name is no one else's; a call on another thread keeps the model's own attention."""
    model: Any = FAMILIES[0].build()
    served(model)
    plain: Any = FAMILIES[0].build()
    plain.config._attn_implementation_internal = "infini_paged"
    with pytest.raises(RuntimeError, match="must be used by torch_infini.LLM alone"):
        plain(torch.tensor([[1, 2]]))
    errors: list[BaseException] = []

    def other() -> None:
        try:
            model(torch.tensor([[1, 2]]))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert not errors
