"""Device `infini`: PyTorch's PrivateUse1 device on memory of the CPU or of CUDA, without copies.

enable() registers it. Importing torch_infini does not, because a registered device becomes the process's
torch.accelerator. TORCH_INFINI_DEVICE=cpu, cuda or the path of a vendor's library enables it when torch is imported.
Afterwards torch.infini is its module.

Example:
    >>> torch_infini.device.enable("cpu")
    >>> x = torch.randn(3, 4, device="infini")
    >>> y = torch.ops.infini.silu(x) @ x.T
    >>> torch_infini.device.unwrap(y)  # the same memory, as a tensor of the CPU
"""

from . import _modules as _modules  # these three are what enable() installs
from . import _sharing as _sharing
from . import _trainers as _trainers
from ._enable import enable
from ._fallback import fallback, fallback_report
from ._memory import unwrap, wrap
from ._state import backing, is_enabled, vendor_device

__all__ = ["backing", "enable", "fallback", "fallback_report", "is_enabled", "unwrap", "vendor_device", "wrap"]
