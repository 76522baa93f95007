"""The names of transformers 4 that `python -m torch_infini run` provides, while a script runs and nowhere else."""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from torch_infini._core.import_hooks import after_import
from torch_infini.commands import transformers4
from torch_infini.demo import MODEL

pytestmark = pytest.mark.usefixtures("one_thread")

ROOT = Path(__file__).resolve().parent.parent


def test_names_of_transformers_4_are_there_for_a_while() -> None:
    from transformers import AutoConfig, AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase

    if hasattr(PreTrainedTokenizerBase, "batch_encode_plus"):
        pytest.skip("transformers 4 has them")
    apply = PreTrainedTokenizerBase.apply_chat_template
    tokenizer, config = AutoTokenizer.from_pretrained(MODEL), AutoConfig.from_pretrained(MODEL)
    messages, template = [{"role": "user", "content": "def"}], "{{ messages[0].content }}"
    with transformers4.names():
        texts = ["def main(", "x"]
        assert tokenizer.batch_encode_plus(texts)["input_ids"] == tokenizer(texts)["input_ids"]
        short = tokenizer.batch_encode_plus(tuple(texts), add_special_tokens=False, max_length=2, truncation=True)
        assert [len(ids) for ids in short["input_ids"]] == [2, 1]
        pair = tokenizer("a", "b")["input_ids"]
        assert tokenizer.encode_plus("a", "b")["input_ids"] == pair
        assert tokenizer.batch_encode_plus([("a", "b"), ("a", "b")])["input_ids"] == [pair] * 2
        assert config.rope_theta == config.rope_parameters["rope_theta"]
        with pytest.raises(AttributeError, match="'LlamaConfig' object has no attribute 'rope_thetas'"):
            config.rope_thetas  # noqa: B018
        assert not hasattr(PretrainedConfig(), "rope_theta")
        ids = tokenizer.apply_chat_template(messages, chat_template=template)
        assert isinstance(ids, list) and ids == tokenizer("def", add_special_tokens=False)["input_ids"]
        encoded = tokenizer.apply_chat_template(messages, chat_template=template, return_dict=True)
        assert encoded["input_ids"] == ids
    assert not hasattr(tokenizer, "batch_encode_plus") and not hasattr(tokenizer, "encode_plus")
    assert not hasattr(config, "rope_theta") and PreTrainedTokenizerBase.apply_chat_template is apply


SCRIPT = """\
import sys
assert "transformers" not in sys.modules
import torch
from transformers import AutoConfig, AutoTokenizer
from infinilm.infer_engine import GenerationConfig, InferEngine
from infinilm.modeling_utils import load_model_state_dict_by_file
import infinicore

path = sys.argv[1]
config = AutoConfig.from_pretrained(path)
model = InferEngine(path, device=infinicore.device("cpu", 0))
load_model_state_dict_by_file(model, path, dtype=model.config.dtype)
assert config.rope_theta == model.config.rope_theta
assert config.torch_dtype == infinicore.utils.to_torch_dtype(model.dtype)
tokenizer = AutoTokenizer.from_pretrained(path)
ids = tokenizer.batch_encode_plus(["def main("])["input_ids"]
output = model.generate(infinicore.from_list(ids), GenerationConfig(max_new_tokens=12, top_k=1))
print([step.to_numpy()[0].item() for step in output])
"""


@pytest.mark.full
def test_a_script_for_transformers_4(tmp_path: Path) -> None:
    from torch_infini import LLM, SamplingParams

    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "torch_infini", "run", str(tmp_path / "script.py"), MODEL]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))}
    done = subprocess.run(command, capture_output=True, text=True, env={**environment, "OMP_NUM_THREADS": "1"})
    (output,) = LLM(MODEL).generate("def main(", SamplingParams.greedy(max_tokens=12))
    assert (done.stdout, done.returncode) == (f"{output.token_ids}\n", 0), done.stderr


def test_after_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, after the module's code; looking for it is no import, and what is imported already is called at once."""
    (tmp_path / "around_made_up").mkdir()
    (tmp_path / "around_made_up" / "__init__.py").write_text("")
    (tmp_path / "around_made_up" / "late.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    name, finders, calls = "around_made_up.late", list(sys.meta_path), []
    try:
        cancel = after_import(name, lambda module: calls.append("cancelled"))
        after_import(name, lambda module: calls.append(module.value))
        after_import(name, lambda module: calls.append(module.value + 1))
        assert importlib.util.find_spec(name) is not None and calls == []
        cancel()
        module = importlib.import_module(name)
        assert sorted(calls) == [1, 2] and sys.meta_path == finders
        after_import(name, lambda module: calls.append(3))
        cancel()
        importlib.reload(module)
        assert sorted(calls) == [1, 2, 3] and sys.meta_path == finders
    finally:
        sys.meta_path[:] = finders
        for one in ("around_made_up", name):
            sys.modules.pop(one, None)
