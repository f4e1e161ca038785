"""What Prometheus scrapes: counters and histograms of what was served, and what the cache says of itself.

The cache is asked when it is scraped, in the engine's thread; everything else is counted in the event loop.
"""

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from bough.engine.engine import Engine
from bough.engine.request import Handle

FIRST = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)  # seconds
BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
USAGE = {
    "prompt_tokens": "Tokens of prompts that were asked about",
    "matched_tokens": "Prompt tokens that the cache knew",
    "cached_tokens": "Prompt tokens that were not computed, because the cache had their state",
    "completion_tokens": "Tokens written",
    "drafted_tokens": "Tokens that a drafter guessed",
    "accepted_tokens": "Drafted tokens that the model would have written itself",
}
# Why prompt tokens that the cache knew were computed all the same, and its counters of them.
LOST = {"no_resume_point": "matched_tokens_without_resume_point", "evicted": "evicted_tokens_asked_for"}


class Metrics:
    """The metrics of one server."""

    def __init__(self, engine: Engine, name: str) -> None:
        self.registry = CollectorRegistry()
        waiting = Gauge("bough_requests_waiting", "Requests that wait for their turn", registry=self.registry)
        waiting.set_function(lambda: engine.busy[0])
        running = Gauge("bough_requests_running", "Requests that are being worked on", registry=self.registry)
        running.set_function(lambda: engine.busy[1])
        self._ended = Counter(
            "bough_requests", "Requests that ended, by the reason", ["finish_reason"], registry=self.registry
        )
        self._answers = Counter(
            "bough_http_requests", "HTTP requests", ["method", "path", "status"], registry=self.registry
        )
        self._tokens = {name: Counter(f"bough_{name}", about, registry=self.registry) for name, about in USAGE.items()}
        self._first = Histogram(
            "bough_time_to_first_token_seconds",
            "From a request's arrival to its first token",
            buckets=FIRST,
            registry=self.registry,
        )
        self._between = Histogram(
            "bough_inter_token_latency_seconds",
            "From one token of a request to its next",
            buckets=BETWEEN,
            registry=self.registry,
        )
        Info("bough_model", "The model that is served", registry=self.registry).info({"name": name})
        self.registry.register(_CacheMetrics(engine))

    def token(self, since: float, now: float, is_first: bool) -> None:
        """A token came, so long after the one before it; or after the request, if it is the first."""
        (self._first if is_first else self._between).observe(now - since)

    def ended(self, handle: Handle) -> None:
        try:
            output = handle.result()
        except Exception:  # noqa: BLE001 (whoever waits for the request is told)
            self._ended.labels("error").inc()
            return
        self._ended.labels(output.finish_reason).inc()
        for name, counter in self._tokens.items():
            counter.inc(getattr(output.usage, name))

    def answered(self, method: str, path: str, status: int) -> None:
        self._answers.labels(method, path, status).inc()

    def text(self) -> bytes:
        return generate_latest(self.registry)


class _CacheMetrics(Collector):
    """The counters of the cache, and the bytes that its tiers hold."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def describe(self) -> list[Metric]:
        return []  # so that registering asks nothing of the engine

    def collect(self) -> Iterator[Metric]:
        stats: dict[str, Any] = self._engine.cache.stats()
        used = GaugeMetricFamily("bough_cache_used_bytes", "Bytes of state that a tier holds", labels=["tier"])
        size = GaugeMetricFamily("bough_cache_size_bytes", "Bytes of state that a tier may hold", labels=["tier"])
        for tier, held in stats.pop("bytes").items():
            used.add_metric([tier], held["used"])
            size.add_metric([tier], held["of"])
        nodes = GaugeMetricFamily("bough_cache_nodes", "Nodes of the tree of token paths")
        nodes.add_metric([], stats.pop("nodes"))
        lost = CounterMetricFamily(
            "bough_lost_tokens", "Prompt tokens that the cache knew, and that were computed again", labels=["reason"]
        )
        for reason, name in LOST.items():
            lost.add_metric([reason], stats.pop(name, 0))
        events = CounterMetricFamily("bough_cache_events", "What happened in the cache", labels=["event"])
        for name, value in stats.items():
            if name not in ("requests", *USAGE):  # those are counted above
                events.add_metric([name], value)
        yield from (used, size, nodes, lost, events)
