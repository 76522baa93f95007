"""Models whose rotation depends on a sequence's length (longrope), in the engine: the tokens of transformers' generate.

It serves each prompt alone: short factors up to the original length and long ones beyond it; Phi-3 computes all keys
anew when generated tokens cross it, others keep those of the earlier tokens.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from torch_infini import LLM, SamplingParams, patch_model
from torch_infini.models import Llama
from torch_infini.nn import Batch
from torch_infini.testing.checkpoints import random_model
from torch_infini.testing.families import VOCABULARY
from torch_infini.testing.patched_families import Family

pytest.importorskip("transformers")
pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore::UserWarning")]

ORIGINAL, COUNT = 32, 12
# Both sides of the original length, and those whose tokens cross it: at the first, in the middle, at the last.
LENGTHS = (5, 20, 21, 26, 31, 32, 33, 47, 70)
FACTORS = {"short_factor": [1 + i / 8 for i in range(8)], "long_factor": [2.0 + i for i in range(8)]}
ROPE = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, **FACTORS}


def phi3() -> Any:
    return Family("Phi3", config={"rope_parameters": ROPE, "original_max_position_embeddings": ORIGINAL}).build()


def llama() -> Any:
    rope = {**ROPE, "original_max_position_embeddings": ORIGINAL}
    return random_model("llama", rope_parameters=rope, max_position_embeddings=256)


KINDS = ("llama", "llama of transformers", "phi3", "phi3, patched")


def both(kind: str, folder: Path, **settings: Any) -> tuple[Any, LLM]:
    """A model of transformers, and an LLM of it: of our layers, or of transformers', some patched."""
    theirs = llama() if kind.startswith("llama") else phi3()
    settings = {"block_size": 4, "chunk_size": 8, **settings}
    if kind == "llama":
        theirs.save_pretrained(folder)
        return theirs, LLM(str(folder), **settings)
    served = copy.deepcopy(theirs)
    if kind == "phi3, patched":
        patch_model(served)
    return theirs, LLM(served, **settings)


def prompts(lengths: tuple[int, ...], seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(2, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]


def greedy(count: int = COUNT) -> SamplingParams:
    return SamplingParams(max_tokens=count, temperature=0, ignore_eos=True)


def expected(theirs: Any, given: list[list[int]], count: int = COUNT) -> list[list[int]]:
    """What transformers generates for each prompt alone."""
    theirs.generation_config.eos_token_id = theirs.generation_config.pad_token_id = None
    found = [theirs.generate(torch.tensor([p]), max_new_tokens=count, do_sample=False)[0].tolist() for p in given]
    return [tokens[len(prompt) :] for tokens, prompt in zip(found, given, strict=True)]


def generated(llm: LLM, given: list[list[int]], count: int = COUNT) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(given, greedy(count))]


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_of_both_sides(kind: str, tmp_path: Path) -> None:
    """Alone, together, and in steps that are recorded or not."""
    theirs, llm = both(kind, tmp_path)
    given = prompts(LENGTHS)
    wanted = expected(theirs, given)
    assert [generated(llm, [prompt])[0] for prompt in given] == wanted
    llm.engine.forget_prefixes()
    assert generated(llm, given) == wanted
    assert llm.engine.model.is_recordable
    _, eager = both(kind, tmp_path, enforce_eager=True)
    assert generated(eager, given) == wanted


def test_the_sides_differ(tmp_path: Path) -> None:
    """What the other tests compare depends on the factors: of each side, and on what a crossing does."""
    given = prompts(LENGTHS)
    theirs = phi3()
    wanted = expected(theirs, given)
    for name, other in (("short_factor", "long_factor"), ("long_factor", "short_factor")):
        changed = {**ROPE, name: FACTORS[other]}
        config = {"rope_parameters": changed, "original_max_position_embeddings": ORIGINAL}
        found = expected(Family("Phi3", config=config).build(), given)
        assert found[:2] == wanted[:2] if name == "long_factor" else found[-2:] == wanted[-2:]
        assert all(a != b for a, b in zip(found, wanted, strict=True)) is False and found != wanted
    kept = phi3()
    kept.prepare_inputs_for_generation = super(type(kept), kept).prepare_inputs_for_generation
    found = expected(kept, given)
    assert found != wanted and found[:2] == wanted[:2] and found[-3:] == wanted[-3:]


