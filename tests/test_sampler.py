"""Sampler: frequencies against probabilities in float64, penalties against their formulas, rows that stand alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from torch_infini.engine.sampler import Row, Sampled, Sampler, resolve_seeds
from torch_infini.engine.sampling_params import SamplingParams

DRAWS = 20_000
LOGITS = torch.tensor([1.2, -0.45, 0.9, 0.3, 0.25, -1.5, 0.6, 0.0])
PROMPT, OUTPUT = [0, 3, 3, 5], [2, 3, 2, 2, 7]
HALVES = [torch.bfloat16, torch.float16]


def row(params: SamplingParams, seed: int = 0, prompt: list[int] = PROMPT, output: list[int] = OUTPUT, eos=()) -> Row:
    return Row(params, seed, prompt, output, eos)


def edited(params: SamplingParams, logits: Tensor = LOGITS, eos: tuple[int, ...] = ()) -> Tensor:
    """What the log-probabilities are of, token by token in float64."""
    x = logits.double().clone()
    for token, bias in (params.logit_bias or {}).items():
        x[token] += bias
    for token in set(PROMPT + OUTPUT):
        x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
    for token, count in Counter(OUTPUT).items():
        x[token] -= params.presence_penalty + params.frequency_penalty * count
    if len(OUTPUT) < params.min_tokens:
        for token in (*params.stop_token_ids, *(() if params.ignore_eos else eos)):
            x[token] = -torch.inf
    return x


def probabilities(params: SamplingParams, logits: Tensor = LOGITS, eos: tuple[int, ...] = ()) -> Tensor:
    """The probabilities of all tokens after min_p, top_k and top_p."""
    p = torch.softmax(edited(params, logits, eos) / params.temperature, -1)
    p = torch.where(p >= params.min_p * p.max(), p, 0.0)
    p, order = (p / p.sum()).sort(descending=True, stable=True)
    cumulative = p.cumsum(0)
    end = min(cumulative[(params.top_k or len(p)) - 1].item(), params.top_p)
    share = (cumulative.clamp(max=end) - (cumulative - p).clamp(max=end)) / end
    return torch.zeros_like(p).scatter(0, order, share)


def chi_square(counts: Tensor, expected: Tensor) -> tuple[float, float]:
    """The statistic, and what one in ten thousand samples of the distribution would exceed (Wilson and Hilferty)."""
    possible = expected > 0
    assert not counts[~possible].any(), f"{counts} has tokens that cannot be, of {expected}"
    observed, wanted = counts[possible].double(), expected[possible] * counts.sum()
    spread = 2 / (9 * max(len(wanted) - 1, 1))
    return ((observed - wanted).square() / wanted).sum().item(), 2 / 9 / spread * (1 - spread + 3.72 * spread**0.5) ** 3


DISTRIBUTIONS = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "hot": {"temperature": 2.5},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.3},
    "min_p, temperature": {"min_p": 0.5, "temperature": 1.7},
    "min_p, top_k, top_p": {"min_p": 0.2, "top_k": 5, "top_p": 0.8, "temperature": 1.3},
    "repetition": {"repetition_penalty": 1.8},
    "encouraged": {"repetition_penalty": 0.7, "temperature": 0.9},
    "presence": {"presence_penalty": 0.9},
    "frequency": {"frequency_penalty": 0.4, "top_k": 6},
    "bias": {"logit_bias": {1: 2.0, 0: -1.0, 4: -torch.inf}},
    "min_tokens": {"min_tokens": 6, "stop_token_ids": [2], "top_p": 0.9},
    "all": {
        "logit_bias": {5: 3.0},
        "repetition_penalty": 1.3,
        "presence_penalty": 0.3,
        "frequency_penalty": -0.2,
        "min_tokens": 6,
        "stop_token_ids": [6],
        "temperature": 1.4,
        "min_p": 0.1,
        "top_k": 5,
        "top_p": 0.9,
    },
}


@pytest.mark.full(beyond=5)
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_frequencies(name: str) -> None:
    params = SamplingParams(**DISTRIBUTIONS[name])
    rows = [row(params, seed, eos=(1,)) for seed in range(DRAWS)]
    results = Sampler()(LOGITS.repeat(DRAWS, 1), rows)
    counts = torch.bincount(torch.tensor([result.token for result in results]), minlength=8)
    statistic, bound = chi_square(counts, probabilities(params, eos=(1,)))
    assert statistic < bound


def test_chi_square_bites() -> None:
    """The bound for 7 degrees of freedom is about the tables' 29.9; frequencies of other settings exceed it."""
    counts = (probabilities(SamplingParams()) * DRAWS).round().long()
    assert abs(chi_square(counts, probabilities(SamplingParams()))[1] - 29.9) < 0.6
    for other in ({"temperature": 0.9}, {"presence_penalty": 0.1}, {"repetition_penalty": 1.2}):
        statistic, bound = chi_square(counts, probabilities(SamplingParams(**other)))
        assert statistic > bound


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_log_probabilities(name: str, dtype: torch.dtype) -> None:
    """Those after bias and penalties, before temperature and what cuts; the most likely ones in order."""
    params = SamplingParams(**DISTRIBUTIONS[name], logprobs=5)
    logits = LOGITS.to(dtype)
    expected = torch.log_softmax(edited(params, logits, eos=(1,)), -1)
    values, order = expected.sort(descending=True, stable=True)
    for result in Sampler()(logits.repeat(20, 1), [row(params, seed, eos=(1,)) for seed in range(20)]):
        assert result.error is None
        assert result.logprob == pytest.approx(expected[result.token].item(), abs=1e-5)
        assert [token for token, _ in result.top_logprobs] == order[:5].tolist()
        assert [value for _, value in result.top_logprobs] == pytest.approx(values[:5].tolist(), abs=1e-5)


