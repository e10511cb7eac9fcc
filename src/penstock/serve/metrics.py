"""The `/metrics` page in Prometheus format; metrics are defined in `obs/metric_names.py`."""

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from penstock.engine.stats import Stats
from penstock.obs.metric_names import SERVING

_TO_FIRST_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_BETWEEN_S = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
_WHOLE_S = (0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0, 300.0, 600.0)


class Metrics:
    """Metrics of one server, in a registry of their own, so that several servers fit in one process.

    Args:
        stats: returns the engine's statistics; called at each scrape.
    """

    def __init__(self, stats: Callable[[], Stats]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineNumbers(stats))
        self._requests = self._counter("penstock_requests", ("route", "status"))
        self._first = self._histogram("penstock_time_to_first_token_seconds", _TO_FIRST_S)
        self._between = self._histogram("penstock_inter_token_seconds", _BETWEEN_S)
        self._whole = self._histogram("penstock_request_seconds", _WHOLE_S)

    def request(self, *, route: str, status: int, seconds: float) -> None:
        """Count a completed request."""
        self._requests.labels(route, str(status)).inc()
        if route.startswith("/v1/"):
            self._whole.observe(seconds)

    def first_token(self, seconds: float) -> None:
        """Record the time to the first token of an answer."""
        self._first.observe(seconds)

    def next_tokens(self, seconds: float, num_tokens: int) -> None:
        """Record the time since the previous tokens of an answer, for tokens that came together."""
        for _ in range(num_tokens):  # several only with accepted drafts
            self._between.observe(seconds / num_tokens)

    def text(self) -> bytes:
        """Return the page in the text format."""
        return generate_latest(self._registry)

    def _counter(self, name: str, labels: tuple[str, ...]) -> Counter:
        return Counter(name, SERVING[name][1], labels, registry=self._registry)

    def _histogram(self, name: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, SERVING[name][1], buckets=buckets, registry=self._registry)


class _EngineNumbers(Collector):
    """Reads the engine's statistics at each scrape."""

    def __init__(self, stats: Callable[[], Stats]) -> None:
        self._stats = stats

    def describe(self) -> Iterator[Metric]:
        """Return nothing, so that registering does not query the engine."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """Return gauges and counters of the engine."""
        stats = self._stats()
        counts = stats.counts
        for name, value in (
            ("penstock_answers_waiting", stats.waiting),
            ("penstock_answers_running", stats.running),
            ("penstock_cache_blocks", stats.num_blocks),
            ("penstock_cache_blocks_used", stats.used_blocks),
            # The Gateway API inference extension chooses a server by these, and so do llm-d and KServe.
            ("vllm:num_requests_waiting", stats.waiting),
            ("vllm:num_requests_running", stats.running),
            ("vllm:kv_cache_usage_perc", stats.used_blocks / max(1, stats.num_blocks)),
        ):
            yield GaugeMetricFamily(name, SERVING[name][1], value)
        for name, value in (
            ("penstock_computed_tokens", counts.tokens),
            ("penstock_answer_tokens", counts.sampled),
            ("penstock_prefix_asked_tokens", stats.prefix_asked),
            ("penstock_prefix_found_tokens", stats.prefix_found),
            ("penstock_preemptions", stats.preemptions),
            ("penstock_drafted_tokens", counts.drafts),
            ("penstock_accepted_tokens", counts.drafts_accepted),
            ("penstock_steps", counts.steps),
            ("penstock_failed_steps", counts.failed_steps),
        ):
            yield CounterMetricFamily(name, SERVING[name][1], value)
