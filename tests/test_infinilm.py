"""infinilm.InferEngine against transformers: both vocabularies, both caches, sampling, subclasses.

What it refuses is in test_infinilm_errors.py.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support.rounding import assert_same_but_rounding, greedy_tokens, sums_of
from torch_infini.compat import infinicore
from torch_infini.compat.infinilm import AutoConfig, infer_engine
from torch_infini.compat.infinilm.lib import _infinilm
from torch_infini.compat.infinilm.sampling import Settings, by_fixed_number
from torch_infini.engine.decode import MAX_STEPS
from torch_infini.testing.checkpoints import MODELS, SMALL, random_model
from torch_infini.testing.compare import rounding_error
from torch_infini.testing.ops.random_sample import uniform

pytestmark = pytest.mark.usefixtures("one_thread")

VOCABULARY = SMALL["vocab_size"]
NEW = 8
SHORT_WINDOWS = {"mistral": {"sliding_window": 6}, "qwen2-windows": {"sliding_window": 6}}


def engine_of(model: Any, folder: Path, cache: Any = None, cls: Any = _infinilm.InferEngine) -> Any:
    """An engine with the model's parameters."""
    model.config.save_pretrained(folder)
    engine = cls(AutoConfig.from_pretrained(folder), cache_config=cache)
    for name, parameter in model.state_dict().items():
        engine.load_param(name, parameter)
    return engine


def state_of(engine: Any) -> dict[str, Tensor]:
    """The parameters of the only rank, as torch tensors over the same memory."""
    (state,) = engine.state_dict()
    return {name: torch.from_dlpack(tensor) for name, tensor in state.items()}


def prompts(lengths: Sequence[int] = (3, 9, 1, 6)) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(VOCABULARY, (n,), generator=generator).tolist() for n in lengths]


def greedy(model: Any, prompt: list[int], new: int = NEW) -> list[int]:
    """transformers' tokens behind one prompt."""
    ids = torch.tensor([prompt])
    tokens = greedy_tokens(model, ids, attention_mask=torch.ones_like(ids), max_new_tokens=new)
    return tokens[0, len(prompt) :].tolist()


def lengths_of(newer: bool, past: Tensor, new: Tensor) -> dict[str, Tensor]:
    """Lengths in either vocabulary."""
    if newer:
        return {"past_sequence_lengths": past, "total_sequence_lengths": past + new}
    return {"cache_lengths": past, "input_lengths": new}


class Static:
    """Rows of tokens, each with its place in a static cache."""

    def __init__(self, engine: Any, newer: bool) -> None:
        self.engine, self.newer = engine, newer
        self.past = torch.zeros(0, dtype=torch.int64)

    def __call__(self, rows: list[list[int]], **more: Any) -> list[int]:
        new = torch.tensor([len(row) for row in rows])
        if not len(self.past):
            self.past = torch.zeros_like(new)
        width = int(new.max())
        ids = torch.tensor([row + [10**9] * (width - len(row)) for row in rows])  # padding is nobody's token
        places = self.past[:, None] + torch.arange(width)
        input = self.engine.Input(ids, places, **lengths_of(self.newer, self.past, new), **more)
        tokens = self.engine.forward(input).output_ids
        assert tokens.shape == ((len(rows),) if self.newer else (len(rows), 1)) and tokens.dtype == torch.int64
        self.past = self.past + new
        return tokens.flatten().tolist()