def test_log_probabilities_of_equals() -> None:
    """Half types have many equal logits: the lower id comes first, however many are asked for."""
    logits = torch.zeros(1, 5000, dtype=torch.bfloat16)
    logits[0, 3000:] = 1
    for count in (1, 2, 7):
        (result,) = Sampler()(logits.clone(), [row(SamplingParams.greedy(logprobs=count))])
        assert [token for token, _ in result.top_logprobs] == list(range(3000, 3000 + count))
    many = (torch.randn(20, 5000) * 2).bfloat16()
    for x, result in zip(many, Sampler()(many.clone(), [row(SamplingParams.greedy(logprobs=50))] * 20)):
        assert [token for token, _ in result.top_logprobs] == x.sort(descending=True, stable=True).indices[:50].tolist()
    (result,) = Sampler()(logits.clone(), [row(SamplingParams.greedy(logprobs=0))])
    assert result.top_logprobs == [] and result.logprob is not None
    few = dict.fromkeys(range(3, 8), -torch.inf)
    (result,) = Sampler()(LOGITS[None].clone(), [row(SamplingParams(logit_bias=few, logprobs=8))])
    assert [token for token, _ in result.top_logprobs] == [0, 2, 1]  # no -infinity
    (result,) = Sampler()(LOGITS[None].clone(), [row(SamplingParams.greedy(logprobs=100))])
    assert len(result.top_logprobs) == 8


VARIED = [
    SamplingParams.greedy(),
    SamplingParams(),
    SamplingParams(temperature=0.7, top_k=40),
    SamplingParams(top_p=0.9, logprobs=3),
    SamplingParams(repetition_penalty=1.2),
    SamplingParams(presence_penalty=0.5, frequency_penalty=0.1, temperature=1.5),
    SamplingParams(logit_bias={7: 5.0, 9: -5.0}),
    SamplingParams(min_p=0.05, logprobs=0),
    SamplingParams(min_tokens=40, max_tokens=None, stop_token_ids=[3]),
    SamplingParams.greedy(repetition_penalty=1.5, logprobs=2),
]