@pytest.mark.parametrize("kind", KINDS)
def test_prefixes(kind: str, tmp_path: Path) -> None:
    """Reused between prompts of one rotation, never between two."""
    theirs, llm = both(kind, tmp_path)
    (whole,) = prompts((60,))
    long, short = [whole, whole[:41] + [3, 4]], [whole[:18], whole[:16] + [5, 6], whole[:20]]  # + COUNT: short
    for given, reuses in ((short[:1], False), (long[:1], False), (short[1:], True), (long[1:], True)):
        before = llm.metrics().reused_tokens
        assert generated(llm, given) == expected(theirs, given)
        assert (llm.metrics().reused_tokens > before) is reuses
    # A prompt that crosses, and then its text as a long prompt; and the other way round.
    (crossing,) = prompts((27,), seed=1)
    (text,) = expected(theirs, [crossing])
    for given in ([crossing], [crossing + text], [crossing]):
        assert generated(llm, given) == expected(theirs, given)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reuse", [False, True])
def test_preemption(kind: str, reuse: bool, tmp_path: Path) -> None:
    theirs, llm = both(kind, tmp_path, cache_blocks=24, enable_prefix_caching=reuse)
    given = prompts((22, 29, 31, 34, 40, 8), seed=1)
    assert generated(llm, given, 24) == expected(theirs, given, 24)
    assert llm.metrics().preemptions > 0


@pytest.mark.parametrize("kind", KINDS)
def test_samples_of_a_crossing_prompt(kind: str, tmp_path: Path) -> None:
    """Samples share the prompt's blocks until each computes its own anew; then as if each were alone."""
    _, llm = both(kind, tmp_path)
    (prompt,) = prompts((28,))
    params = SamplingParams(n=3, max_tokens=COUNT, temperature=1.0, seed=5, ignore_eos=True)
    (together,) = llm.generate([prompt], params)
    _, small = both(kind, tmp_path, max_num_seqs=1, enable_prefix_caching=False)
    (apart,) = small.generate([prompt], params)
    assert [one.token_ids for one in together.outputs] == [one.token_ids for one in apart.outputs]


def test_log_probabilities_of_a_crossing_prompt(tmp_path: Path) -> None:
    """Those of the prompt are those of its own rotation, whatever is computed later."""
    _, llm = both("phi3", tmp_path)
    (prompt,) = prompts((30,))
    settings = {"temperature": 0, "prompt_logprobs": 1, "ignore_eos": True}
    first, crossing = (llm.generate([prompt], SamplingParams(max_tokens=n, **settings))[0] for n in (1, COUNT))
    assert first.prompt_logprobs == crossing.prompt_logprobs


def test_rows(tmp_path: Path) -> None:
    """A caller of the model says by rows of the tables which rotation a token gets."""
    llama().save_pretrained(tmp_path)
    model = Llama.from_pretrained(tmp_path)
    switch = model.rotary_switch
    assert switch is not None and switch == (ORIGINAL, 256, False)
    positions = torch.arange(256)
    for is_long in (False, True):
        rows = switch.row(positions, is_long)
        assert torch.equal(switch.position(rows), positions)
        assert torch.equal(switch.is_long(rows), (positions >= ORIGINAL) | is_long)
        assert [switch.row(at, is_long) for at in range(256)] == rows.tolist()
    (prompt,) = prompts((40,))
    theirs = llama()
    ids, at = torch.tensor(prompt), torch.arange(40)
    starts, table = torch.tensor([0, 40]), torch.arange(3)[None]
    for is_long in (False, True):
        cache = model.new_cache(3, 16)
        logits = model(Batch(ids, switch.row(at, is_long), at, table, torch.tensor([40]), starts), cache)
        with torch.no_grad():
            close = torch.allclose(logits, theirs(ids[None]).logits[0], atol=1e-4)
        assert close is is_long


def test_dynamic_is_served_whole(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its rotation changes beyond max_position_embeddings alone, whatever original length its parameters name."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4, "original_max_position_embeddings": ORIGINAL}
    theirs = Family("Llama", config={"rope_parameters": rope}).build()
    llm = LLM(copy.deepcopy(theirs), block_size=4, chunk_size=8)
    assert llm.engine.max_model_len == theirs.config.max_position_embeddings > ORIGINAL
    assert "sequences must be shorter" not in caplog.text
    given = prompts((20, 30, 60))
    assert generated(llm, given) == expected(theirs, given)
