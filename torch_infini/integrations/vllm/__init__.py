"""torch_infini's kernels inside vLLM's CPU build: the plugin that TORCH_INFINI_VLLM turns on (docs/vllm.md).

vLLM calls torch_infini_autoload.load_in_vllm in each of its processes; this package is imported only if the variable
asks for it. settings.py reads the variable, activation.py registers the parts: ops.py with
activations.py, linear.py with quantized.py, and attention.py. report.py lists what they do to a model.
"""

from .activation import Activation, activate
from .settings import PARTS, parts_of

__all__ = ["PARTS", "Activation", "activate", "parts_of"]
