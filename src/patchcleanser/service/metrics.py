"""What Prometheus is told; every app has its own registry, so that several can live in one process."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.process_collector import ProcessCollector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


class Metrics:
    """Counters and histograms. Labels take few values: routes and not addresses, codes and not messages."""

    def __init__(self, queue: Callable[[], float]) -> None:
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self.requests = Counter(
            "patchcleanser_requests", "Requests by route and status.", ["route", "method", "status"], registry=registry
        )
        self.seconds = Histogram(
            "patchcleanser_request_seconds", "From first byte to answer.", ["route"], buckets=SECONDS, registry=registry
        )
        self.problems = Counter("patchcleanser_problems", "Errors by code.", ["code"], registry=registry)
        self.verdicts = Counter(
            "patchcleanser_verdicts", "Predictions by how they came about.", ["case"], registry=registry
        )
        self.certificates = Counter(
            "patchcleanser_certificates", "Images sent to be certified.", ["certified"], registry=registry
        )
        self.batches = Histogram(
            "patchcleanser_batch_labels", "Labels computed in one batch.", buckets=SIZES, registry=registry
        )
        self.together = Histogram(
            "patchcleanser_batch_images", "Images in one batch.", buckets=SIZES[:9], registry=registry
        )
        self.model_seconds = Counter("patchcleanser_model_seconds", "Time the model was at work.", registry=registry)
        Gauge("patchcleanser_queue_images", "Images accepted and not answered yet.", registry=registry).set_function(
            queue
        )

    def batch(self, images: int, labels: int, seconds: float) -> None:
        """Note one batch of the worker."""
        self.together.observe(images)
        self.batches.observe(labels)
        self.model_seconds.inc(seconds)

    def text(self) -> bytes:
        """All of it, in Prometheus' words."""
        return generate_latest(self.registry)
