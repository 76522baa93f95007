"""Speculative decoding: tokens, log-probabilities and ends of requests are those without it, whatever is guessed; where
guesses come from, how many are tried, and settings that are refused.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from support.engines import finish, random_params, small_engine
from torch_infini import LLM, SamplingParams, StructuredOutputsParams
from torch_infini.__main__ import main
from torch_infini.distributed.rank_threads import on_ranks
from torch_infini.engine import Engine, EngineConfig, SpeculativeConfig
from torch_infini.engine.blocks import BlockManager
from torch_infini.engine.draft_model import ModelDrafts
from torch_infini.engine.speculation import MAX_ROWS, Alike, Drafts, Times, _History
from torch_infini.models import Llama
from torch_infini.testing.checkpoints import MODELS, SMALL, random_model

pytestmark = pytest.mark.usefixtures("one_thread")
VOCABULARY = SMALL["vocab_size"]
GUESS = {"num_speculative_tokens": 4}
GREEDY = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, detokenize=False)


def prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(sum(lengths))
    return [torch.randint(VOCABULARY, (n,), generator=generator).tolist() for n in lengths]


class _Free(Alike):
    """Steps that cost nothing."""

    def of(self, rows: int) -> float:
        return 0.0


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Guesses are always tried, whole; those of a draft model cost nothing."""
    of_text, of_model = Drafts.__init__, ModelDrafts.__init__

    def init(self: Drafts, *args: Any) -> None:
        of_text(self, *args)
        self._times = Alike()

    def init_model(self: ModelDrafts, *args: Any) -> None:
        of_model(self, *args)
        self._draft_times = _Free()

    monkeypatch.setattr(Drafts, "__init__", init)
    monkeypatch.setattr(ModelDrafts, "__init__", init_model)
    yield


class _Oracle:
    """Guesses what other runs had generated, some of it wrong."""

    def __init__(self, continuations: list[list[int]], share: float) -> None:
        self.continuations, self.share, self.chance = continuations, share, random.Random(0)

    def guess(self, drafts: Drafts, sequence: Any) -> list[int]:
        if not sequence.generated:
            return []
        tokens, most = (
            sequence.tokens,
            min(self.chance.randint(0, 4), sequence.request.limit - len(sequence.tokens) - 1),
        )
        for whole in self.continuations:
            if whole[: len(tokens)] == tokens:
                draft = whole[len(tokens) : len(tokens) + max(most, 0)]
                return [t if self.chance.random() < self.share else self.chance.randrange(VOCABULARY) for t in draft]
        return [self.chance.randrange(VOCABULARY) for _ in range(most)]


def told(outputs: Any) -> list[Any]:
    """All that a request's outputs say but times."""
    return [
        [
            (c.token_ids, c.text, c.logprobs, c.cumulative_logprob, c.finish_reason, c.stop_reason, c.error)
            for c in o.outputs
        ]
        for o in outputs
    ]


