"""What torch calls at the end of `import torch` (entry point torch.backends): device `infini`, if the variable asks.

A module of its own, so that without TORCH_INFINI_DEVICE nothing of torch_infini is imported. In lm-evaluation-harness,
which has no entry points, it names the model `infini`, which is imported when `--model infini` asks for it. vLLM calls
load_in_vllm (entry point vllm.general_plugins), which imports nothing without TORCH_INFINI_VLLM.
"""

import os
import sys


def autoload() -> None:
    """Enable device `infini` where TORCH_INFINI_DEVICE is set: to cpu, cuda, or a vendor's device or library."""
    name_in_lm_eval()
    if os.environ.get("TORCH_INFINI_DEVICE"):
        import torch_infini.device

        torch_infini.device.enable()


def name_in_lm_eval() -> None:
    """Add the model `infini` to lm_eval's registry of models, if that program has been imported before torch."""
    registry = getattr(sys.modules.get("lm_eval.api.registry"), "model_registry", None)
    if registry is None:
        return
    try:
        import lm_eval.models  # noqa: F401  # lm_eval imports it only while its registry is empty

        if "infini" not in registry:
            registry.register("infini", target="torch_infini.integrations.lm_eval:InfiniLM")
    except Exception as error:  # another release of lm_eval: `import torch` must not fail
        print(f"torch_infini: lm_eval has no model infini: {type(error).__name__}: {error}", file=sys.stderr)


def load_in_vllm() -> None:
    """Turn on the parts of torch_infini's plugin that TORCH_INFINI_VLLM names, in this process of vLLM.

    Raises:
        ValueError: If the variable names an unknown part.
    """
    value = os.environ.get("TORCH_INFINI_VLLM", "0")
    if value in ("", "0"):
        return
    from torch_infini.integrations.vllm import activate, parts_of

    activate(parts_of(value))
