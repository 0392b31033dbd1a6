"""What Prometheus can ask for. With several workers each writes its own files, which are added up when asked."""

from __future__ import annotations

import os
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

__all__ = ["METRICS_TYPE", "Metrics"]

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SHARED_FOLDER = "PROMETHEUS_MULTIPROC_DIR"
_SECONDS = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)


class Metrics:
    """The counters of a server, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        made: dict[str, Any] = {"registry": self.registry}
        self.requests = Counter("urank_requests", "Requests.", ["route", "status"], **made)
        self.seconds = Histogram(
            "urank_request_seconds", "Time from request to answer.", ["route"], buckets=_SECONDS, **made
        )
        self.model_seconds = Histogram("urank_model_seconds", "Time in the models.", buckets=_SECONDS, **made)
        self.log_seconds = Histogram(
            "urank_log_seconds", "Time until a ranking or a click was durable.", buckets=_SECONDS, **made
        )
        self.lists = Counter("urank_lists", "Lists ranked.", ["arm", "explored"], **made)
        self.candidates = Counter("urank_candidates", "Candidates ranked.", **made)
        self.utility = Counter("urank_expected_utility", "Utility that is expected of the lists.", ["arm"], **made)
        self.events = Counter("urank_feedback_events", "Events that were accepted.", ["kind"], **made)
        self.reloads = Counter("urank_reloads", "Attempts to load models anew.", ["result"], **made)
        self.shadow = Counter("urank_shadow_lists", "Lists that the silent model ranked too.", ["result"], **made)
        self.model = Gauge(
            "urank_model_info", "The models in use.", ["role", "version"], multiprocess_mode="livemostrecent", **made
        )

    def text(self) -> bytes:
        """All of it, as Prometheus reads it."""
        if SHARED_FOLDER not in os.environ:
            return bytes(generate_latest(self.registry))
        registry = CollectorRegistry()
        MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        return bytes(generate_latest(registry))