class Paged:
    """Rows of tokens in a paged cache, whose blocks are handed out from the last on, turn by turn."""

    def __init__(self, engine: Any, newer: bool, blocks: int = 40, size: int = 4) -> None:
        self.engine, self.newer, self.size = engine, newer, size
        self.free = list(range(blocks))
        self.tables: list[list[int]] = []
        self.past: list[int] = []

    def __call__(self, rows: list[list[int]], **more: Any) -> list[int]:
        self.tables = self.tables or [[] for _ in rows]
        self.past = self.past or [0] * len(rows)
        slots, places = [], []
        while any(len(t) * self.size < p + len(r) for t, p, r in zip(self.tables, self.past, rows, strict=True)):
            for table, past, row in zip(self.tables, self.past, rows, strict=True):
                if len(table) * self.size < past + len(row):
                    table.append(self.free.pop())
        for table, past, row in zip(self.tables, self.past, rows, strict=True):
            places += range(past, past + len(row))
            slots += [table[at // self.size] * self.size + at % self.size for at in range(past, past + len(row))]
        width = max(map(len, self.tables)) + 1
        new, past = torch.tensor([len(row) for row in rows]), torch.tensor(self.past)
        lengths = lengths_of(self.newer, past, new)
        if self.newer:
            lengths["input_offsets"] = torch.cat((torch.zeros(1, dtype=torch.int64), new.cumsum(0)))
        input = self.engine.Input(
            input_ids=torch.tensor([sum(rows, [])]),
            position_ids=torch.tensor(places),
            block_tables=torch.tensor([table + [-1] * (width - len(table)) for table in self.tables]),
            slot_mapping=torch.tensor(slots),
            **lengths,
            **more,
        )
        self.past = [p + len(row) for p, row in zip(self.past, rows, strict=True)]
        return self.engine.forward(input).output_ids.flatten().tolist()


def continued(feed: Any, rows: list[list[int]], new: int = NEW) -> list[list[int]]:
    """The greedy tokens behind each of the rows."""
    steps = [feed(rows, top_k=1)]
    while len(steps) < new:
        steps.append(feed([[token] for token in steps[-1]], top_k=1))
    return [list(tokens) for tokens in zip(*steps, strict=True)]


def static() -> Any:
    return _infinilm.StaticKVCacheConfig(max_batch_size=5, max_cache_len=24)


def paged() -> Any:
    return _infinilm.PagedKVCacheConfig(num_blocks=40, block_size=4)


@pytest.mark.parametrize("newer", (False, True), ids=("spec 003", "newer"))
@pytest.mark.parametrize(("cache", "feed"), ((static, Static), (paged, Paged)), ids=("static", "paged"))
@pytest.mark.parametrize("family", MODELS)
def test_tokens_are_those_of_transformers(family: str, cache: Any, feed: Any, newer: bool, tmp_path: Path) -> None:
    model = random_model(family, **SHORT_WINDOWS.get(family, {}))
    engine = engine_of(model, tmp_path, cache())
    expected = [greedy(model, prompt) for prompt in prompts()]
    assert len({tuple(tokens) for tokens in expected}) == 4  # or a mixed-up row would not be seen
    assert continued(feed(engine, newer), prompts()) == expected


def test_prefill_in_pieces_beside_decode(tmp_path: Path) -> None:
    model = random_model("llama")
    long, short = prompts((12, 4))
    feed = Paged(engine_of(model, tmp_path, paged()), True)
    expected = greedy(model, short)
    tokens: list[int] = []
    for piece in (long[:5], long[5:6], long[6:12]):  # the short row generates beside the pieces of the long one
        behind_long, token = feed([piece, [tokens[-1]] if tokens else short], top_k=1)
        tokens.append(token)
    assert behind_long == greedy(model, long)[0] and tokens == expected[:3]


def test_a_shared_prefix_is_computed_once(tmp_path: Path) -> None:
    """The second row begins behind a block that the first one filled."""
    model = random_model("llama")
    (prompt,) = prompts((7,))
    engine = engine_of(model, tmp_path, paged())
    tensor = torch.tensor
    first = engine.Input(tensor([prompt]), block_tables=tensor([[3, 9, -1]]), cache_lengths=tensor([0]), top_k=1)
    assert engine.forward(first).output_ids.tolist() == [greedy(model, prompt)[:1]]
    other = [*prompt[:4], 5, 6]
    second = engine.Input(tensor([other[4:]]), block_tables=tensor([[3, 1]]), cache_lengths=tensor([4]), top_k=1)
    assert engine.forward(second).output_ids.tolist() == [greedy(model, other)[:1]]


def test_lengths_may_come_from_positions_or_totals(tmp_path: Path) -> None:
    """A static prefill and two decode steps, and the same paged."""
    model = random_model("llama")
    (prompt,) = prompts((5,))
    expected = greedy(model, prompt, 3)
    tensor = torch.tensor
    for cache, more in ((static(), {}), (paged(), {"block_tables": tensor([[7, 2]])})):
        engine = engine_of(model, tmp_path, cache)
        flat = slice(None) if not more else 0
        places = torch.arange(5)[None]
        first = engine.forward(engine.Input(tensor([prompt]), places[flat], top_k=1, **more)).output_ids
        second = engine.forward(engine.Input(first, tensor([[5]])[flat], top_k=1, **more)).output_ids
        totals = engine.Input(second, total_sequence_lengths=tensor([7]), top_k=1, **more)
        assert [first.item(), second.item(), engine.forward(totals).output_ids.item()] == expected


def test_positions_may_be_others_than_places_in_the_cache(tmp_path: Path) -> None:
    """Positions turn q and k; where keys lie follows from lengths."""
    model = random_model("llama")
    (prompt,) = prompts((8,))
    ids, places = torch.tensor([prompt]), torch.tensor([[0, 5, 6, 20, 21, 22, 40, 3]])
    with torch.no_grad():
        expected = model(ids, position_ids=places).logits[0, -1]
    for cache, more in ((static(), {}), (paged(), {"block_tables": torch.tensor([[7, 2]])})):
        engine = engine_of(model, tmp_path, cache)
        seen = hooked(engine, "lm_head")
        for part, past in ((slice(0, 6), 0), (slice(6, 8), 6)):
            at = places[:, part] if not more else places[0, part]
            engine.forward(engine.Input(ids[:, part], at, cache_lengths=torch.tensor([past]), **more))
        assert_same_but_rounding(seen[-1][0], expected, *sums_of(model.config))


def test_lengths_in_32_bits_and_on_no_rank(tmp_path: Path) -> None:
    """int32 is taken; input_ids of a paged cache may be [tokens]."""
    model = random_model("llama")
    (prompt,) = prompts((5,))
    engine = engine_of(model, tmp_path, paged())
    input = engine.Input(
        torch.tensor(prompt, dtype=torch.int32),
        past_sequence_lengths=torch.tensor([0], dtype=torch.int32),
        block_tables=torch.tensor([[7, 2]], dtype=torch.int32),
    )
    assert engine.forward(input).output_ids.tolist() == greedy(model, prompt)[:1]


def test_bfloat16(tmp_path: Path) -> None:
    model = random_model("llama", torch.bfloat16)
    engine = engine_of(model, tmp_path, static())
    assert state_of(engine)["model.norm.weight"].dtype == torch.bfloat16
    (prompt,) = prompts((9,))
    seen = hooked(engine, "lm_head")
    Static(engine, False)([prompt], top_k=1)
    with torch.no_grad():
        exact = model.double()(torch.tensor([prompt])).logits[0, -1]
    error = (seen[-1][0].double() - exact).norm() / exact.norm()
    assert error < rounding_error(torch.bfloat16, *sums_of(model.config))


def hooked(engine: Any, name: str) -> list[Tensor]:
    """What a tensor is in the passes to come."""
    seen: list[Tensor] = []
    registry = _infinilm.HookRegistry()
    registry.register_hook(name, lambda _, tensor, layer: seen.append(tensor))
    engine.register_hooks(registry)
    return seen


# Sampling


def expected_token(logits: Tensor, temperature: float, top_k: int, top_p: float, u: float = 0.1) -> int:
    """The rule in forward's documentation."""
    p, order = torch.softmax(logits.double() / temperature, 0).sort(descending=True, stable=True)
    sums = p.cumsum(0).tolist()
    limit = u * min(sums[min(top_k, len(sums)) - 1] if top_k > 0 else 1.0, top_p)
    return order[next(i for i, c in enumerate(sums) if c >= limit)].item()


def test_sampled_tokens_follow_the_fixed_number(tmp_path: Path) -> None:
    engine = engine_of(random_model("llama"), tmp_path, static())
    seen = hooked(engine, "lm_head")
    # Settings in which the rule's parts decide: with its default the first token has less than a tenth.
    each = {"temperature": [8.0, 8.0, 0.5, 30.0], "top_k": [50, 3, 0, 100], "top_p": [1.0, 0.9, 0.95, 0.4]}
    tokens = Static(engine, False)(prompts(), **each)
    rows = zip(seen[-1], *each.values(), strict=True)
    assert tokens == [expected_token(*row) for row in rows]
    assert tokens[0] != seen[-1][0].argmax() and tokens[3] != seen[-1][3].argmax()


def test_defaults_are_those_of_the_vocabulary(tmp_path: Path) -> None:
    Input = _infinilm.InferEngine.Input
    length = torch.tensor([0])
    older, newer = Input(cache_lengths=length), Input(past_sequence_lengths=length)
    assert (older.temperature, older.top_k, older.top_p) == (1.0, 50, 1.0) == (Input().temperature, Input().top_k, 1.0)
    assert (newer.temperature, newer.top_k, newer.top_p) == (1.0, 1, 1.0)
    newer.temperature, newer.top_k, newer.top_p = 0.5, 7, 0.25
    assert (newer.temperature, newer.top_k, newer.top_p) == (0.5, 7, 0.25)
    assert Input(input_offsets=length).top_k == Input(total_sequence_lengths=length).top_k == 1

    engine = engine_of(random_model("llama"), tmp_path, static())
    seen = hooked(engine, "lm_head")
    (prompt,) = prompts((6,))
    assert Static(engine, True)([prompt]) == [seen[0][0].argmax()]
    engine.reset_cache()
    assert Static(engine, False)([prompt]) == [expected_token(seen[1][0], 1.0, 50, 1.0)] != [seen[0][0].argmax()]


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_by_fixed_number_is_random_sample_with_its_number(dtype: torch.dtype) -> None:
    """For the op's own random numbers; bfloat16 has equal logits, of which the lower index comes first."""
    rows, size = 300, 97
    logits = (2 * torch.randn(rows, size)).to(dtype)
    logits[::7, 3:20] = -torch.inf
    settings = Settings(
        torch.tensor([0.0, 0.5, 1.0, 3.0])[torch.randint(4, (rows,))],
        torch.tensor([-1, 0, 1, 2, 20, 97, 500])[torch.randint(7, (rows,))],
        torch.tensor([0.0, 0.3, 0.9, 1.0, 2.0])[torch.randint(5, (rows,))],
    )
    for row in range(rows):
        one = Settings(*(setting[row : row + 1] for setting in settings))
        place = torch.tensor([row])
        drawn = torch.ops.infini.random_sample(logits[row : row + 1], *one, torch.tensor([3]), place)
        assert by_fixed_number(logits[row : row + 1], one, uniform(3, row)).tolist() == drawn.tolist(), row
    together = by_fixed_number(logits, settings)
    alone = [by_fixed_number(logits[i : i + 1], Settings(*(s[i : i + 1] for s in settings))) for i in range(rows)]
    assert together.tolist() == torch.cat(alone).tolist()


def test_a_seed_draws_really(tmp_path: Path) -> None:
    engine = engine_of(random_model("llama"), tmp_path, static())
    seen = hooked(engine, "lm_head")

    def draw(rows: list[list[int]], seed: Any) -> list[int]:
        ids = torch.tensor(rows)
        input = engine.Input(ids, cache_lengths=torch.zeros(len(rows), dtype=torch.int64), temperature=20.0, top_k=0)
        return engine.forward(input, seed=seed).output_ids.flatten().tolist()

    rows = prompts((6, 6, 6))
    several = [draw(rows, [seed, seed + 1, seed + 2]) for seed in range(20)]
    assert len({tuple(tokens) for tokens in several}) == 20
    assert draw(rows, torch.tensor([3, 4, 5])) == draw(rows, [3 + 2**64, 4, 5]) == several[3]
    assert [draw([row], 3 + i)[0] for i, row in enumerate(rows)] == several[3]  # whatever else is in the batch
    expected = torch.ops.infini.random_sample(
        seen[3], *(torch.tensor([x] * 3) for x in (20.0, 0, 1.0)), torch.tensor([3, 4, 5]), torch.tensor([6] * 3)
    )
    assert several[3] == expected.tolist()


# Parameters


def test_parameters_are_views_of_what_passes_read(tmp_path: Path) -> None:
    model = random_model("qwen3")
    engine = engine_of(model, tmp_path, static())
    state = state_of(engine)
    assert state.keys() == model.state_dict().keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())
    at = "model.layers.0.self_attn."
    q, k = state[at + "q_proj.weight"], state[at + "k_proj.weight"]
    assert k.data_ptr() == q.data_ptr() + q.nbytes  # one below the other
    name = "model.layers.1.mlp.up_proj.weight"
    state[name].mul_(3)
    with torch.no_grad():
        model.get_parameter(name).mul_(3)
    (prompt,) = prompts((4,))
    assert continued(Static(engine, False), [prompt]) == [greedy(model, prompt)]


def test_parameters_may_be_wrapped_and_of_another_dtype(tmp_path: Path) -> None:
    model = random_model("llama")
    model.config.save_pretrained(tmp_path)
    engine = _infinilm.InferEngine(AutoConfig.from_pretrained(tmp_path))
    for name, parameter in model.state_dict().items():
        engine.load_param(name, Wrapped(Wrapped(parameter.double())))
    state = state_of(engine)
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())


