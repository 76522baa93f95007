"""Streams, events and graphs of libinfinirt, as torch sees them.

On CUDA a Stream is a stream of torch too: ops run on torch's current stream, and `with stream:` makes it that one. On
the CPU, where torch has no streams, a Stream is a queue with a thread of its own, to which functions are launched.
graph() captures a function once and replays it with other inputs, on either.
"""

from .graphs import Graph, graph
from .streams import Event, Stream

__all__ = ["Event", "Graph", "Stream", "graph"]
