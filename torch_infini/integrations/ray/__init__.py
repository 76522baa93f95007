"""torch_infini in Ray: Predictor for Ray Data, deployment for Ray Serve. docs/scale-out.md says when to use which.

pip install 'torch_infini[ray]'
"""

try:
    import ray
except ModuleNotFoundError as error:
    raise ImportError(
        f"torch_infini.integrations.ray: Ray must be installed (pip install 'torch_infini[ray]'), got {error}"
    ) from error

from .deployment import deployment
from .predictor import Predictor

__all__ = ["Predictor", "deployment"]
del ray