def test_a_tied_checkpoint_may_have_its_head_and_old_ones_their_frequencies(tmp_path: Path) -> None:
    model = random_model("llama-biases-tied")
    assert "lm_head.weight" in model.state_dict()
    engine = engine_of(model, tmp_path, static())
    engine.load_param("model.layers.0.self_attn.rotary_emb.inv_freq", torch.ones(8))
    (prompt,) = prompts((4,))
    assert continued(Static(engine, False), [prompt]) == [greedy(model, prompt)]


# Caches


def test_reset_cache(tmp_path: Path) -> None:
    model = random_model("llama")
    engine = engine_of(model, tmp_path)
    rows = prompts((3, 7))
    expected = [greedy(model, row) for row in rows]
    assert engine.get_cache_config().max_batch_size() == 1
    assert continued(Static(engine, False), rows[:1]) == expected[:1]
    engine.reset_cache()
    assert continued(Static(engine, False), rows[1:]) == expected[1:]
    for config in (static(), paged(), _infinilm.StaticKVCacheConfig(2, 20)):
        engine.reset_cache(config)
        assert engine.get_cache_config() is config
        feed = Paged if config.__class__ is _infinilm.PagedKVCacheConfig else Static
        assert continued(feed(engine, True), rows) == expected
        engine.reset_cache(None)
        assert engine.get_cache_config() is config
        assert continued(feed(engine, False), rows) == expected


