"""The old name of quantized_linear.py, by which whole models that an earlier release pickled name their classes.

For one release; QuantizedLinear and apply.State take the old names of attributes.
"""

from .._deprecated import moved_names

_NEW = "torch_infini.patch.quantized_linear"
__getattr__ = moved_names(
    __name__,
    QuantisedLinear=f"{_NEW}.QuantizedLinear",
    Joint=f"{_NEW}.FusedLinear",
    WeightPlan=f"{_NEW}.WeightPlan",
    ReadOnly=f"{_NEW}.ReadOnly",
)