def varied(vocabulary: int, count: int = 40) -> list[Row]:
    generator = torch.Generator().manual_seed(1)
    draw = lambda size: torch.randint(vocabulary, (size,), generator=generator).tolist()
    return [Row(VARIED[i % len(VARIED)], 1000 + i, draw(i), draw(3 * i % 50), (1, 2)) for i in range(count)]


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
def test_alone_and_in_any_batch(dtype: torch.dtype) -> None:
    rows = varied(1000)
    logits = (torch.randn(len(rows), 1000) * 3).to(dtype)
    sampler = Sampler()
    together = sampler(logits.clone(), rows)
    assert all(result.error is None for result in together)
    assert [sampler(logits[i : i + 1].clone(), [r])[0] for i, r in enumerate(rows)] == together
    order = torch.randperm(len(rows))
    assert sampler(logits[order], [rows[i] for i in order]) == [together[i] for i in order]
    some = torch.arange(0, len(rows), 3)
    assert Sampler()(logits[some], [rows[i] for i in some]) == [together[i] for i in some]
    assert [r.token for r in sampler(logits.float().clone(), rows)] == [r.token for r in together]
    one = logits[:1].expand(len(rows), -1)  # as after a prompt with n samples
    assert sampler(one, rows) == sampler(one.contiguous(), rows)
    wide = torch.randn(len(rows), 1200).to(dtype)
    wide[:, 100:1100] = logits
    assert sampler(wide[:, 100:1100], rows) == together  # rows at a distance


def test_rows_kept_and_made_anew() -> None:
    """A row that lives through the steps counts only what is new; the tokens are those of a row made for each step."""
    logits = torch.randn(30, 1, 50)
    params = SamplingParams(repetition_penalty=1.3, frequency_penalty=0.3, presence_penalty=-0.1, seed=5)
    kept = Row(params, 5, [4, 4, 9], [])
    output: list[int] = []
    sampler = Sampler()
    for step in logits:
        (result,) = sampler(step.clone(), [kept])
        assert sampler(step.clone(), [Row(params, 5, (4, 4, 9), tuple(output))]) == [result]
        kept.output.append(result.token)
        output.append(result.token)
    assert len(set(output)) > 10


def test_draws_move_with_the_output() -> None:
    """Each step has its own number in the request's stream, the same one whenever it is computed."""
    sampler, steps = Sampler(), [[1] * length for length in range(200)]
    tokens = [sampler(torch.zeros(1, 1000), [Row(SamplingParams(), 3, [], output)])[0].token for output in steps]
    assert len(set(tokens)) > 150
    assert [
        r.token for r in sampler(torch.zeros(200, 1000), [Row(SamplingParams(), 3, [], o) for o in steps])
    ] == tokens


def test_minimum_of_tokens() -> None:
    params = SamplingParams.greedy(min_tokens=6, stop_token_ids=[2, 99])  # 99 is beyond the vocabulary
    sampler = Sampler()
    token = lambda p, output: sampler(LOGITS[None].clone(), [Row(p, 0, [], output, (0, 77))])[0].token
    assert token(params, [1] * 5) == 6  # neither 0, the most likely, nor 2
    assert token(params, [1] * 6) == 0
    assert token(replace(params, presence_penalty=0.1), [1] * 6) == 0  # a row that is edited for another reason
    assert token(replace(params, ignore_eos=True), [1] * 5) == 0


def test_prompt_beyond_the_vocabulary() -> None:
    """Ids that stand for an image have no logit."""
    params = SamplingParams.greedy(repetition_penalty=2.0)
    (result,) = Sampler()(LOGITS[None].clone(), [Row(params, 0, [0, 50_000, -200], [])])
    assert result == Sampled(2)


BAD = {
    "NaN": (3, torch.nan, "logits must have neither NaN nor +infinity, got nan for token 3"),
    "infinity": (0, torch.inf, "logits must have neither NaN nor +infinity, got inf for token 0"),
    "nothing left": (slice(None), -torch.inf, "logits must leave a token to draw, got -infinity for all"),
}


