"""patch_model(weights="auto:BITS"): the bits that are spent, where they go, what is expected; folders; bad input."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from support.tiny_llama import calls, greedy, identity, logits, tiny, tokens
from torch_infini import LLM, SamplingParams
from torch_infini.__main__ import main
from torch_infini.demo import MODEL
from torch_infini.patch import budget, load_patched, patch_model, save_patched
from torch_infini.weights import best

pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("one_thread")


def model_of(**changes: Any) -> Any:
    return tiny(torch.float32, **{"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, **changes})


def formats(report: Any) -> dict[str, str]:
    return {row.name: row.op for row in report.rows if "_proj" in row.name or row.name == "lm_head"}


@pytest.mark.parametrize("asked", [5.2, 6.0, 7.5])
def test_bits_and_error(asked: float) -> None:
    """So many bits at most, nearly all of them, and an error of the size that was expected."""
    model, ids = model_of(), tokens()
    before = logits(model, ids)
    report = patch_model(model, weights=f"auto:{asked}", strict=True)
    rows = [row for row in report.rows if row.name in formats(report)]
    bits = 8 * sum(row.bytes for row in rows) / sum(row.parameters for row in rows)
    assert report.budget is not None and report.budget.asked == asked
    assert bits == pytest.approx(report.budget.bits) and asked - 0.4 < bits <= asked
    ops = {f"linear_{best(name, 'cpu').name}" for name in ("int4", "int8")}
    assert set(formats(report).values()) == ops == {op for op in calls(model, ids) if op.startswith("linear_")}
    error = float((logits(model, ids) - before).norm() / before.norm())
    assert 0.5 < error / report.budget.error < 2
    assert f"{bits:.2f} bits a weight of {asked:g}, expected error of the logits" in str(report)


def test_more_bits_less_error() -> None:
    """And as many as all layers take give int8 everywhere."""
    errors = []
    for asked in (5.2, 6, 7, 8, 9):
        report = patch_model(model_of(), weights=f"auto:{asked}")
        assert report.budget is not None
        errors.append(report.budget.error)
    assert errors == sorted(errors, reverse=True)
    assert set(formats(report).values()) == {f"linear_{best('int8', 'cpu').name}"}


def test_bits_go_where_errors_matter() -> None:
    """Layers that hardly change the logits get the fewest."""
    model = model_of()
    with torch.no_grad():
        for layer in model.model.layers[:2]:
            layer.mlp.down_proj.weight.mul_(1e-3)
            layer.self_attn.o_proj.weight.mul_(1e-3)
    found = formats(patch_model(model, weights="auto:6.2"))
    few, many = (f"linear_{best(name, 'cpu').name}" for name in ("int4", "int8"))
    for name, op in found.items():
        if name.startswith(("model.layers.0.", "model.layers.1.")):
            assert op == few, name
    assert many in {op for name, op in found.items() if name.startswith("model.layers.2.")}


def test_one_input_one_format() -> None:
    """Products that are computed together stay so; the engine reads the folder and makes the same tokens."""
    for asked in (5.3, 5.8, 6.6):
        found = formats(patch_model(model_of(), weights=f"auto:{asked}"))
        for i in range(3):
            at = f"model.layers.{i}."
            assert len({found[f"{at}self_attn.{name}_proj"] for name in "qkv"}) == 1
            assert len({found[f"{at}mlp.{name}_proj"] for name in ("gate", "up")}) == 1


def test_folder(tmp_path: Path) -> None:
    model, ids = model_of(), tokens(1)
    patch_model(model, weights="auto:5.5")
    save_patched(model, tmp_path)
    assert torch.equal(logits(load_patched(tmp_path), ids), logits(model, ids))
    output = LLM(tmp_path, progress=False).generate(ids[0].tolist(), SamplingParams.greedy(max_tokens=12))[0]
    assert list(output.outputs[0].token_ids) == greedy(model, ids)[0, ids.shape[1] :].tolist()


def test_fill() -> None:
    """Within a step of the best choice there is, for small problems; never above the budget that the smallest allow."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        sizes = [sorted(torch.randint(1, 9, (3,), generator=generator).tolist()) for _ in range(4)]
        errors = [sorted(torch.rand(3, generator=generator).tolist(), reverse=True) for _ in range(4)]
        smallest = sum(size[0] for size in sizes)
        for room in (0, 3, 9, 40):
            chosen = budget.spend(sizes, errors, smallest + room)
            assert sum(size[i] for size, i in zip(sizes, chosen, strict=True)) <= smallest + room
            made = sum(error[i] for error, i in zip(errors, chosen, strict=True))
            least = min(
                sum(error[i] for error, i in zip(errors, choice, strict=True))
                for choice in itertools.product(range(3), repeat=4)
                if sum(size[i] for size, i in zip(sizes, choice, strict=True)) <= smallest + room
            )
            assert least <= made + 1e-9 and made - least < 1
        assert made == pytest.approx(least)  # all of it


