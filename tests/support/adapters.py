"""LoRA adapters for tests, written by peft; their effect on the tokens of a small model is large."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


def adapt(folder: Path, base: Any, seed: int, **options: Any) -> Path:
    """Write an adapter of the base, with these options of LoraConfig besides or instead of the usual ones."""
    import peft

    torch.manual_seed(seed)
    config = peft.LoraConfig(
        **{"r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj", "down_proj"], **options}
    )
    model = peft.get_peft_model(base, config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(str(folder))
    model.unload()
    return folder
