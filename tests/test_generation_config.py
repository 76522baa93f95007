"""The sampling settings of a model's generation_config.json: defaults of LLM and server, below what is asked for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from support.serving import ask, save_model, service_of
from torch_infini import LLM, AsyncLLM, SamplingParams
from torch_infini.__main__ import main
from torch_infini.engine.defaults import sampling_defaults
from torch_infini.testing.checkpoints import save_tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")
GIVEN = {"temperature": 0.6, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.1}


@pytest.fixture
def folder(tmp_path: Path) -> Callable[..., Path]:
    """Saves a model with these fields in its generation_config.json."""

    def save(**fields: Any) -> Path:
        save_model(tmp_path)
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 2, **fields}))
        return tmp_path

    return save


def test_requests_without_params_have_them(folder: Callable[..., Path]) -> None:
    llm = LLM(folder(**GIVEN, do_sample=True, max_new_tokens=99))
    assert llm.engine.sampling == GIVEN
    assert llm.engine.new_request([3, 4]).params == SamplingParams(**GIVEN)
    asked = SamplingParams(temperature=0.2)
    assert llm.engine.new_request([3, 4], asked).params is asked
    (output,) = llm.generate([[3, 4]])
    assert len(output.outputs[0].token_ids) <= 16


def test_none_ignores_them(folder: Callable[..., Path]) -> None:
    path = folder(**GIVEN)
    for model in (path, LLM(path).engine.model):
        llm = LLM(model, generation_config="none" if model is path else "auto")
        assert llm.engine.sampling == {} and llm.engine.new_request([3]).params == SamplingParams()
    assert LLM(path, generation_config="vllm").engine.sampling == {}
    with pytest.raises(ValueError, match="generation_config must be 'auto' or 'none', got 'folder'"):
        LLM(path, generation_config="folder")  # type: ignore[arg-type]


def test_forms_of_values(folder: Callable[..., Path]) -> None:
    assert sampling_defaults(folder(top_k=-1, top_p=None, temperature=1)) == {"top_k": 0, "temperature": 1}
    assert sampling_defaults(folder() / "config.json") == {}
    for fields, rule in (
        ({"temperature": -1}, "temperature must be a finite number of at least 0, got -1"),
        ({"top_k": "50"}, "top_k must be an integer of at least 0, got '50'"),
        ({"repetition_penalty": 0}, "repetition_penalty must be a finite number above 0, got 0"),
    ):
        path = folder(**fields)
        with pytest.raises(ValueError) as caught:
            LLM(path)
        assert str(caught.value) == (
            f'torch_infini.LLM: {path / "generation_config.json"}: {rule} (generation_config="none" ignores it)'
        )
        assert LLM(path, generation_config="none").engine.sampling == {}
    (path / "generation_config.json").write_text("[]")
    with pytest.raises(ValueError, match="generation_config.json must hold a JSON object, got list"):
        LLM(path)


def test_a_tokenizer_of_another_folder(folder: Callable[..., Path], tmp_path: Path) -> None:
    """By its path; a path that is none is an error that names it."""
    path = folder()
    (tmp_path / "other").mkdir()
    save_tokenizer(tmp_path / "other", 512)
    assert LLM(path, tokenizer=tmp_path / "other").engine.tokenizer is not None
    with pytest.raises(FileNotFoundError, match="the tokenizer's folder must exist, got nowhere"):
        LLM(path, tokenizer="nowhere")


def test_the_server_has_them(folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A request's field, then the server's setting, then the model's, then OpenAI's default."""
    pytest.importorskip("fastapi")
    with_model = AsyncLLM(folder(**GIVEN), max_num_seqs=4)
    service = service_of(with_model, sampling={"top_p": 0.5})
    seen: list[SamplingParams] = []
    new_request = with_model.engine.new_request

    def record(prompt: Any, params: SamplingParams, *how: Any) -> Any:
        seen.append(params)
        return new_request(prompt, params, *how)

    monkeypatch.setattr(with_model.engine, "new_request", record)
    try:
        for path, body in (
            ("/v1/completions", {"prompt": "hello"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]}),
        ):
            assert ask(service, "POST", path, json={"max_tokens": 1, "top_k": 5, **body}).status_code == 200
        for params in seen:
            assert (params.temperature, params.top_k, params.top_p) == (0.6, 5, 0.5)
            assert params.repetition_penalty == 1.1 and params.min_p == 0
        assert len(seen) == 2
    finally:
        with_model.close()


def test_the_command_refuses_what_is_not_served(
    folder: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "--model", str(folder(temperature=-1)), "--port", "0"]) == 2
    assert 'got -1 (generation_config="none" ignores it)' in capsys.readouterr().err
