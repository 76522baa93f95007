"""Model folders that are broken or hostile: configs that hold anything, sizes beyond the files, code that wants to run.

Each is refused with a sentence that names the file, the entry, the rule and what came, before memory is taken for it.
"""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from torch_infini import LLM
from torch_infini.__main__ import main
from torch_infini.compat.infinilm import AutoConfig
from torch_infini.compat.infinilm.infer_engine import InferEngine
from torch_infini.models import Llama, LlamaConfig
from torch_infini.models.folder import shapes_of
from torch_infini.testing.checkpoints import MODELS, random_model, save_tokenizer

ABSENT = object()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    random_model("llama").save_pretrained(path)
    save_tokenizer(path, 320)
    return path


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy with a config.json that may be changed."""
    for file in saved.iterdir():
        (tmp_path / file.name).symlink_to(file)
    text = (saved / "config.json").read_text()
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(text)
    return tmp_path


def edit(folder: Path, entries: dict[str, Any], name: str = "config.json") -> None:
    config = json.loads((folder / name).read_text()) | entries
    (folder / name).write_text(json.dumps({key: value for key, value in config.items() if value is not ABSENT}))


DOORS: dict[str, Callable[[Path], object]] = {
    "LLM": LLM,
    "Llama": Llama.from_pretrained,
    "LlamaConfig": LlamaConfig.from_pretrained,
    "AutoConfig": AutoConfig.from_pretrained,
    "InferEngine": InferEngine,
}
HUGE = 10**30
BROKEN: list[tuple[Any, str]] = [
    ("{", "config.json must be JSON, got: "),
    ("", "config.json must be JSON, got: "),
    (b"\xff\xfe\x00", "config.json must be JSON, got: "),
    ("[" * 100_000, "config.json must be JSON, got: "),
    ("[1, 2]", "config.json must hold a JSON object, got list"),
    ("null", "config.json must hold a JSON object, got NoneType"),
    ("{}", "config.json: model_type must be one of llama, mistral, qwen2, qwen3, got None"),
    ({"model_type": ["llama"]}, "config.json: model_type must be one of llama, mistral, qwen2, qwen3, got ['llama']"),
    ({"hidden_size": 0}, "config.json: hidden_size must be a positive integer, got 0"),
    ({"hidden_size": "64"}, "config.json: hidden_size must be a positive integer, got '64'"),
    ({"hidden_size": True}, "config.json: hidden_size must be a positive integer, got True"),
    ({"hidden_size": 64.0}, "config.json: hidden_size must be a positive integer, got 64.0"),
    ({"hidden_size": HUGE}, f"config.json: hidden_size must be at most 2147483647, got {HUGE}"),
    ({"num_attention_heads": 0}, "config.json: num_attention_heads must be a positive integer, got 0"),
    ({"num_attention_heads": -4}, "config.json: num_attention_heads must be a positive integer, got -4"),
    ({"num_key_value_heads": 0}, "config.json: num_key_value_heads must be a positive integer, got 0"),
    ({"num_key_value_heads": 3}, "config.json: num_key_value_heads must be a divisor of num_attention_heads, 4, got 3"),
    ({"head_dim": 0}, "config.json: head_dim must be a positive integer, got 0"),
    ({"vocab_size": []}, "config.json: vocab_size must be a positive integer, got []"),
    ({"num_hidden_layers": HUGE}, f"config.json: num_hidden_layers must be at most 65536, got {HUGE}"),
    ({"max_position_embeddings": 2**40}, f"max_position_embeddings must be at most 16777216, got {2**40}"),
    ({"max_position_embeddings": "512"}, "config.json: max_position_embeddings must be a positive integer, got '512'"),
    ({"rms_norm_eps": "1e-6"}, "config.json: rms_norm_eps must be a number from 0 to less than 1, got '1e-6'"),
    ({"rms_norm_eps": float("nan")}, "config.json: rms_norm_eps must be a number from 0 to less than 1, got nan"),
    ({"rms_norm_eps": False}, "config.json: rms_norm_eps must be a number from 0 to less than 1, got False"),
    ({"tie_word_embeddings": "false"}, "config.json: tie_word_embeddings must be true or false, got 'false'"),
    ({"attention_bias": [0]}, "config.json: attention_bias must be true or false, got [0]"),
    ({"eos_token_id": "2"}, "config.json: eos_token_id must be a token id, several or null, got '2'"),
    ({"eos_token_id": [2, "3"]}, "config.json: eos_token_id must be a token id, several or null, got [2, '3']"),
    ({"bos_token_id": {"a": 1}}, "config.json: bos_token_id must be a token id, several or null, got {'a': 1}"),
    ({"rope_parameters": "x"}, "config.json: "),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 0}}, "config.json: "),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": "x"}}, "config.json: "),
    ({"rope_parameters": {"rope_type": ["x"], "rope_theta": 1e4}}, "config.json: "),
    ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": "2"}}, "config.json: "),
    (
        {"model_type": "mistral", "sliding_window": "x"},
        "config.json: sliding_window must be a positive integer or null",
    ),
    (
        {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 4, "layer_types": 5},
        "config.json: layer_types must name full_attention or sliding_attention for each of 3 layers, got 5",
    ),
    (
        {
            "model_type": "qwen2",
            "use_sliding_window": True,
            "sliding_window": 4,
            "max_window_layers": "x",
            "layer_types": ABSENT,
        },
        "config.json: max_window_layers must be an integer, got 'x'",
    ),
]


def spoil(folder: Path, config: Any) -> None:
    if isinstance(config, dict):
        edit(folder, config)
    else:
        (folder / "config.json").write_bytes(config if isinstance(config, bytes) else config.encode())


def label(value: Any) -> str:
    return repr(value)[:40]


@pytest.mark.parametrize("config, rule", BROKEN, ids=label)
def test_broken_configs(config: Any, rule: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spoil(folder, config)
    for name, door in DOORS.items():
        with pytest.raises(ValueError) as raised:
            door(folder)
        assert rule in str(raised.value), name
        assert str(folder / "config.json") in str(raised.value), name
        assert "\n" not in str(raised.value), name
    for command in ("generate", "bench"):
        assert main([command, "--model", str(folder)]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert rule in err
        assert err.count("\n") == 1


def test_broken_generation_config(folder: Path) -> None:
    path = folder / "generation_config.json"
    path.unlink()
    path.write_text('{"eos_token_id": "2"}')
    with pytest.raises(ValueError, match=r"generation_config.json: eos_token_id must be a token id, several or null"):
        LLM(folder)


@pytest.mark.parametrize(
    "entries, rule",
    [
        ({"hidden_size": 2**30}, f"model.embed_tokens.weight must have shape [320, {2**30}], got [320, 64]"),
        ({"intermediate_size": 2**31 - 1}, f"mlp.gate_proj.weight must have shape [{2**31 - 1}, 64], got [96, 64]"),
        ({"vocab_size": 2**31 - 1}, f"model.embed_tokens.weight must have shape [{2**31 - 1}, 64], got [320, 64]"),
        ({"head_dim": 15}, "q_proj.weight must have shape [60, 64], got [64, 64]"),
        ({"head_dim": 2**30}, f"q_proj.weight must have shape [{2**32}, 64], got [64, 64]"),
        ({"num_attention_heads": 2**20, "head_dim": 16}, f"q_proj.weight must have shape [{2**24}, 64], got [64, 64]"),
        ({"num_hidden_layers": 2**16}, "num_hidden_layers must be at most "),
        ({"num_hidden_layers": 4}, "missing: model.layers.3."),
        ({"num_hidden_layers": 2}, "surplus: model.layers.2."),
        ({"model_type": "qwen3"}, "missing: model.layers.0.self_attn.k_norm.weight"),
    ],
    ids=label,
)
def test_sizes_beyond_the_files(
    entries: dict[str, Any], rule: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files' headers are compared with config.json before any module of the model is made."""
    edit(folder, entries)
    made: list[str] = []
    init = torch.nn.Module.__init__
    monkeypatch.setattr(
        torch.nn.Module, "__init__", lambda self, *a, **k: (made.append(type(self).__name__), init(self, *a, **k))[1]
    )
    for name in ("LLM", "Llama", "InferEngine"):
        with pytest.raises(ValueError) as raised:
            DOORS[name](folder)
        assert rule in str(raised.value), name
        assert set(made) <= {"Llama"}, name


