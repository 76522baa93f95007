"""python -m torch_infini serve --config FILE: options from YAML, what the command line overrides, and bad files."""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx2")
pytest.importorskip("yaml")

import httpx2 as httpx

from support.serving import Command, save_model
from torch_infini.__main__ import main
from torch_infini.commands import serve
from torch_infini.commands.errors import CommandError


def options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    given = parser.parse_args(arguments)
    return given.options.merge(given)


def write(folder: Path, text: str | bytes) -> str:
    path = folder / "serve.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    path.chmod(0o600)
    return str(path)


def test_defaults_without_a_file() -> None:
    found = options([])
    assert (found.port, found.host, found.lora, found.no_page, found.log_level) == (
        8000,
        None,
        [],
        False,
        "info",
    )
    assert found.max_num_seqs is None and found.config is None
    assert options(["--lora", "a=b", "--lora", "c=d"]).lora == ["a=b", "c=d"]


def test_every_kind_of_option(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        """
# comments and empty lines are ignored
model: some/folder
port: 0
drain: 2.5
receive-timeout: 1e1
no-page: yes
enforce-eager: false
log-level: warning
quantization: "int8"
served-model-name: [a, "7"]
allow-origin: http://page
lora:
  - x=folder
  - y=other
tensor-parallel-size: 2
max-num-seqs: 4
host: ::1
speculative-config:
  method: ngram
  num_speculative_tokens: 4
  some: 0.1
  other: true
limit-mm-per-prompt: {image: 2}
""",
    )
    found = options(["--config", path])
    assert (found.model, found.port, found.drain, found.receive_timeout) == ("some/folder", 0, 2.5, 10.0)
    assert (found.no_page, found.enforce_eager, found.log_level, found.quantization) == (True, False, "warning", "int8")
    assert (found.served_model_name, found.allow_origin) == (["a", "7"], ["http://page"])
    assert (found.lora, found.tensor_parallel_size, found.max_num_seqs) == (["x=folder", "y=other"], 2, 4)
    assert found.host == ["::1"] and found.max_body is None
    wanted = {"method": "ngram", "num_speculative_tokens": 4, "some": 0.1, "other": True}
    assert json.loads(found.speculative_config) == wanted
    assert serve.engine_settings(found, ())["limit_mm_per_prompt"] == {"image": 2}
    text = json.dumps(wanted)
    assert options(["--config", write(tmp_path, f"speculative-config: '{text}'")]).speculative_config == text


@pytest.mark.parametrize("first", [True, False])
def test_the_command_line_wins(first: bool, tmp_path: Path) -> None:
    """Wherever --config stands, also with a value that is the default, and for lists as a whole."""
    path = write(tmp_path, "port: 1\nlora: [a=b]\nlog-level: error\nserved-model-name: [x, y]\napi-key: k\nno-page: no")
    given = ["--port", "8000", "--lora", "c=d", "--log-level", "info", "--served-model-name", "z", "--no-page"]
    given += ["--api-key-file", "f"]
    config = ["--config", path]
    found = options([*config, *given] if first else [*given, *config])
    assert (found.port, found.lora, found.log_level, found.served_model_name) == (8000, ["c=d"], "info", ["z"])
    assert found.no_page and found.api_key is None and found.api_key_file == "f"
    assert options(["--config", path, "--api-key", "other"]).api_key == "other"


def test_an_empty_file(tmp_path: Path) -> None:
    assert options(["--config", write(tmp_path, "# port: 1\n")]).port == 8000
    assert options(["--config", write(tmp_path, b"\xef\xbb\xbfport: 1")]).port == 1


