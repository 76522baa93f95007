"""RotaryEmbedding against transformers: frequencies, cos and sin by the bit, for every scaling in both spellings."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from support.rounding import assert_same_but_rounding
from torch_infini.nn.rotary import RotaryEmbedding, inverse_frequencies, rotary_settings

transformers = pytest.importorskip("transformers")
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb  # noqa: E402
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding  # noqa: E402

LONGEST, ORIGINAL = 600, 150
FACTORS = {"short_factor": [1 + i / 10 for i in range(16)], "long_factor": [1.5 + i * i / 9 for i in range(16)]}
SCALINGS = {
    "default": {},
    "linear": {"factor": 2.5},
    "dynamic": {"factor": 3.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": ORIGINAL},
    "yarn, betas": {
        "factor": 4,
        "beta_fast": 20,
        "beta_slow": 2.5,
        "truncate": False,
        "original_max_position_embeddings": ORIGINAL,
    },
    "yarn, no ramp": {"factor": 100.0, "original_max_position_embeddings": 6},  # it would begin and end at pair 0
    "yarn, mscale": {
        "factor": 40.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
        "original_max_position_embeddings": ORIGINAL,
    },
    "yarn, attention": {"factor": 4.0, "attention_factor": 0.8, "original_max_position_embeddings": ORIGINAL},
    "longrope": {**FACTORS, "original_max_position_embeddings": ORIGINAL},
    "longrope, factor": {**FACTORS, "factor": 7.0, "original_max_position_embeddings": ORIGINAL},
    "longrope, attention": {**FACTORS, "attention_factor": 1.1, "original_max_position_embeddings": ORIGINAL},
}
CONFIG = {"hidden_size": 128, "num_attention_heads": 4, "max_position_embeddings": LONGEST}
EVERY = pytest.mark.parametrize("name", SCALINGS)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


def configs(name: str, theta: float = 50_000.0) -> list[dict]:
    """config.json as transformers 5 and 4 write it."""
    kind = name.split(",")[0]
    old = {} if kind == "default" else {"rope_scaling": {"type": kind, **SCALINGS[name]}}
    return [
        {**CONFIG, "rope_parameters": {"rope_type": kind, "rope_theta": theta, **SCALINGS[name]}},
        {**CONFIG, "rope_theta": theta, **old},
        {**CONFIG, "rope_theta": theta, **copy.deepcopy(old), "rope_parameters": None, "head_dim": 32},
    ]


def theirs(config: dict) -> LlamaRotaryEmbedding:
    known = {key: value for key, value in copy.deepcopy(config).items() if value is not None}
    return LlamaRotaryEmbedding(transformers.LlamaConfig(**known))


def tables(module: torch.nn.Module, length: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """transformers' cos and sin, the half that is not a repetition."""
    cos, sin = module(torch.empty(1, dtype=dtype), torch.arange(length)[None])
    half = cos.shape[-1] // 2
    return cos[0, :, :half], sin[0, :, :half]


def assert_tables(
    module: RotaryEmbedding, config: dict, dtype: torch.dtype = torch.float32, theirs: Any = theirs
) -> None:
    """All rows are transformers': of a call of all positions, and with two rotations also of the longest short one."""
    length = module.max_positions
    cos, sin = tables(theirs(config), length, dtype)
    switch = module.switch
    if switch is None:
        assert torch.equal(module.cos, cos) and torch.equal(module.sin, sin)
        return
    rows = switch.row(torch.arange(length), True)
    assert torch.equal(module.cos[rows], cos) and torch.equal(module.sin[rows], sin)
    assert len(module.cos) == len(module.sin) == length + switch.length and len(rows.unique()) == length
    cos, sin = tables(theirs(config), switch.length, dtype)
    assert torch.equal(module.cos[: switch.length], cos) and torch.equal(module.sin[: switch.length], sin)


@DTYPES
@EVERY
def test_tables(name: str, dtype: torch.dtype) -> None:
    """A call of the longest length, in which all scalings are as they are here."""
    for config in configs(name):
        settings = rotary_settings(config)
        module = RotaryEmbedding(**settings, dtype=dtype)
        expected = theirs(config)
        tables(expected, LONGEST, dtype)
        frequencies, attention = inverse_frequencies(32, LONGEST, settings["theta"], settings["scaling"])
        assert torch.equal(frequencies, expected.inv_freq)
        assert attention == expected.attention_scaling
        assert module.cos.dtype == dtype and module.cos.shape[1] == 16
        assert (module.switch == (ORIGINAL, LONGEST, False)) == name.startswith("longrope")
        assert_tables(module, config, dtype)
        assert_tables(RotaryEmbedding(**settings).to(dtype), config, dtype)


