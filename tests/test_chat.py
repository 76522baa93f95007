"""python -m torch_infini chat: what it remembers, its commands, and what goes wrong in a conversation."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.scripts import script
from torch_infini import LLM
from torch_infini.__main__ import main
from torch_infini.commands import chat
from torch_infini.demo import MODEL
from torch_infini.testing.checkpoints import random_model, save_tokenizer

pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("one_thread")
Talk = Callable[..., tuple[str, list[list[dict[str, str]]]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 512 positions with a chat template."""
    path = tmp_path_factory.mktemp("chat")
    model = random_model("llama")
    model.save_pretrained(path)
    save_tokenizer(path, model.config.vocab_size)
    return path


@pytest.fixture
def talk(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Talk]:
    """Runs the command on lines of stdin; returns what it prints and the conversations that the template got."""
    seen: list[list[dict[str, str]]] = []
    of_llm = LLM.chat_prompt

    def noted(llm: LLM, messages: Any, template: Any = None) -> list[int]:
        seen.append([dict(message) for message in messages])
        return of_llm(llm, messages, template)

    monkeypatch.setattr(LLM, "chat_prompt", noted)

    def run(*lines: str, options: tuple[str, ...] = ()) -> tuple[str, list[list[dict[str, str]]]]:
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        quick = ["--max-new-tokens", "5", "--temperature", "0", "--ignore-eos"]
        assert main(["chat", "--model", str(folder), *quick, *options]) == 0
        return capsys.readouterr().out, seen[1:]  # the first one asks for the template

    yield run


def test_remembers(talk: Talk, tmp_path: Path) -> None:
    """Answers are part of the next question; they are those of LLM.chat; the file has all of it."""
    out, seen = talk("hello", "", "and\\", "more", f"/save {tmp_path / 'saved.json'}", "/exit", "never read")
    messages = json.loads((tmp_path / "saved.json").read_text())["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant"] * 2
    assert messages[0]["content"] == "hello" and messages[2]["content"] == "and\nmore"
    assert seen == [messages[:1], messages[:3]]
    assert messages[1]["content"] in out and messages[3]["content"] in out
    assert out.count("tok/s, the first after") == 2 and "saved 4 messages" in out


def test_answers_are_those_of_the_engine(talk: Talk, folder: Path, tmp_path: Path) -> None:
    from torch_infini import SamplingParams

    talk("hello", f"/save {tmp_path / 'saved.json'}")
    answer = json.loads((tmp_path / "saved.json").read_text())["messages"][1]["content"]
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    assert LLM(folder).chat([{"role": "user", "content": "hello"}], params)[0].text == answer


def test_system_and_reset(talk: Talk) -> None:
    _, seen = talk("a", "/reset", "b", "/system Be brief.", "c", "/system", "d", options=("--system", "Be kind."))
    system = [[m["content"] for m in messages if m["role"] == "system"] for messages in seen]
    assert system == [["Be kind."], ["Be kind."], ["Be brief."], []]
    assert [messages[-1]["content"] for messages in seen] == ["a", "b", "c", "d"]
    assert [len(messages) for messages in seen] == [2, 2, 2, 1]


def test_commands_that_fail(talk: Talk, tmp_path: Path) -> None:
    """Each is said, and the conversation goes on as if it had not been."""
    out, seen = talk("/what", "/save", f"/save {tmp_path}", "x" * 600, "hello")
    assert out.count("/reset         forget the conversation") == 2
    assert "not saved: [Errno 21]" in out
    assert "no answer: torch_infini" in out and "/reset begins anew" in out
    assert seen[-1] == [{"role": "user", "content": "hello"}] and "tok/s" in out


def test_ctrl_c_ends_an_answer(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What had come stays; the engine has nothing left to do."""
    llm = LLM(folder)
    talk = chat.Chat(llm, chat.sampling_of(_arguments()), None)
    steps, of_engine = [0], llm.engine.step

    def step() -> Any:
        steps[0] += 1
        if steps[0] == 4:
            raise KeyboardInterrupt
        return of_engine()

    monkeypatch.setattr(llm.engine, "step", step)
    assert talk.take("hello")
    assert [message["role"] for message in talk.messages] == ["user", "assistant"]
    monkeypatch.undo()
    assert talk.take("go on") and "tok/s" in capsys.readouterr().out
    metrics = llm.metrics()
    assert metrics.running == metrics.waiting == 0 and metrics.requests["abort"] == 1


def test_the_demo_model_has_a_template() -> None:
    """It continues text: a conversation is its messages, a blank line apart."""
    llm = LLM(MODEL)
    messages = [{"role": "user", "content": "A class definition"}, {"role": "assistant", "content": "is"}]
    template = script("benchmarks/train_demo").CHAT_TEMPLATE
    assert llm.engine.tokenizer is not None and llm.engine.tokenizer.chat_template == template
    ids = llm.chat_prompt([*messages, {"role": "user", "content": "It"}])
    assert ids == llm.engine.prompts.encode("A class definition\n\nis\n\nIt")


def _arguments() -> Any:
    import argparse

    parser = argparse.ArgumentParser()
    chat.add_arguments(parser)
    return parser.parse_args(["--max-new-tokens", "12", "--temperature", "0", "--ignore-eos"])


def test_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(MODEL, tmp_path / "model")
    config = tmp_path / "model" / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "chat_template": None}))
    assert main(["chat", "--model", str(tmp_path / "model")]) == 2
    assert "chat template" in capsys.readouterr().err
    assert main(["chat", "--temperature", "-1"]) == 2
    assert "temperature" in capsys.readouterr().err