def test_the_old_cache_is_freed_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(random_model("llama"), tmp_path, static())
    for columns in (9, 1):  # of which the second is a recorded step
        engine.forward(engine.Input(torch.ones(2, columns).long(), cache_lengths=torch.zeros(2).long()))
    rank = engine._rank
    keys = weakref.ref(rank.cache.keys)
    new_cache = rank.model.new_cache
    alive = []
    monkeypatch.setattr(rank.model, "new_cache", lambda *sizes: alive.append(keys() is not None) or new_cache(*sizes))
    engine.reset_cache(static())  # the same: nothing is taken
    assert alive == [] and keys() is not None
    engine.reset_cache(paged())
    assert alive == [False]


def test_steps_are_recorded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python computes a number of rows, and a power of two of blocks, when it first comes and when it was dropped."""
    engine = engine_of(
        random_model("llama"), tmp_path, _infinilm.PagedKVCacheConfig(num_blocks=MAX_STEPS + 1, block_size=4)
    )
    model, calls = engine._rank.model, []
    forward = model.forward
    monkeypatch.setattr(model, "forward", lambda *args, **kwargs: calls.append(1) or forward(*args, **kwargs))

    def step(rows: int, blocks: int = 1, past: int = 0) -> int:
        """How often the model's Python ran."""
        tables = torch.full((rows, blocks), -1)
        tables[:, 0] = torch.arange(rows)
        calls.clear()
        ids, lengths = torch.ones(1, rows).long(), torch.full((rows,), past)
        engine.forward(engine.Input(ids, cache_lengths=lengths, block_tables=tables))
        return len(calls)

    assert [step(2, past=0), step(2, past=1), step(3), step(2, past=2)] == [1, 0, 1, 0]
    assert [step(2, blocks) for blocks in (3, 4, 5, 8, 2, 1)] == [1, 0, 1, 0, 1, 0]
    engine.reset_cache()
    assert step(2) == 0
    assert [step(rows) for rows in range(1, MAX_STEPS + 2)][3:] == [1] * (MAX_STEPS - 2)
    assert [step(MAX_STEPS + 1), step(1)] == [0, 1]
    seen = hooked(engine, "norm")
    assert [step(1), len(seen)] == [1, 1]
    engine.register_hooks(None)
    assert step(1) == 0
    engine.reset_cache(_infinilm.PagedKVCacheConfig(num_blocks=4, block_size=8))
    assert step(1) == 1