@pytest.mark.parametrize("share", [0.0, 0.7, 1.0])
def test_any_guesses(share: float, tmp_path: Path, always: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests of all kinds, together and with preemptions: the same outputs to the last bit of log-probabilities."""
    chance = random.Random(3)
    rows = prompts(3, 40, 1, 90, 17, 33, 8, 21)
    params = [random_params(chance, 60) for _ in rows]
    params = [p if p.seed is not None else SamplingParams(temperature=0, max_tokens=40, logprobs=2) for p in params]

    def run(**settings: Any) -> tuple[list[Any], Any]:
        engine = small_engine(tmp_path, block_size=8, chunk_size=16, **settings)
        ids = [engine.add(row, one) for row, one in zip(rows, params, strict=True)]
        done = finish(engine)
        return [done[id] for id in ids], engine.metrics()

    want, _ = run()
    continuations = [o.prompt_token_ids + c.token_ids for o in want for c in o.outputs]
    oracle = _Oracle(continuations, share)
    monkeypatch.setattr(Drafts, "_guess", lambda self, sequence: oracle.guess(self, sequence))
    for settings in ({}, {"cache_blocks": 30}, {"enforce_eager": True, "max_num_seqs": 2}):
        found, metrics = run(speculative_config=GUESS, **settings)
        assert told(found) == told(want)
        assert metrics.draft_tokens >= metrics.accepted_tokens and metrics.draft_tokens > 20
        assert (metrics.accepted_tokens > 20) == (share > 0)
        assert (metrics.preemptions > 0) == ("cache_blocks" in settings)
        assert metrics.free_blocks == metrics.blocks


@pytest.mark.full(beyond=2)
@pytest.mark.parametrize("name", MODELS)
def test_every_family(name: str, tmp_path: Path, always: None) -> None:
    """Greedy tokens repeat themselves soon, which guesses find: fewer steps, the same tokens."""
    random_model(name).save_pretrained(tmp_path)
    rows = prompts(5, 40, 3)
    rows.append(rows[1] * 3)
    plain, guessing = LLM(tmp_path, block_size=8), LLM(tmp_path, block_size=8, speculative_config=GUESS)
    for _ in range(2):  # the second time with prefixes of the first
        assert told(guessing.generate(rows, GREEDY)) == told(plain.generate(rows, GREEDY))
    # Alone, too: together they take as many steps as the request with the fewest right guesses, which may be none.
    for row in rows:
        assert told(guessing.generate([row], GREEDY)) == told(plain.generate([row], GREEDY))
    found, want = guessing.metrics(), plain.metrics()
    assert found.steps < want.steps and found.generated_tokens == want.generated_tokens
    assert 0 < found.accepted_tokens <= found.draft_tokens


@pytest.mark.parametrize("settings", [{"kv_cache_dtype": "int8"}, {"quantization": "int4"}], ids=str)
def test_integers(settings: Any, tmp_path: Path, always: None) -> None:
    random_model("llama", intermediate_size=128).save_pretrained(tmp_path)
    rows = prompts(30, 8)
    want = told(LLM(tmp_path, **settings).generate(rows, GREEDY))
    guessing = LLM(tmp_path, speculative_config=GUESS, **settings)
    assert told(guessing.generate(rows, GREEDY)) == want
    assert guessing.metrics().accepted_tokens > 0


def test_models_of_transformers(tmp_path: Path, always: None) -> None:
    pytest.importorskip("transformers")
    from torch_infini.testing.causal_types import VOCABULARY as SIZE
    from torch_infini.testing.causal_types import build

    build("gemma2").save_pretrained(tmp_path)
    rows = [[t % SIZE for t in row] for row in prompts(30, 8)]
    guessing = LLM(tmp_path, speculative_config=GUESS)
    want = [o.outputs[0].token_ids for o in LLM(tmp_path).generate(rows, GREEDY)]
    assert [o.outputs[0].token_ids for o in guessing.generate(rows, GREEDY)] == want
    assert guessing.metrics().accepted_tokens > 0
    with pytest.raises(ValueError, match="speculative_config must be None for a model that keeps states, got Spec"):
        LLM(build("qwen3_next"), speculative_config=GUESS)


def test_ranks(tmp_path: Path) -> None:
    """Ranks that schedule by themselves, as torchrun's, guess alike, whatever their clocks say; workers do as told."""
    random_model("llama").save_pretrained(tmp_path)
    rows = prompts(30, 8)
    want = [o.outputs[0].token_ids for o in LLM(tmp_path).generate(rows, GREEDY)]

    def work(tp_group: Any) -> Any:
        llm = LLM(Llama.from_pretrained(tmp_path, tp_group=tp_group), speculative_config=GUESS)
        return [o.outputs[0].token_ids for o in llm.generate(rows, GREEDY)], llm.metrics().accepted_tokens

    for tokens, accepted in on_ranks(2, work):
        assert tokens == want and accepted > 0
    llm = LLM(tmp_path, tensor_parallel_size=2, speculative_config=GUESS)
    assert [o.outputs[0].token_ids for o in llm.generate(rows, GREEDY)] == want
    llm.generate(rows, GREEDY)
    assert llm.metrics().draft_tokens > 0


def test_ends_within_guesses(tmp_path: Path, always: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stop token, a stop string and the last token are found in the midst of right guesses; nothing follows them."""
    engine = small_engine(tmp_path)
    (row,) = prompts(20)
    id = engine.add(row, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    whole = finish(engine)[id].outputs[0]
    oracle = _Oracle([row + whole.token_ids], 1.0)
    monkeypatch.setattr(Drafts, "_guess", lambda self, sequence: oracle.guess(self, sequence))
    guessing = Engine(engine.model, engine.tokenizer, EngineConfig(speculative_config=GUESS))
    stop = whole.token_ids[13]
    for params in (
        SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, stop_token_ids=[stop]),
        SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, stop=[whole.text[20:24]]),
        SamplingParams(temperature=0, max_tokens=7, ignore_eos=True),
    ):
        found = []
        for one in (engine, guessing):
            id = one.add(row, params)
            found.append(told([finish(one)[id]]))
        assert found[0] == found[1]


def test_forms_are_not_guessed(tmp_path: Path, always: None) -> None:
    """Requests with structured_outputs or processors get one token a step, beside others."""
    pytest.importorskip("llguidance")
    engine = small_engine(tmp_path, speculative_config=GUESS, block_size=8)
    rows = prompts(20, 9)
    form = StructuredOutputsParams(regex="(ab){4}")
    calls: list[int] = []

    def process(output: list[int], logits: Any) -> Any:
        calls.append(len(output))
        return logits

    ids = [
        engine.add(rows[0], SamplingParams(temperature=0, max_tokens=30, structured_outputs=form)),
        engine.add(rows[1], SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, logits_processors=[process])),
        engine.add(rows[1] * 4, GREEDY),
    ]
    done = finish(engine)
    assert done[ids[0]].outputs[0].text == "abababab"
    assert calls == list(range(30))
    assert engine.metrics().accepted_tokens > 0


def test_an_interrupted_step(tmp_path: Path, always: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was guessed is forgotten, no token changes."""
    rows = prompts(20, 9)
    plain = small_engine(tmp_path, block_size=8)
    ids = [plain.add(row, GREEDY) for row in rows]
    done = finish(plain)
    want = [done[id].outputs[0].token_ids for id in ids]
    engine = small_engine(tmp_path, speculative_config=GUESS, block_size=8)
    ids = [engine.add(row, GREEDY) for row in rows]
    original, steps = Engine._append_guessed, [0]

    def interrupted(self: Engine, *args: Any) -> None:
        steps[0] += 1
        if steps[0] % 3 == 0:
            raise KeyboardInterrupt
        original(self, *args)

    monkeypatch.setattr(Engine, "_append_guessed", interrupted)
    outputs: dict[str, Any] = {}
    while not engine.is_idle:
        try:
            outputs |= {one.request_id: one for one in engine.step()}
        except KeyboardInterrupt:
            outputs |= {one.request_id: one for one in engine.outputs}
    assert [outputs[id].outputs[0].token_ids for id in ids] == want and steps[0] > 5


def test_server(tmp_path: Path, always: None) -> None:
    """Streams whose events have several tokens: text, tokens and log-probabilities of a whole answer; counts."""
    pytest.importorskip("fastapi")
    pytest.importorskip("httpx2")
    from support.serving import MODEL, ask, events_of, save_model, service_of
    from torch_infini import AsyncLLM

    save_model(tmp_path)
    plain = service_of(AsyncLLM(tmp_path))
    guessing = service_of(AsyncLLM(tmp_path, speculative_config=GUESS))
    body = {
        "model": MODEL,
        "prompt": "a b a b a b",
        "max_tokens": 80,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 1,
    }
    want = ask(plain, "POST", "/v1/completions", json=body).json()["choices"][0]
    assert ask(guessing, "POST", "/v1/completions", json=body).json()["choices"][0] == want
    events = events_of(ask(guessing, "POST", "/v1/completions", json={**body, "stream": True}).text)
    choices = [event["choices"][0] for event in events if event["choices"]]
    assert "".join(choice["text"] for choice in choices) == want["text"]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [x for choice in choices if choice["logprobs"] for x in choice["logprobs"][name]] == want["logprobs"][
            name
        ]
    assert len(choices) < 70, "some events have several tokens"
    counts = ask(guessing, "GET", "/metrics").text
    found = [float(line.split()[-1]) for line in counts.splitlines() if line.startswith("infini:spec_decode_num_acc")]
    assert found[0] > 10
    assert (
        ask(guessing, "GET", "/slots").json()[0]["speculative"]
        and not ask(plain, "GET", "/slots").json()[0]["speculative"]
    )


# ---- where guesses come from ----


def longest(tokens: list[int], least: int, most: int) -> int | None:
    """As _History.place, by comparing all places."""
    best, place = 0, None
    for at in range(1, len(tokens)):
        common = 0
        while common < min(most, at) and tokens[at - common - 1] == tokens[len(tokens) - common - 1]:
            common += 1
        if common >= max(least, best):
            best, place = common, at
    return place


def test_places() -> None:
    """The longest earlier run of tokens, the latest of several, as tokens come; few places have so many in common."""
    chance = random.Random(0)
    found = seen = 0
    for size, most in ((1, 3), (2, 5), (3, 3)):
        for _ in range(40):
            history, tokens = _History(size, 0.5), []
            for _ in range(60):
                tokens += [chance.randrange(6) for _ in range(chance.randint(1, 3))]
                place, want = history.place(tokens, most), longest(tokens, size, most)
                assert (place is None) == (want is None)
                if place is not None and want is not None:
                    assert tokens[place - size : place] == tokens[-size:]
                    found += place == want
                    seen += 1
    assert found > 0.8 * seen > 3000


def test_counts() -> None:
    """As many as give the most tokens a second: all where steps take as long, none where they pay nothing."""
    drafts = Drafts(SpeculativeConfig(4), BlockManager(4, 8))

    def set_seconds(seconds: dict[int, float]) -> None:
        drafts._times._seconds = dict(seconds)

    set_seconds(dict.fromkeys(range(1, MAX_ROWS + 1), 1.0))
    assert drafts._counts([(0.5, 4), (0.9, 2)]) == [4, 2]
    set_seconds({rows: float(rows) for rows in range(1, MAX_ROWS + 1)})
    assert drafts._counts([(0.9, 4)]) == [0]
    set_seconds({1: 1.0, 2: 1.1, 3: 1.2, 4: 3.0, 5: 3.0})
    assert drafts._counts([(0.8, 4)]) == [2]  # a step of four rows is dear
    assert drafts._counts([(0.01, 4)]) == [0]
    set_seconds({1: 1.0})  # others did not count yet, and are tried
    assert drafts._counts([(0.8, 4)]) == [4]
    assert sum(drafts._counts([(0.9, 4)] * 10)) == MAX_ROWS - 10
    assert drafts._counts([(0.9, 4)] * 20) == [0] * 20


def test_steps_are_measured(tmp_path: Path) -> None:
    """The first step of a number of rows, which is recorded, does not count; nothing is guessed before one does."""
    times = Times()
    assert times.of(3) == 0.0 and not times.knows(1)
    times.note(1, 9.0)
    assert not times.knows(1)
    times.note(1, 1.0)
    times.note(1, 2.0)
    assert times.knows(1) and times.of(1) == times.of(5) == pytest.approx(1.2)
    engine = small_engine(tmp_path, speculative_config=GUESS)
    engine.add(prompts(9)[0] * 3, GREEDY)
    finish(engine)
    assert engine._drafts is not None and engine._drafts._times.knows(1)


# ---- draft models ----


def with_draft(folder: Path, draft: Path, **settings: Any) -> LLM:
    guesses = {"model": str(draft), "num_speculative_tokens": 4}
    return LLM(folder, block_size=8, chunk_size=16, speculative_config=guesses, progress=False, **settings)


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """A model, and a smaller one of other weights."""
    random_model("llama").save_pretrained(tmp_path / "model")
    random_model("qwen3", seed=1, num_hidden_layers=1).save_pretrained(tmp_path / "draft")
    return tmp_path / "model", tmp_path / "draft"


def test_a_draft_models_guesses(folders: tuple[Path, Path], always: None) -> None:
    """Of one that is always right, and of one that hardly is; several at a time, with preemptions and prefixes."""
    folder, draft = folders
    rows = prompts(5, 40, 3, 33)
    rows.append(rows[1][:32] + rows[2])
    params = [GREEDY, SamplingParams(temperature=0.8, seed=3, max_tokens=50, n=2, logprobs=1), GREEDY, GREEDY, GREEDY]
    plain = LLM(folder, block_size=8, chunk_size=16, progress=False)
    want = told(plain.generate(rows, params)) + told(plain.generate(rows, params))
    for model, settings in (
        (folder, {}),
        (folder, {"cache_blocks": 24}),
        (draft, {}),
        (draft, {"enforce_eager": True}),
    ):
        llm = with_draft(folder, model, **settings)
        assert told(llm.generate(rows, params)) + told(llm.generate(rows, params)) == want
        metrics = llm.metrics()
        assert metrics.draft_tokens > 50 and (metrics.preemptions > 0) == ("cache_blocks" in settings)
        share = metrics.accepted_tokens / metrics.draft_tokens
        assert share > 0.95 if model == folder else share < 0.5
        assert metrics.free_blocks == metrics.blocks


def test_a_draft_model_that_is_always_right(folders: tuple[Path, Path], always: None) -> None:
    """Also where tokens are drawn: with the same seeds both models draw alike. A step gives five tokens."""
    folder, _ = folders
    llm = with_draft(folder, folder)
    for params in (GREEDY, SamplingParams(temperature=1.2, top_p=0.9, seed=5, max_tokens=60, ignore_eos=True)):
        before = llm.metrics().steps
        (output,) = llm.generate(prompts(20), params)
        assert len(output.outputs[0].token_ids) == 60
        assert llm.metrics().steps - before < 2 + 60 / 4.5


def test_a_draft_model_that_pauses(folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, always: None) -> None:
    """Tokens that were generated without guesses are computed with the next guess, in one go."""
    folder, _ = folders
    llm = with_draft(folder, folder)
    original, calls = ModelDrafts._common_counts, [0]

    def sometimes(self: ModelDrafts, chunks: Any) -> list[int]:
        calls[0] += 1
        return original(self, chunks) if calls[0] % 40 in (0, 1, 2) else [0] * len(chunks)

    monkeypatch.setattr(ModelDrafts, "_common_counts", sometimes)
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    want = told(LLM(folder, progress=False).generate(prompts(20, 5), params))
    assert told(llm.generate(prompts(20, 5), params)) == want
    metrics = llm.metrics()
    assert 30 < metrics.draft_tokens == metrics.accepted_tokens


def test_a_draft_model_that_fails(
    folders: tuple[Path, Path], always: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is left out for good, and nothing else happens."""
    folder, _ = folders
    want = told(LLM(folder, progress=False).generate(prompts(20), GREEDY))
    llm = with_draft(folder, folder)
    assert isinstance(llm.engine._drafts, ModelDrafts)
    original, calls = llm.engine._drafts._runner.run, [0]

    def failing(*args: Any) -> Any:
        calls[0] += 1
        if calls[0] == 5:
            raise RuntimeError("no more")
        return original(*args)

    monkeypatch.setattr(llm.engine._drafts._runner, "run", failing)
    assert told(llm.generate(prompts(20), GREEDY)) == want
    assert "no tokens are guessed any more: RuntimeError: no more" in caplog.text and llm.engine._drafts is None


def test_draft_models_that_do_not_fit(folders: tuple[Path, Path], tmp_path: Path) -> None:
    folder, draft = folders
    random_model("llama", vocab_size=VOCABULARY + 2000).save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match=f"must have the vocabulary of the model, {VOCABULARY} tokens, got "):
        with_draft(folder, tmp_path / "other")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        with_draft(folder, tmp_path / "nowhere")
    with pytest.raises(ValueError, match="tensor_parallel_size must be 1 for a speculative_config with a model"):
        with_draft(folder, draft, tensor_parallel_size=2)
    config = EngineConfig(speculative_config=SpeculativeConfig(2, "draft_model", model=str(draft)))
    with pytest.raises(ValueError, match="draft must be given for a speculative_config with a model"):
        Engine(Llama.from_pretrained(folder, progress=False), config=config)


def test_vocabularies_and_positions_may_differ_a_little(tmp_path: Path, always: None) -> None:
    """Ids that one of the two lacks are not guessed; a sequence that outgrows the draft model goes on without it."""
    random_model("llama").save_pretrained(tmp_path / "model")
    for name, changes in (("less", {"vocab_size": VOCABULARY - 40}), ("more", {"vocab_size": VOCABULARY + 40})):
        random_model("llama", **changes).save_pretrained(tmp_path / name)
    random_model("llama", max_position_embeddings=48).save_pretrained(tmp_path / "short")
    rows = prompts(20, 6)
    want = told(LLM(tmp_path / "model", progress=False).generate(rows, GREEDY))
    for name in ("less", "more", "short"):
        llm = with_draft(tmp_path / "model", tmp_path / name)
        assert told(llm.generate(rows, GREEDY)) == want
        assert llm.metrics().draft_tokens > 0


# ---- settings ----


@pytest.mark.parametrize(
    "value, rule",
    [
        ({**GUESS, "method": "eagle"}, "method must be 'ngram' or 'draft_model', got 'eagle'"),
        ({**GUESS, "method": "draft_model"}, "model must be given for method 'draft_model', got None"),
        ({**GUESS, "method": "ngram", "model": "x"}, "model must be left out for method 'ngram', got 'x'"),
        ({**GUESS, "quantization": 4}, "quantization must be a name or None, got 4"),
        ({**GUESS, "model": ""}, "model must be a name or None, got ''"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens must be an integer of at least 1, got 0"),
        ({"num_speculative_tokens": 16}, "num_speculative_tokens must be at most 15, got 16"),
        ({"num_speculative_tokens": 2, "prompt_lookup_max": "a"}, "prompt_lookup_max must be an integer .* got 'a'"),
        (
            {"num_speculative_tokens": 2, "prompt_lookup_max": 2, "prompt_lookup_min": 3},
            "prompt_lookup_min must be at most",
        ),
        ({**GUESS, "draft_tensor_parallel_size": 1}, "keys must be .*, got 'draft_tensor_parallel_size'"),
        ({"method": "ngram"}, "num_speculative_tokens must be given"),
        ("ngram", "speculative_config must be a mapping or None, got 'ngram'"),
    ],
    ids=str,
)
def test_refused(value: Any, rule: str) -> None:
    with pytest.raises(ValueError, match=f"torch_infini.SpeculativeConfig: {rule}"):
        EngineConfig(speculative_config=value)


def test_settings() -> None:
    assert EngineConfig(speculative_config=GUESS).speculative_config == SpeculativeConfig(4, "ngram", 5, 2)
    assert SpeculativeConfig.of({**GUESS, "prompt_lookup_max": 1}).prompt_lookup_min == 1
    assert SpeculativeConfig.of({**GUESS, "prompt_lookup_min": 7}).prompt_lookup_max == 7
    assert EngineConfig(max_num_seqs=2).max_rows == 2
    assert EngineConfig(max_num_seqs=2, speculative_config=SpeculativeConfig(3)).max_rows == MAX_ROWS
    assert EngineConfig(max_num_seqs=40, speculative_config=SpeculativeConfig(3)).max_rows == 40


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small_engine(tmp_path)
    command = [
        "generate",
        "--model",
        str(tmp_path),
        "--prompt",
        "hello",
        "--max-new-tokens",
        "5",
        "--speculative-config",
    ]
    assert main([*command, '{"method": "ngram", "num_speculative_tokens": 3}']) == 0
    capsys.readouterr()
    for value, rule in (
        ("{", "--speculative-config must be JSON, got {"),
        ('{"method": "x"}', "num_speculative_tokens"),
    ):
        assert main([*command, value]) != 0
        assert rule in capsys.readouterr().err
