"""What torch calls at the end of `import torch` (entry point torch.backends): device `infini`, if the variable asks.

A module of its own, so that without TORCH_INFINI_DEVICE nothing of torch_infini is imported.
"""

import os


def autoload() -> None:
    """Enable device `infini` where TORCH_INFINI_DEVICE is set: to cpu, cuda, or a vendor's device or library."""
    if os.environ.get("TORCH_INFINI_DEVICE"):
        import torch_infini.device

        torch_infini.device.enable()