@pytest.mark.parametrize("family", ("llama", "qwen3"))
def test_a_step_is_what_the_model_computes(family: str, tmp_path: Path) -> None:
    """Replayed and, with hooks, not."""
    feeds = [Paged(engine_of(random_model(family), tmp_path, paged()), True) for _ in range(2)]
    hooked(feeds[1].engine, "norm")
    rows = [prompts()] * 2
    for _ in range(12):
        rows = [[[token] for token in feed(part, temperature=8.0)] for feed, part in zip(feeds, rows, strict=True)]
        assert rows[0] == rows[1]


def test_passes_of_several_threads(tmp_path: Path) -> None:
    """Each has its block, and all share what is recorded."""
    model = random_model("llama")
    engine = engine_of(model, tmp_path, paged())
    rows = prompts((5, 5, 5, 5))

    def run(i: int) -> list[int]:
        tables, tokens, past = torch.tensor([[i, 10 + i, 20 + i, 30 + i]]), rows[i], 0
        found: list[int] = []
        while len(found) < NEW:
            input = engine.Input(
                torch.tensor([tokens]), cache_lengths=torch.tensor([past]), block_tables=tables, top_k=1
            )
            past, tokens = past + len(tokens), engine.forward(input).output_ids.flatten().tolist()
            found += tokens
        return found

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(run, range(4))) == [greedy(model, row) for row in rows]