def test_calibrate() -> None:
    """Other tokens, another measure; of a text no more than 512 are used."""
    one, other = (torch.randint(128, (600,), generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    found = []
    for ids in (one, other, torch.cat((one[:512], other)), None):
        report = patch_model(model_of(), weights="auto:6", calibrate=ids)
        assert report.budget is not None
        found.append(report.budget.error)
    assert found[0] == found[2] and len(set(found)) == 3


BAD: dict[str, tuple[dict[str, Any], str]] = {
    **{
        weights: (
            {"weights": weights},
            f"weights must have a number of bits after 'auto:', as 'auto:4.8', got {weights!r}",
        )
        for weights in ("auto:x", "auto:", "auto:-4", "auto:nan")
    },
    "too few": ({"weights": "auto:2"}, "for this model, the smallest format of each layer, got 'auto:2'"),
    "calibrate without": (
        {"weights": "int8", "calibrate": torch.arange(8)},
        "calibrate must be None unless weights is 'auto:BITS', got ids with 'int8'",
    ),
    "calibrate of floats": (
        {"weights": "auto:6", "calibrate": torch.rand(8)},
        "calibrate must be [at least 2] token ids, int64 or int32, got float32 [8]",
    ),
    "calibrate of rows": (
        {"weights": "auto:6", "calibrate": torch.zeros(2, 3, dtype=torch.int64)},
        "calibrate must be [at least 2] token ids, int64 or int32, got int64 [2, 3]",
    ),
    "calibrate of one": (
        {"weights": "auto:6", "calibrate": torch.arange(1)},
        "calibrate must be [at least 2] token ids, int64 or int32, got int64 [1]",
    ),
    "another vocabulary": (
        {"weights": "auto:6", "calibrate": torch.tensor([1, 500])},
        "calibrate must have token ids from 0 to 127, got 1 to 500",
    ),
}


def test_calibrate_is_a_tensor() -> None:
    with pytest.raises(TypeError, match=r"calibrate must be a torch.Tensor of token ids, got list$"):
        patch_model(model_of(), weights="auto:6", calibrate=[1, 2, 3])  # type: ignore[arg-type]


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name: str) -> None:
    """One sentence, and the model is as it was."""
    options, message = BAD[name]
    model, ids = model_of(), tokens()
    before, expected = identity(model), logits(model, ids)
    with pytest.raises(ValueError, match=r"^torch_infini.patch_model: ") as caught:
        patch_model(model, **options)
    assert str(caught.value).endswith(message)
    assert identity(model) == before and torch.equal(logits(model, ids), expected)


def test_engine_refuses() -> None:
    with pytest.raises(ValueError, match="got 'auto:5': python -m torch_infini quantize makes a folder of it"):
        LLM(MODEL, quantization="auto:5")


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text("def add(a, b):\n    return a + b\n" * 20)
    out = tmp_path / "made"
    assert main(["quantize", str(MODEL), str(out), "--quantization", "auto:5.5", "--calibrate", str(text)]) == 0
    said = capsys.readouterr().out
    assert "bits a weight of 5.5" in said and f"written to {out}" in said
    assert LLM(out, progress=False).generate("def", SamplingParams.greedy(max_tokens=3))[0].outputs[0].text
    again = tmp_path / "again"
    assert main(["quantize", str(out), str(again), "--quantization", "int8"]) == 2
    assert f"MODEL must have weights in full precision, got integers in {out}" in capsys.readouterr().err
    assert not again.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([str(MODEL), "empty.txt"], "FOLDER must be a folder, got empty.txt, which is something else"),
        (["nowhere", "out"], "MODEL must be a Hugging Face folder with a config.json, got nowhere"),
        (
            [str(MODEL), "out", "--quantization", "int3"],
            "w8a16 or auto:BITS, got int3",
        ),
        (
            [str(MODEL), "out", "--quantization", "packed"],
            "w8a16 or auto:BITS, got packed",
        ),
        (
            [str(MODEL), "out", "--calibrate", "x"],
            "--calibrate must come with --quantization auto:BITS, got --quantization int4",
        ),
        (
            [str(MODEL), "out", "--quantization", "auto:5", "--calibrate", "none.txt"],
            "--calibrate must be a text in UTF-8",
        ),
        (
            [str(MODEL), "out", "--quantization", "auto:5", "--calibrate", "empty.txt"],
            "must have at least 2 tokens, got ",
        ),
    ],
)
def test_command_errors(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").write_text("")
    assert main(["quantize", *arguments]) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "out").exists()
