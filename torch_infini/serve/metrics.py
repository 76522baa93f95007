"""ServerMetrics: the answer of GET /metrics, in Prometheus' text format, with the names that vLLM's dashboards read.

The engine's counts are read at each scrape; times of requests are observed with each output.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..engine import RequestOutput
from ..engine.outputs import Metrics

# Bounds of buckets: in seconds, from a step of a small model on a GPU to a long prompt on a CPU; and in tokens.
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)


class RequestTimes(NamedTuple):
    """A request's number of tokens at a time.

    Attributes:
        time: Seconds of time.perf_counter().
        tokens: Generated tokens of all its samples.
    """

    time: float
    tokens: int


NOTHING_SEEN = RequestTimes(0.0, 0)


class EngineCollector(Collector):
    """The engine's state and counts at the time of a scrape.

    Args:
        metrics: Returns them.
        model: The value of the label model_name.
    """

    def __init__(self, metrics: Callable[[], Metrics], model: str) -> None:
        self._metrics, self._model = metrics, model

    def collect(self) -> Iterator[Metric]:
        m = self._metrics()
        for name, text, value in (
            ("num_requests_running", "Samples in the engine's steps.", m.running),
            ("num_requests_waiting", "Samples that wait to run.", m.waiting),
            ("kv_cache_usage_perc", "Share of the cache's blocks in use; 1 is all.", 1 - m.free_blocks / m.blocks),
        ):
            gauge = GaugeMetricFamily(f"infini:{name}", text, labels=["model_name"])
            gauge.add_metric([self._model], value)
            yield gauge
        for name, text, value in (
            ("prompt_tokens", "Prompt tokens computed.", m.prompt_tokens),
            ("generation_tokens", "Tokens sampled.", m.generated_tokens),
            ("prefix_cache_queries", "Prompt tokens looked up in the cache.", m.prompt_tokens + m.reused_tokens),
            ("prefix_cache_hits", "Prompt tokens found there.", m.reused_tokens),
            ("spec_decode_num_draft_tokens", "Tokens guessed.", m.draft_tokens),
            ("spec_decode_num_accepted_tokens", "Tokens guessed right.", m.accepted_tokens),
            ("num_preemptions", "Preemptions of samples.", m.preemptions),
        ):
            counter = CounterMetricFamily(f"infini:{name}", text, labels=["model_name"])
            counter.add_metric([self._model], value)
            yield counter
        finished = CounterMetricFamily(
            "infini:request_success", "Samples that ended, by reason.", labels=["model_name", "finished_reason"]
        )
        for reason, count in m.requests.items():
            finished.add_metric([self._model, reason], count)
        yield finished


class ServerMetrics:
    """Counts and times of one server, in a registry of its own.

    Args:
        metrics: Returns the engine's.
        model: The served model's name.
    """

    def __init__(self, metrics: Callable[[], Metrics], model: str) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(EngineCollector(metrics, model))

        def histogram(name: str, text: str, bounds: tuple[float, ...]) -> Histogram:
            made = Histogram(f"infini:{name}", text, ["model_name"], registry=self._registry, buckets=bounds)
            return made.labels(model)

        self._first = histogram("time_to_first_token_seconds", "From a prompt's arrival to its first token.", SECONDS)
        self._between = histogram("inter_token_latency_seconds", "Between two tokens of a sample.", SECONDS)
        self._whole = histogram("e2e_request_latency_seconds", "From a prompt's arrival to its last token.", SECONDS)
        self._prompts = histogram("request_prompt_tokens", "Tokens of a prompt.", TOKENS)
        self._outputs = histogram("request_generation_tokens", "Tokens generated for a prompt.", TOKENS)

    def observe(self, output: RequestOutput, before: RequestTimes) -> RequestTimes:
        """Observe the next output of a request.

        Args:
            output: The output.
            before: The result for the output before it; NOTHING_SEEN for the first.
        """
        now = time.perf_counter()
        samples, tokens = len(output.outputs), 0
        for completion in output.outputs:
            tokens += len(completion.token_ids)
        if before.tokens:  # every sample gains one token per interval
            new = tokens - before.tokens
            for _ in range(new // samples):
                self._between.observe((now - before.time) * samples / new)
        elif output.metrics.time_to_first_token is not None:
            self._first.observe(output.metrics.time_to_first_token)
        if output.finished:
            self._prompts.observe(len(output.prompt_token_ids))
            self._outputs.observe(tokens)
            if output.metrics.time is not None:
                self._whole.observe(output.metrics.time)
        return RequestTimes(now, tokens)

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)