def test_static_rows_begin_anew_where_the_caller_says(tmp_path: Path) -> None:
    """A row may go back to fewer tokens, and other rows may come."""
    model = random_model("llama")
    engine = engine_of(model, tmp_path, static())
    first, second = prompts((6, 6))
    step = lambda ids, past: (
        engine.forward(engine.Input(torch.tensor(ids), cache_lengths=torch.tensor(past), top_k=1))
        .output_ids.flatten()
        .tolist()
    )
    assert step([first, second], [0, 0]) == [greedy(model, first)[0], greedy(model, second)[0]]
    changed = [*first[:4], 9]
    assert step([[9]], [4]) == greedy(model, changed)[:1]
    assert step([second], [0]) == greedy(model, second)[:1]


def test_memory_of_a_paged_cache_in_bytes(tmp_path: Path) -> None:
    engine = engine_of(random_model("llama"), tmp_path)
    block = 2 * 3 * 2 * 16 * 16 * 4  # keys and values, layers, kv heads, columns, tokens, bytes
    engine.reset_cache(_infinilm.PagedKVCacheConfig(3 * block + block - 1))
    assert engine._rank.cache.keys.shape == (3, 3, 2, 16, 16)


# As callers use it


class Wrapped:
    """Stands for InfiniCore's wrappers."""

    def __init__(self, underlying: Any) -> None:
        self._underlying = underlying


def test_the_example_of_the_specification(tmp_path: Path) -> None:
    reference = random_model("llama")
    reference.save_pretrained(tmp_path)

    # 1. Load model configuration
    config = AutoConfig.from_pretrained(str(tmp_path))
    # 2. Configure distributed inference
    dist_config = _infinilm.DistConfig(tp_size=1)
    # 3. Configure device
    device = infinicore.device("cpu", 0)
    # 4. Configure KV cache (optional)
    cache_config = _infinilm.StaticKVCacheConfig(max_batch_size=16, max_cache_len=4096)
    # 5. Create inference engine
    engine = _infinilm.InferEngine(
        config=config, distributed_config=dist_config, device_type=device._underlying.type, cache_config=cache_config
    )
    # 6. Load model weights
    state_dict = {name: infinicore.from_torch(param) for name, param in reference.state_dict().items()}
    for name, param in state_dict.items():
        engine.load_param(name, param._underlying)
    # 7. Prepare input tensors
    input_ids = infinicore.from_list([[1, 2, 3, 4]], dtype=infinicore.int64)
    position_ids = infinicore.from_list([[0, 1, 2, 3]], dtype=infinicore.int64)
    cache_lengths = infinicore.from_list([0], dtype=infinicore.int64)
    # 8. Run inference
    input_struct = _infinilm.InferEngine.Input(
        input_ids=input_ids._underlying,
        position_ids=position_ids._underlying,
        cache_lengths=cache_lengths._underlying,
        temperature=0.8,
        top_k=50,
        top_p=0.95,
    )
    output = engine.forward(input_struct)
    generated_token = output.output_ids
    # 9. Reset cache (optional)
    engine.reset_cache(cache_config)

    with torch.no_grad():
        logits = reference(torch.tensor([[1, 2, 3, 4]])).logits[0, -1]
    assert isinstance(generated_token, infinicore.Tensor)
    assert generated_token.to_numpy().tolist() == [[expected_token(logits, 0.8, 50, 0.95)]]