MAPPING = "a text of JSON, or a mapping of names to texts, decimal numbers, true or false"
BAD = [
    ("prt: 8000", "line 1: 'prt' must be an option of the command, without dashes (is it port?), got"),
    ("\nmax_num_seqs: 4", "line 2: 'max_num_seqs' must be an option of the command, without dashes (is it max-num"),
    ("--port: 4", "line 1: '--port' must be an option of the command, without dashes"),
    ("config: other.yaml", "line 1: 'config' must be an option"),
    ("help: true", "line 1: 'help' must be an option"),
    ("q: int8", "line 1: 'q' must be an option"),
    ("port: 1\nport: 2", "line 2: port must stand in the file once, got it again"),
    ("port: eighty", "line 1: port must be an integer in decimal digits, got 'eighty'"),
    ("port: '80'", "line 1: port must be an integer in decimal digits, got '80'"),
    ("port: 80.5", "port must be an integer in decimal digits, got '80.5'"),
    ("port: true", "port must be an integer in decimal digits, got 'true'"),
    ("port: 0x10", "port must be an integer in decimal digits, got '0x10'"),
    ("port: 010", "port must be an integer in decimal digits, got '010'"),
    ("port: 1:30", "port must be an integer in decimal digits, got '1:30'"),
    ("port: " + "9" * 5000, "port must be an integer in decimal digits, got '9999"),
    ("port:", "port must be an integer in decimal digits, got nothing"),
    ("port: [80]", "port must be an integer in decimal digits, got a list"),
    ("port: {a: 1}", "port must be an integer in decimal digits, got a mapping"),
    ("drain: .nan", "drain must be a number, got '.nan'"),
    ("drain: .inf", "drain must be a number, got '.inf'"),
    ("drain: true", "drain must be a number, got 'true'"),
    ("model: 7", "model must be a text, in quotes, got '7'"),
    ("model: 2024-01-01", "model must be a text, in quotes, got '2024-01-01'"),
    ("model: ~", "model must be a text, got '~'"),
    ("model: [a]", "model must be a text, got a list"),
    ("model: !!python/object/apply:os.system [echo]", "model must be a text, got a list"),
    ("no-page: 1", "no-page must be true or false, got '1'"),
    ("no-page: 'true'", "no-page must be true or false, got 'true'"),
    ("log-level: loud", "log-level must be critical or error or warning or info or debug or trace, got 'loud'"),
    ("speculative-config: 7", f"speculative-config must be {MAPPING}, got '7'"),
    ("speculative-config: [a]", f"speculative-config must be {MAPPING}, got a list"),
    (
        "speculative-config: {a: [1]}",
        f"speculative-config must be {MAPPING}, got a mapping",
    ),
    (
        "speculative-config: {a: 010}",
        f"speculative-config must be {MAPPING}, got a mapping",
    ),
    (
        "speculative-config: {a: .nan}",
        f"speculative-config must be {MAPPING}, got a mapping",
    ),
    ("speculative-config: {a: ~}", f"speculative-config must be {MAPPING}, got a mapping"),
    ("speculative-config: {a: 1, a: 2}", "speculative-config must be a mapping with 'a' once, got a mapping"),
    ("lora: []", "lora must be a list of at least one text, got a list"),
    ("lora: [[a]]", "lora must be a list of texts, got a list"),
    ("served-model-name: [7]", "served-model-name must be a list of texts, got a list"),
    ("served-model-name: {a: b}", "served-model-name must be a text or a list of texts, got a mapping"),
    ("api-key: 12345", "api-key must be a text, in quotes, got a number"),
    ("api-key: [hidden]", "api-key must be a text, got a list"),
    ("api-key: *hidden", "line 1: the file must be YAML, got an error: found undefined alias '...'"),
    ("- port", "the file must have lines like 'port: 8000', got a list"),
    ("port", "the file must have lines like 'port: 8000', got a text"),
    ("? [a]\n: 1", "line 1: the name of an option must be a word, got a list"),
    ("port: 1\n---\nport: 2", "line 2: the file must be YAML, got an error: expected a single document"),
    ("port: [", "the file must be YAML, got an error: while parsing a flow node"),
    ("port: 'a", "the file must be YAML, got an error: while scanning a quoted scalar"),
    ("a: " + "[" * 20000, "must be YAML of options and values, got deeper nesting"),
    ("port: \x01", "the file must be YAML, got an error"),
    (b"port: \xff", "--config must name a file in UTF-8"),
    ("#" * 70000, "--config must name a file of at most 65536 bytes"),
]