@EVERY
def test_scalings_matter(name: str) -> None:
    plain = rotary_settings(configs("default")[0])
    module = RotaryEmbedding(**rotary_settings(configs(name)[0]))
    equal = torch.equal(module.cos[:LONGEST], RotaryEmbedding(**plain).cos)
    assert equal == (name in ("default", "dynamic"))  # dynamic is for more than the config's longest


@pytest.mark.parametrize("length", [1, 40, LONGEST - 1, LONGEST, LONGEST + 1, 1000, 5000])
def test_dynamic(length: int) -> None:
    """A table for so many positions is what transformers has in a call of so many, and for all below the original."""
    for config in configs("dynamic"):
        module = RotaryEmbedding(**{**rotary_settings(config), "max_positions": length})
        cos, sin = tables(theirs(config), length, torch.float32)
        assert torch.equal(module.cos, cos) and torch.equal(module.sin, sin)
        if length > LONGEST:
            assert not torch.equal(module.cos[:40], tables(theirs(config), 40, torch.float32)[0])


@pytest.mark.parametrize("length", [1, ORIGINAL - 1, ORIGINAL, ORIGINAL + 1, 1000])
@pytest.mark.parametrize("name", ["longrope", "longrope, factor", "longrope, attention"])
def test_longrope(name: str, length: int) -> None:
    """short_factor up to the original length, both beyond it; the attention factor is the config's for both."""
    for config in configs(name):
        module = RotaryEmbedding(**{**rotary_settings(config), "max_positions": length})
        assert (module.switch is not None) == (length > ORIGINAL)
        assert_tables(module, config)
    without = {**SCALINGS["longrope"], "rope_type": "longrope"}  # a factor that follows from the lengths
    named = {**without, "factor": LONGEST / ORIGINAL}
    both = [RotaryEmbedding(32, LONGEST, scaling=scaling) for scaling in (without, named)]
    assert torch.equal(both[0].cos, both[1].cos)


def test_phi3() -> None:
    """Its config has the original length outside, a share of the columns, and called longrope "su" at first."""
    config = {
        **CONFIG,
        "hidden_size": 192,
        "partial_rotary_factor": 0.75,
        "original_max_position_embeddings": ORIGINAL,
        "rope_theta": 20_000.0,
        "rope_scaling": {"type": "longrope", **{name: factors + [9.0, 9.5] for name, factors in FACTORS.items()}},
    }

    def of_phi3(config: dict) -> Phi3RotaryEmbedding:
        return Phi3RotaryEmbedding(transformers.Phi3Config(**copy.deepcopy(config), pad_token_id=0))

    settings = rotary_settings(config)
    assert settings["scaling"]["original_max_position_embeddings"] == ORIGINAL
    module = RotaryEmbedding(**settings)
    assert module.cos.shape[1] == 18
    assert_tables(module, config, theirs=of_phi3)
    config["rope_scaling"] |= {"type": "su", "original_max_position_embeddings": 400}  # the one outside counts
    assert torch.equal(RotaryEmbedding(**rotary_settings(config)).cos, module.cos)
    del config["rope_scaling"]
    assert_tables(RotaryEmbedding(**rotary_settings(config)), config, theirs=of_phi3)


@pytest.mark.parametrize("name", ["default", "yarn", "llama3"])
def test_forward(name: str) -> None:
    config = configs(name)[0]
    module = RotaryEmbedding(**rotary_settings(config))
    x = torch.randn(2, 5, 4, 32)
    positions = torch.tensor([[0, 3, 599, 7, 7], [1, 2, 3, 4, 5]])
    cos, sin = theirs(config)(x, positions)
    expected, _ = apply_rotary_pos_emb(x, x, cos, sin, unsqueeze_dim=2)
    assert_same_but_rounding(module(x, positions), expected, terms=2, depth=2)
    assert torch.equal(module(x[0], positions[0]), module(x, positions)[0])
    with pytest.raises(RuntimeError, match="less than 600, the rows of cos, got 600"):
        module(x, positions + 1)


def test_partial_and_interleaved() -> None:
    x, positions = torch.randn(6, 2, 20), torch.arange(6)
    halves = RotaryEmbedding(20, 10, partial=0.8)
    pairs = RotaryEmbedding(20, 10, partial=0.8, interleaved=True)
    order = torch.cat((torch.arange(0, 16, 2), torch.arange(1, 16, 2), torch.arange(16, 20)))
    assert torch.equal(pairs(x, positions)[..., order], halves(x[..., order], positions))
    assert torch.equal(halves(x, positions)[..., 16:], x[..., 16:])


