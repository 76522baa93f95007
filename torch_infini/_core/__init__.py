"""What every other part stands on: the native library, dtypes, devices, memory, facts about the CPU. No ops."""

from . import attention as attention  # for the whole process: long prefill on CUDA is torch's,
from . import products as products  # and the table of products that was stored on this machine is used
