"""accelerate and transformers' trainer on the device infini: chosen by themselves, with the CPU's bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from support.device_processes import run_code
from torch_infini.demo import MODEL

pytestmark = pytest.mark.usefixtures("infini")
accelerate = pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")


@pytest.fixture(autouse=True)
def no_state_is_left() -> Any:
    """accelerate keeps the device in its class."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def loop(**options: Any) -> tuple[str, list[float]]:
    """The device of a training loop, and what it has learnt."""
    torch.manual_seed(0)
    accelerator = accelerate.Accelerator(**options)
    layer = torch.nn.Linear(4, 2)
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(8, 4)), batch_size=4)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    layer, optimizer, data = accelerator.prepare(layer, optimizer, data)
    for (x,) in data:
        with accelerator.autocast():
            loss = layer(x).float().pow(2).sum()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        assert x.device.type == layer.weight.device.type == accelerator.device.type
    return accelerator.device.type, layer.weight.flatten().tolist()


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_accelerator(precision: str) -> None:
    device, learnt = loop(mixed_precision=precision)
    assert device == "infini"
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    assert loop(mixed_precision=precision, cpu=True) == ("cpu", learnt)


def train(folder: Path, **options: Any) -> tuple[str, float, list[torch.Tensor]]:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    rows = [{"input_ids": list(range(i, i + 8)), "labels": list(range(i, i + 8))} for i in range(8)]
    arguments = transformers.TrainingArguments(
        str(folder), max_steps=2, per_device_train_batch_size=4, report_to=[], save_strategy="no", **options
    )
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=rows, eval_dataset=rows)
    trainer.train()
    assert arguments.device.type == trainer.accelerator.device.type == model.device.type
    return model.device.type, trainer.evaluate()["eval_loss"], [p.detach().cpu() for p in model.parameters()]


def test_trainer(tmp_path: Path) -> None:
    device, loss, learnt = train(tmp_path)
    assert device == "infini"
    device, loss_on_cpu, learnt_on_cpu = train(tmp_path, use_cpu=True)
    assert device == "cpu" and loss == loss_on_cpu
    assert all(torch.equal(one, other) for one, other in zip(learnt, learnt_on_cpu, strict=True))


@pytest.mark.full
def test_packages_that_are_imported_later() -> None:
    """enable() imports neither, and both choose infini whenever they come."""
    done = run_code(
        "import sys, torch\n"
        "assert not {'accelerate', 'transformers'} & set(sys.modules)\n"
        "import transformers\n"
        "print(transformers.TrainingArguments('.').device.type)\n",
        TORCH_INFINI_DEVICE="cpu",
    )
    assert done.stdout.split() == ["infini"], done.stderr[-2000:]
