"""Streams, events and graphs of libinfinirt for torch, and recorded programs of calls.

On CUDA a Stream is also a stream of torch: `with stream:` makes it torch's current stream, on which ops run. On the
CPU, where torch has no streams, functions are launched to a Stream, which runs them at once or in a thread of its own.
graph() captures a function once and replays it with other inputs, on both. program() records the kernel calls of a
function on the CPU, and replays them without Python. record() notes ops of torch between two points without running
them, and runs them on the same tensors.
"""

from .graphs import Graph, graph
from .programs import Program, program
from .recording import Recording, record
from .streams import Event, Stream

__all__ = ["Event", "Graph", "Program", "Recording", "Stream", "graph", "program", "record"]