@pytest.mark.parametrize("name", MODELS)
def test_shapes(name: str, tmp_path: Path) -> None:
    random_model(name).save_pretrained(tmp_path)
    config = LlamaConfig.from_pretrained(tmp_path)
    assert shapes_of(config) == {key: slot.shape for key, slot in Llama(config).slots().items()}


# ---- code of the folder ----

CODE = """
from pathlib import Path
Path({marker!r}).touch()
from transformers import PreTrainedTokenizerFast
class Custom(PreTrainedTokenizerFast):
    pass
"""


def add_code(folder: Path, config_too: bool) -> Path:
    marker = folder / "it-ran"
    (folder / "custom.py").write_text(CODE.format(marker=str(marker)))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").unlink()
    settings |= {"tokenizer_class": "Custom", "auto_map": {"AutoTokenizer": [None, "custom.Custom"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if config_too:
        code = {"AutoConfig": "custom.Custom", "AutoModelForCausalLM": "custom.Custom"}
        edit(folder, {"auto_map": code, "model_type": "custom", "architectures": ["Custom"]})
    return marker


QUICK = {
    "generate": ["--max-new-tokens", "2"],
    "bench": ["--requests", "1", "--rounds", "1", "--output-tokens", "2"],
    "demo": ["--max-new-tokens", "2", "--runs", "1"],
}


@pytest.mark.parametrize("command", QUICK)
@pytest.mark.parametrize("config_too", [False, True])
def test_code_of_a_folder_is_never_run(
    command: str, config_too: bool, folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even for a yes on stdin: nobody is asked."""
    marker = add_code(folder, config_too)
    answers = io.StringIO("y\n" * 10)
    monkeypatch.setattr(sys, "stdin", answers)
    status = main([command, "--model", str(folder), *QUICK[command]])
    out, err = capfd.readouterr()
    check_that_no_code_ran(marker, config_too, status, out, err)
    assert answers.tell() == 0


@pytest.mark.full
def test_code_of_a_folder_is_never_run_by_a_process(folder: Path) -> None:
    """The same with a real stdin."""
    marker = add_code(folder, False)
    line = [sys.executable, "-m", "torch_infini", "generate", "--model", str(folder), *QUICK["generate"]]
    done = subprocess.run(line, input="y\n" * 10, capture_output=True, text=True, timeout=300)
    check_that_no_code_ran(marker, False, done.returncode, done.stdout, done.stderr)


def check_that_no_code_ran(marker: Path, config_too: bool, status: int, out: str, err: str) -> None:
    assert not marker.exists()
    assert "[y/N]" not in out + err
    if config_too:
        assert status == 2
        assert "code of a model folder (auto_map) is never run" in err
    else:  # the tokenizer can be read without its code, or is refused
        assert status == 0 or "code of a model folder (auto_map) is never run" in err


@pytest.mark.parametrize("door", ["LLM", "Llama", "InferEngine", "AutoConfig"])
def test_code_of_a_folder_is_never_run_by_a_call(door: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    marker = add_code(folder, True)
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", lambda *question: asked.append("") or "y")
    with pytest.raises(
        ValueError, match=r"model_type must be one of .*code of a model folder \(auto_map\) is never run"
    ):
        DOORS[door](folder)
    assert not marker.exists()
    assert not asked


def test_every_call_of_transformers_says_so() -> None:
    """trust_remote_code=False stands in each call of an Auto class: transformers asks on stdin where it is missing."""
    package = Path(__file__).parent.parent / "torch_infini"
    for path in package.rglob("*.py"):
        text = path.read_text()
        for call in ("AutoTokenizer.from_pretrained(", "AutoConfig.from_pretrained(", "ForCausalLM.from_pretrained("):
            for part in text.split(call)[1:]:
                if "infinilm" not in path.parts:  # its AutoConfig is our own
                    assert "trust_remote_code=False" in part.split("\n")[0] + part.split("\n")[1], (path, call)