def test_module() -> None:
    module = RotaryEmbedding(8, 12, dtype=torch.bfloat16)
    assert not module.state_dict() and not list(module.parameters())
    assert "8 columns, 12 positions" in repr(module)
    with torch.device("meta"):
        later = RotaryEmbedding(8, 12, dtype=torch.bfloat16)
    assert later.cos.is_meta
    later.to_empty(device="cpu").reset_parameters()
    assert torch.equal(later.cos, module.cos) and torch.equal(later.sin, module.sin)


def test_settings() -> None:
    assert rotary_settings({**CONFIG, "model_type": "llama"}) == {
        "head_dim": 32,
        "max_positions": LONGEST,
        "theta": 10_000.0,
        "scaling": None,
        "partial": 1.0,
    }
    demo = {"head_dim": 64, "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}, **CONFIG}
    assert rotary_settings(demo)["head_dim"] == 64 and rotary_settings(demo)["theta"] == 5e5
    config = configs("yarn")[1]
    del config["rope_scaling"]["factor"]  # DeepSeek's and others have it, but it may follow from the lengths
    assert rotary_settings(config)["scaling"]["factor"] == LONGEST / ORIGINAL
    kept = copy.deepcopy(config)
    rotary_settings(config)
    assert config == kept


LLAMA3 = {"rope_type": "llama3", **SCALINGS["llama3"]}
LONGROPE = {"rope_type": "longrope", **SCALINGS["longrope"]}


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        (
            {"rope_type": "mrope"},
            "rope_type must be one of default, linear, dynamic, llama3, yarn, longrope, got 'mrope'",
        ),
        ({"type": "linear"}, "factor must be a finite number above 0 for linear, got None"),
        ({"type": "linear", "factor": "2"}, "factor must be a finite number above 0 for linear, got '2'"),
        ({"type": "linear", "factor": 0.5}, "factor must be at least 1 for linear, got 0.5"),
        ({"rope_type": "dynamic", "factor": torch.inf}, "factor must be a finite number above 0 for dynamic, got inf"),
        (
            {**LLAMA3, "low_freq_factor": None},
            "low_freq_factor must be a finite number above 0 for llama3, got None",
        ),
        ({**LLAMA3, "low_freq_factor": 4}, "high_freq_factor must be above low_freq_factor, 4, got 4.0"),
        (
            {"rope_type": "yarn", "factor": 2, "beta_fast": -1},
            "beta_fast must be a finite number above 0 for yarn, got -1",
        ),
        ({**LONGROPE, "short_factor": None}, "short_factor must be numbers above 0, one for each frequency, got None"),
        ({**LONGROPE, "long_factor": [1.0]}, "long_factor must have 16 numbers, one for each frequency, got 1"),
        (
            {"rope_type": "default", "mrope_section": [8, 4, 4]},
            "scaling must be for positions in text alone, got one with mrope_section",
        ),
        (
            {"full_attention": {"rope_type": "default"}},
            "config must have the same rope_parameters for all layers, got some for ['full_attention']",
        ),
        ([1], "config must have a mapping as rope_parameters, got [1]"),
    ],
    ids=str,
)
def test_settings_refused(scaling: dict, message: str) -> None:
    for config in ({**CONFIG, "rope_parameters": scaling}, {**CONFIG, "rope_scaling": scaling}):
        with pytest.raises(ValueError) as caught:
            rotary_settings(config)
        assert str(caught.value) == f"torch_infini.nn.rotary_settings: {message}"


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"head_dim": 0}, "head_dim must be an integer of at least 1, got 0"),
        ({"max_positions": 2.5}, "max_positions must be an integer of at least 1, got 2.5"),
        ({"theta": 0}, "theta must be a finite number above 0, got 0"),
        ({"partial": 1.5}, "partial must be a number above 0 and at most 1, got 1.5"),
        (
            {"head_dim": 10, "partial": 0.5},
            "partial must make int(head_dim * partial) even and above 0, with head_dim 10, got 0.5",
        ),
        (
            {"scaling": {"rope_type": "dynamic", "factor": 2}},
            "original_max_position_embeddings must be a finite number above 0 for dynamic, got None",
        ),
    ],
    ids=str,
)
def test_arguments_refused(kwargs: dict, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        RotaryEmbedding(**{"head_dim": 8, "max_positions": 4, **kwargs})
    assert str(caught.value) == f"torch_infini.nn.RotaryEmbedding: {message}"


@pytest.mark.parametrize("missing", list(CONFIG))
def test_config_without_sizes(missing: str) -> None:
    config = {key: value for key, value in CONFIG.items() if key != missing}
    with pytest.raises(ValueError, match=f"config's {missing} must be an integer of at least 1, got None"):
        rotary_settings(config)