def test_subclasses(tmp_path: Path) -> None:
    class Mixin:
        def describe(self) -> str:
            return f"{self.label} of {self.config['layers']} layers"

    class Engine(Mixin, _infinilm.InferEngine):
        def __init__(self, config: Any, cache_config: Any = None) -> None:
            self.config, self.Input, self.label, self.cache = {"layers": 2}, "mine", "an engine", None
            super().__init__(config, cache_config=cache_config)
            self.dtype, self.device, self.model = None, "cpu", "a name"

        def forward(self, ids: Tensor, past: Tensor) -> Tensor:
            return super().forward(Input(ids, cache_lengths=past)).output_ids

    class Input(Mixin, _infinilm.InferEngine.Input):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.label = "an input"
            super().__init__(*args, top_k=1, **kwargs)

    class Config(_infinilm.LlamaConfig):
        def __init__(self, **values: Any) -> None:
            self.label = "a config"
            super().__init__(**values)

    class Cache(Mixin, _infinilm.StaticKVCacheConfig):
        def __init__(self) -> None:
            self.label = "a cache"
            super().__init__(max_batch_size=2)

        def max_cache_len(self) -> int:
            return 12

    class AsModule(_infinilm.InferEngine, nn.Module):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            nn.Module.__init__(self)
            _infinilm.InferEngine.__init__(self, *args, **kwargs)

    model = random_model("llama")
    engine = engine_of(model, tmp_path, Cache(), Engine)
    (prompt,) = prompts((4,))
    assert engine.forward(torch.tensor([prompt]), torch.tensor([0])).tolist() == [greedy(model, prompt)[:1]]
    assert (
        engine.describe() == "an engine of 2 layers" and repr(engine) == "<InferEngine: DistConfig(tp_device_ids=[0])>"
    )
    assert engine.Input == "mine" and engine.model == "a name" and engine._rank.cache.block_size == 12
    assert Config(hidden_size=64).label == "a config" and Config().hidden_size == 4096
    module = engine_of(model, tmp_path, static(), AsModule)
    assert continued(Static(module, True), [prompt]) == [greedy(model, prompt)] and list(module.parameters()) == []


def test_two_engines_in_one_process(tmp_path: Path) -> None:
    models = random_model("llama"), random_model("qwen2")
    feeds = [Static(engine_of(model, tmp_path, static()), False) for model in models]
    (prompt,) = prompts((5,))
    steps = [[feed([prompt], top_k=1)[0]] for feed in feeds]
    while len(steps[0]) < NEW:
        for feed, tokens in zip(feeds, steps, strict=True):
            tokens += feed([tokens[-1:]], top_k=1)
    assert steps == [greedy(model, prompt) for model in models] and steps[0] != steps[1]


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_a_dropped_engine_is_freed(tmp_path: Path, no_collector: None) -> None:
    engine = engine_of(random_model("llama"), tmp_path, static())
    hooked(engine, "layer")
    Static(engine, False)(prompts(), top_k=1)
    rank = engine._rank
    left = [weakref.ref(x) for x in (engine, rank, rank.model, rank.model.layers[0], rank.cache, rank.cache.keys)]
    del engine, rank
    assert [ref() for ref in left] == [None] * len(left)


# infinilm.infer_engine: the rest is in test_infinilm_engine.py


@pytest.mark.parametrize("cache", (None, static(), paged(), _infinilm.PagedKVCacheConfig(1 << 20, 8)), ids=str)
def test_generate(tmp_path: Path, cache: Any) -> None:
    """Rows of equal and unequal length; its cache is forward's."""
    model = random_model("llama-biases-tied")
    model.save_pretrained(tmp_path)
    engine = infer_engine.InferEngine.from_pretrained(tmp_path, cache_config=cache)
    assert engine.config.vocab_size == VOCABULARY
    settings = infer_engine.GenerationConfig(max_new_tokens=NEW, top_k=1)
    by_row = lambda steps: [list(row) for row in zip(*(step.tolist() for step in steps), strict=True)]
    equal = prompts((5, 5))
    assert by_row(engine.generate(Wrapped(torch.tensor(equal)), settings)) == [greedy(model, row) for row in equal]
    memory = engine._rank.cache.keys.data_ptr()
    steps = engine.generate(prompts(), settings)
    rows = [list(row) for row in zip(*(step.to_numpy().tolist() for step in steps), strict=True)]
    assert rows == [greedy(model, prompt) for prompt in prompts()]
    assert engine._rank.cache.keys.data_ptr() == memory