@pytest.mark.parametrize("params", VARIED, ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
@pytest.mark.parametrize("name", BAD)
def test_bad_rows_by_themselves(name: str, dtype: torch.dtype, params: SamplingParams) -> None:
    where, value, message = BAD[name]
    if name != "nothing left" and params.min_tokens:
        params = replace(params, stop_token_ids=[1])  # a token that is masked may be NaN before
    rows = varied(64, 12)
    rows[4] = rows[11] = Row(params, 5, [], [])
    logits = torch.randn(12, 64).to(dtype)
    sampler = Sampler()
    expected = sampler(logits.clone(), rows)
    logits[4, where] = value
    logits[11, where] = value
    results = sampler(logits.clone(), rows)
    bad = Sampled(-1, error=f"torch_infini.Sampler: {message}")
    assert results == [bad if i in (4, 11) else result for i, result in enumerate(expected)]
    assert sampler(logits[4:5].clone(), rows[4:5]) == [bad]


def test_all_masked_by_settings() -> None:
    banned = SamplingParams(logit_bias=dict.fromkeys(range(8), -torch.inf), logprobs=2)
    beyond = SamplingParams(logit_bias={8: 1.0})
    results = Sampler()(LOGITS.repeat(3, 1), [row(banned), row(SamplingParams.greedy()), row(beyond)])
    assert results[0] == Sampled(
        -1, error="torch_infini.Sampler: logits must leave a token to draw, got -infinity for all"
    )
    assert results[1] == Sampled(0)
    assert results[2] == Sampled(
        -1, error="torch_infini.Sampler: logit_bias must name tokens of the vocabulary, below 8, got 8"
    )


@pytest.mark.parametrize("scale", [1e-30, 1.0, 3e4, 3e38])
@pytest.mark.parametrize("temperature", [0.0, 1e-40, 1e-3, 1.0, 1e30, 3.4e38])
def test_extreme_values(scale: float, temperature: float) -> None:
    params = [
        SamplingParams(temperature=temperature, **more)
        for more in ({}, {"min_p": 1.0}, {"top_k": 2**62}, {"top_p": 0.0}, {"min_p": 1e-300, "top_p": 1e-30})
    ]
    logits = (LOGITS / 2 * scale).repeat(len(params), 1)
    results = Sampler()(logits.clone(), [Row(p, -(2**70) + 5, [], []) for p in params])
    assert all(result.error is None and 0 <= result.token < 8 for result in results)
    assert results[1].token == 0 and results[3].token == 0  # nothing but the most likely one is left


def test_calls_of_plain_rows() -> None:
    """A batch without extras is one call of random_sample."""
    calls = []

    class Recorder(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            calls.append(func.name())
            return func(*args, **(kwargs or {}))

    sampler, rows = Sampler(), [row(SamplingParams(top_p=0.9), seed) for seed in range(16)]
    logits = torch.randn(16, 100)
    sampler(logits, rows)
    with Recorder():
        sampler(logits, rows)
    assert [name for name in calls if "resolve" not in name] == ["infini::random_sample"]


def test_inference_tensors_and_gradients() -> None:
    with torch.inference_mode():
        logits = torch.randn(4, 20)
    rows = [row(VARIED[i], i) for i in (0, 4, 5, 3)]
    expected = Sampler()(logits.clone(), rows)
    assert Sampler()(logits, rows) == expected
    weight = torch.ones(20, requires_grad=True)
    assert len(Sampler()(weight.expand(4, 20) * 2.0, rows)) == 4


def test_wrong_calls() -> None:
    sampler = Sampler()
    assert sampler(torch.empty(0, 8), []) == []
    with pytest.raises(
        ValueError, match=r"^torch_infini.Sampler: logits must have shape \[1, vocabulary\], .* got \[2, 8\]$"
    ):
        sampler(torch.zeros(2, 8), [row(SamplingParams())])
    with pytest.raises(ValueError, match="^torch_infini.Sampler: logits must be .* or float16, got int64$"):
        sampler(torch.zeros(1, 8, dtype=torch.int64), [row(SamplingParams())])
    with pytest.raises(RuntimeError, match="stride 1"):
        sampler(torch.zeros(1, 16)[:, ::2], [row(SamplingParams())])


def test_seeds() -> None:
    assert resolve_seeds(SamplingParams(seed=7, n=3)) == [
        7,
        7 + 0x9E3779B97F4A7C15,
        (7 + 2 * 0x9E3779B97F4A7C15) % 2**64,
    ]
    assert resolve_seeds(SamplingParams(seed=-1)) == [2**64 - 1]
    first = resolve_seeds(SamplingParams(n=1000))
    assert len(set(first)) == 1000 and all(0 <= seed < 2**64 for seed in first)
    assert resolve_seeds(SamplingParams())[0] != first[0]
    torch.manual_seed(3)
    again = resolve_seeds(SamplingParams(n=2))
    torch.manual_seed(3)
    assert resolve_seeds(SamplingParams(n=2)) == again


def test_samples_of_one_request_differ() -> None:
    """Sixty draws of two samples of a request agree as often as chance has it."""
    first, second = resolve_seeds(SamplingParams(seed=1, n=2))
    rows = [Row(SamplingParams(), seed, [], [0] * i) for seed in (first, second) for i in range(60)]
    tokens = [result.token for result in Sampler()(torch.zeros(120, 100), rows)]
    assert sum(a == b for a, b in zip(tokens[:60], tokens[60:])) < 6


DEFAULTS_ALLOWED = [
    {"temperature": 0, "top_k": 5, "stop": "x", "stop_token_ids": [1, 2]},
    {"max_tokens": None, "min_tokens": 100},
    {"logit_bias": {3: -torch.inf, 4: 1}},
    {"seed": -5},
]


def test_params_normalised() -> None:
    for kwargs in DEFAULTS_ALLOWED:
        SamplingParams(**kwargs)
    params = SamplingParams(temperature=0, stop="x", stop_token_ids=[1, 2], logit_bias={4: 1})
    assert params.stop == ("x",) and params.stop_token_ids == (1, 2) and params.logit_bias == {4: 1.0}
    assert type(params.temperature) is float
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams.greedy(top_k=3) == SamplingParams(temperature=0.0, top_k=3)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"n": 0}, "n must be an integer of at least 1, got 0"),
        ({"n": True}, "n must be an integer of at least 1, got True"),
        ({"temperature": -0.1}, "temperature must be a finite number of at least 0, got -0.1"),
        ({"temperature": torch.nan}, "temperature must be a finite number of at least 0, got nan"),
        ({"temperature": torch.inf}, "temperature must be a finite number of at least 0, got inf"),
        ({"temperature": 1e39}, "temperature must be at most 3.40282e+38, the largest number of float32, got 1e+39"),
        ({"temperature": "1"}, "temperature must be a finite number of at least 0, got '1'"),
        ({"top_k": -2}, "top_k must be an integer of at least 0, got -2"),
        ({"top_k": 2.0}, "top_k must be an integer of at least 0, got 2.0"),
        ({"top_p": 1.01}, "top_p must be a number from 0 to 1, got 1.01"),
        ({"min_p": -0.1}, "min_p must be a number from 0 to 1, got -0.1"),
        ({"repetition_penalty": 0}, "repetition_penalty must be a finite number above 0, got 0"),
        ({"presence_penalty": torch.inf}, "presence_penalty must be a finite number, got inf"),
        ({"frequency_penalty": None}, "frequency_penalty must be a finite number, got None"),
        ({"seed": 1.5}, "seed must be an integer or None, got 1.5"),
        ({"logit_bias": [1]}, "logit_bias must map token ids to numbers, got [1]"),
        ({"logit_bias": {"5": 1}}, "logit_bias must have token ids, integers of at least 0, as keys, got '5'"),
        (
            {"logit_bias": {5: torch.inf}},
            "logit_bias must have finite numbers of at most 3.40282e+38, either sign, or -infinity as values, got inf "
            "for token 5",
        ),
        ({"logprobs": -1}, "logprobs must be an integer of at least 0 or None, got -1"),
        ({"max_tokens": 0}, "max_tokens must be an integer of at least 1 or None, got 0"),
        ({"min_tokens": 17}, "min_tokens must be at most max_tokens, 16, got 17"),
        ({"stop": ["a", ""]}, "stop must be a string or strings, none of them empty, got ('a', '')"),
        ({"stop": ""}, "stop must be a string or strings, none of them empty, got ('',)"),
        ({"stop": None}, "stop must be a string or strings, none of them empty, got None"),
        ({"stop_token_ids": 5}, "stop_token_ids must be token ids, integers of at least 0, got 5"),
        ({"stop_token_ids": [-5]}, "stop_token_ids must be token ids, integers of at least 0, got (-5,)"),
        ({"ignore_eos": 1}, "ignore_eos must be True or False, got 1"),
    ],
    ids=str,
)
def test_params_refused(kwargs: dict, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        SamplingParams(**kwargs)
    assert str(caught.value) == f"torch_infini.SamplingParams: {message}"
