"""Models of transformers that the engine runs with transformers' own caches, one sequence at a time: tokens of generate
however requests are batched, cut, preempted, forked or interrupted; and what such a model refuses.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from support.engines import finish
from torch_infini import LLM
from torch_infini.engine import Engine, EngineConfig, SamplingParams
from torch_infini.patch import is_patched, patch_model

pytest.importorskip("transformers")
from torch_infini.patch.paged import OwnCacheModel, serve  # noqa: E402  # it imports transformers
from torch_infini.patch.paged.own_cache import Kept, OwnCaches, tensors_of  # noqa: E402
from torch_infini.testing.causal_types import VOCABULARY, build  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
# ALiBi, an indexer of keys, compressed keys, a state of linear attention in a cache of its own, attention twice.
CACHED = ("bloom", "deepseek_v32", "deepseek_v4", "minimax", "diffllama", "falcon", "mpt", "zaya")
AGAIN = ("xlm", "openai-gpt", "recurrent_gemma")  # their forward takes no cache, or keeps it in the model
NEW = 7


def engine_of(kind: str, **settings: Any) -> tuple[Any, Engine]:
    model: Any = build(kind)
    patch_model(model)
    return model, Engine(serve(model), config=EngineConfig(**settings))


def prompts(*lengths: int) -> list[list[int]]:
    chance = random.Random(sum(lengths))
    return [[chance.randrange(5, VOCABULARY) for _ in range(length)] for length in lengths]


def greedy(count: int = NEW, **more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=count, temperature=0, ignore_eos=True, **more)


def continued(model: Any, prompt: list[int], count: int = NEW) -> list[int]:
    """The likeliest tokens, each by a call without a cache."""
    tokens = list(prompt)
    for _ in range(count):
        with torch.no_grad():
            tokens.append(int(model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.full(beyond=3)
@pytest.mark.parametrize("kind", (CACHED[0], AGAIN[0], CACHED[1], *CACHED[2:], *AGAIN[1:]))
def test_tokens_are_those_of_the_model(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """Prompts in chunks beside sequences that generate, requests that arrive later, and preemption."""
    settings: dict[str, Any] = {"block_size": 4, "chunk_size": 8, "max_num_batched_tokens": 24, "max_num_seqs": 3}
    model, engine = engine_of(kind, **settings, cache_blocks=16)
    assert isinstance(engine.model, OwnCacheModel) and engine.model.has_cache == (kind in CACHED)
    words = "with transformers' own cache" if kind in CACHED else "without a cache, all tokens in each step"
    assert words in caplog.text
    texts = prompts(20, 22, 21, 1, 33)
    expected = {str(i): continued(model, text) for i, text in enumerate(texts)}
    for i, text in enumerate(texts):
        engine.add(text, greedy(), str(i))
        engine.step()
    found = finish(engine)
    assert {id: output.token_ids for id, output in found.items()} == expected
    assert engine.metrics().preemptions > 0
    states = engine.scheduler.states
    assert states is not None and states.free == 3


@pytest.mark.parametrize("kind", ["bloom", "xlm"])
def test_bits_do_not_depend_on_neighbours(kind: str) -> None:
    _, engine = engine_of(kind, block_size=8, chunk_size=16)
    texts = prompts(20, 33, 4)
    params = SamplingParams(max_tokens=NEW, temperature=0, ignore_eos=True, logprobs=3, prompt_logprobs=2)

    def logprobs(*chosen: list[int]) -> list[Any]:
        for i, text in enumerate(chosen):
            engine.add(text, params, str(i))
        found = finish(engine)
        return [(found[str(i)].outputs[0].logprobs, found[str(i)].prompt_logprobs) for i in range(len(chosen))]

    assert logprobs(*texts) == [logprobs(text)[0] for text in texts]


def test_samples_and_prefixes() -> None:
    """Samples go on with copies of a cache, and so does a prompt that begins as another did."""
    _, engine = engine_of("bloom", block_size=8, chunk_size=16, cache_blocks=4096)
    (text,) = prompts(40)
    params = SamplingParams(n=3, max_tokens=NEW, seed=3, ignore_eos=True)
    engine.add(text, params, "a")
    first = finish(engine)["a"]
    assert len({tuple(one.token_ids) for one in first.outputs}) == 3
    engine.add(text, params, "a")
    again = finish(engine)["a"]
    assert [one.token_ids for one in again.outputs] == [one.token_ids for one in first.outputs]
    assert engine.metrics().reused_tokens == 32
    more = text[:33] + prompts(9)[0]
    engine.add(more, greedy(), "b")
    found = finish(engine)["b"].token_ids
    assert engine.metrics().reused_tokens == 64
    engine.forget_prefixes()
    engine.add(more, greedy(), "b")
    assert finish(engine)["b"].token_ids == found


def test_steps_that_fail_and_interrupts() -> None:
    """A cache that a step has changed in part is not used again: what is interrupted begins from its tokens."""
    model, engine = engine_of("bloom", block_size=8, chunk_size=16)
    texts = prompts(20, 9)
    expected = [continued(model, text) for text in texts]

    def fail_with(error: BaseException) -> Any:
        def fail(*args: Any) -> None:
            raise error

        return model.transformer.h[2].register_forward_pre_hook(fail)

    for error in (KeyboardInterrupt(), RuntimeError("planted")):
        ids = [engine.add(text, greedy()) for text in texts]
        for _ in range(3):
            engine.step()
        handle = fail_with(error)
        if isinstance(error, KeyboardInterrupt):
            with pytest.raises(KeyboardInterrupt):
                engine.step()
            handle.remove()
            found = finish(engine)
            assert [found[id].token_ids for id in ids] == expected
        else:
            failed = [output.outputs[0] for output in engine.step()]
            handle.remove()
            assert [one.finish_reason for one in failed] == ["error"] * 2 and "planted" in str(failed[0].error)
    engine.add(texts[0], greedy(), "later")
    assert finish(engine)["later"].token_ids == expected[0]


def test_embeddings() -> None:
    model: Any = build("bloom")
    llm = LLM(model, block_size=8, chunk_size=16)
    texts = prompts(20, 33)
    found = llm.embed(texts)
    for text, output in zip(texts, found, strict=True):
        with torch.no_grad():
            states = model.transformer(input_ids=torch.tensor([text])).last_hidden_state[0, -1]
        expected = torch.nn.functional.normalize(states.float(), dim=0)
        torch.testing.assert_close(torch.tensor(output.outputs.embedding), expected, rtol=1e-4, atol=1e-5)


def test_refused() -> None:
    """A model that sees later tokens, with both reasons; adapters, an int8 cache, broken weights."""
    both: Any = build("prophetnet")
    with pytest.raises(ValueError, match="cannot be served: no layer .*; and with transformers' own cache: the logits"):
        LLM(both)
    assert not is_patched(both)
    with pytest.raises(ValueError, match="enable_lora must be False for a model that runs with transformers' own"):
        LLM(build("bloom"), enable_lora=True)
    with pytest.raises(ValueError, match=r"kv_cache_dtype must be 'auto' for a model .* cache, got torch\.int8"):
        LLM(build("bloom"), kv_cache_dtype="int8")
    broken: Any = build("bloom")
    with torch.no_grad():
        broken.transformer.h[1].mlp.dense_h_to_4h.weight.fill_(torch.nan)
    with pytest.raises(ValueError, match="its logits are NaN or infinite"):
        LLM(broken)
    short = LLM(build("mpt"))  # its ALiBi ends at max_seq_len
    with pytest.raises(ValueError, match="prompt must be shorter than 256 tokens"):
        short.generate([[5] * 256])
    codes: Any = build("musicgen")
    with pytest.raises(ValueError, match="its tokens have several embeddings"):
        LLM(codes)


def test_what_a_cache_takes() -> None:
    """Bytes for each token, by which the engine counts how many fit; a copy is its own."""
    model, engine = engine_of("bloom", cache_bytes=1 << 20)
    served = engine.model
    per_token = 2 * 4 * 64 * 4  # keys and values of four layers, float32
    assert served.bytes_per_token(torch.float32) == per_token
    assert served.bytes_per_sequence == 1 + per_token * 4096
    assert engine.metrics().blocks == (1 << 20) // (per_token * engine.config.block_size)
    caches = OwnCaches(2)
    caches.rows[0] = Kept([1, 2], {"past": [torch.ones(2), {"more": torch.zeros(3)}], "model": model})
    caches.rows[0] = caches.rows[0]._replace(cache={"past": caches.rows[0].cache["past"]})
    caches.copy([(0, 1)])
    first, second = caches.rows
    assert first is not None and second is not None and second.tokens == [1, 2]
    assert {x.data_ptr() for x in tensors_of(first.cache)}.isdisjoint(x.data_ptr() for x in tensors_of(second.cache))
    caches.reset([0])
    assert caches.rows[0] is None and caches.rows[1] is second