@pytest.mark.parametrize(("text", "rule"), BAD, ids=range(len(BAD)))
def test_bad_files(text: str | bytes, rule: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, text)
    assert main(["serve", "--config", path]) == 2
    said = capsys.readouterr().err
    assert said.startswith("torch_infini serve: ") and path in said and said.count("\n") == 1
    assert rule.removesuffix(", got") in said and "hidden" not in said and "12345" not in said


def test_references_do_not_grow(tmp_path: Path) -> None:
    """A few lines that stand for 10^9 values."""
    lines = ["x0: &x0 [a, a, a, a, a, a, a, a, a, a]"]
    lines += [f"x{i}: &x{i} [{', '.join([f'*x{i - 1}'] * 10)}]" for i in range(1, 9)]
    with pytest.raises(CommandError, match="line 1: 'x0' must be an option"):
        options(["--config", write(tmp_path, "\n".join(lines))])
    with pytest.raises(CommandError, match="lora must be a list of texts, got a list"):
        options(["--config", write(tmp_path, "\n".join([f"lora:\n- {lines[0][4:]}\n- [*x0, *x0]"]))])


@pytest.mark.parametrize("name", ["none.yaml", ".", "a\0b"])
def test_files_that_cannot_be_read(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for option in ("--config", "--api-key-file"):
        assert main(["serve", "--port", "0", option, str(tmp_path / name)]) == 2
        said = capsys.readouterr().err
        assert said.startswith(f"torch_infini serve: {option} must name a file that can be read, got ")


def test_pyyaml_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(CommandError, match=r"without PyYAML \(pip install 'torch_infini\[serve\]'\)"):
        options(["--config", write(tmp_path, "port: 1")])


def test_a_key_that_all_can_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path, "api-key: hidden")
    for mode, warns in ((0o600, False), (0o640, False), (0o644, True)):
        os.chmod(path, mode)
        caplog.clear()
        with caplog.at_level(logging.WARNING, "torch_infini"):
            assert options(["--config", path]).api_key == "hidden"
        said = [record.getMessage() for record in caplog.records]
        assert said == [f"{path} has a key and can be read by every user: chmod o-r"] * warns
    path = write(tmp_path, "port: 1")
    os.chmod(path, 0o644)
    caplog.clear()
    options(["--config", path])
    assert not caplog.records


def test_key_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "key"
    path.write_text("secret\n")
    monkeypatch.setenv("INFINI_API_KEY", "other")
    assert serve.key_of(options(["--api-key-file", str(path)])) == "secret"
    assert serve.key_of(options(["--api-key", "third"])) == "third"
    assert serve.key_of(options([])) == "other"
    with pytest.raises(CommandError, match="--api-key must not be given beside --api-key-file"):
        serve.key_of(options(["--api-key-file", str(path), "--api-key", "x"]))
    for text in ("", "\n", "a\nb\n", "x" * 5000):
        path.write_text(text)
        with pytest.raises(CommandError, match="--api-key-file must name a file of"):
            serve.key_of(options(["--api-key-file", str(path)]))


@pytest.mark.full
def test_a_server_of_a_file(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    save_model(folder)
    lines: dict[str, Any] = {"model": folder, "port": 0, "served-model-name": "[one, two]", "api-key": "secret"}
    lines |= {"no-page": "true", "max-model-len": 64}
    path = write(tmp_path, "".join(f"{name}: {value}\n" for name, value in lines.items()))
    command = Command(["serve", "--config", path, "--log-level", "warning"], tmp_path / "output")
    url = command.url()
    key = {"authorization": "Bearer secret"}
    models = httpx.get(f"{url}/v1/models", headers=key).json()["data"]
    assert [(model["id"], model["max_model_len"]) for model in models] == [("one", 64), ("two", 64)]
    assert httpx.get(f"{url}/v1/models").status_code == 401 and httpx.get(url, headers=key).status_code == 404
    os.kill(command.process.pid or 0, signal.SIGTERM)
    command.process.join(60)
    assert command.process.exitcode == 0


@pytest.mark.full
def test_a_file_from_a_pipe() -> None:
    """As of a shell's <(...)."""
    done = subprocess.run(
        [sys.executable, "-m", "torch_infini", "serve", "--config", "/dev/stdin"],
        input="port: 70000",
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2 and "port must be an integer from 0 to 65535, got 70000" in done.stderr
