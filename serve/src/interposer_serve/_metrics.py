"""The metrics that Prometheus reads."""

from __future__ import annotations

from typing import Any

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)
from starlette.responses import Response

from interposer_models import Generation
from interposer_serve._errors import Gone

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Metrics:
    """Figures of one server, in a registry of its own."""

    def __init__(self) -> None:
        registry = self._registry = CollectorRegistry()
        self.responses = Counter(
            "interposer_http_responses",
            "Responses, by endpoint and status; 499 stands for a client that left.",
            ("endpoint", "status"),
            registry=registry,
        )
        self._generations = Counter(
            "interposer_generations", "Generations, by how they ended.", ("end",), registry=registry
        )
        self._prompt_tokens = Counter(
            "interposer_prompt_tokens", "Tokens of prompts that were queued.", registry=registry
        )
        self._new_tokens = Counter(
            "interposer_generated_tokens", "Tokens that were generated.", registry=registry
        )
        self._queued = self._histogram("queue", "from a request to its first step")
        self._first = self._histogram("time_to_first_token", "from a request to its first token")
        self._whole = self._histogram("generation", "from a request to its last token")

    def _histogram(self, name: str, what: str) -> Histogram:
        return Histogram(
            f"interposer_{name}_seconds",
            f"Seconds {what}.",
            buckets=_SECONDS,
            registry=self._registry,
        )

    def _gauge(self, name: str, what: str, read: Any) -> None:
        Gauge(f"interposer_{name}", what, registry=self._registry).set_function(read)

    def watch(self, engine: Any) -> None:
        """Tell the state of an engine from now on."""
        scheduler, pool = engine.scheduler, engine.pool
        self._gauge("sequences_running", "Sequences in the batch.", lambda: len(scheduler.running))
        self._gauge("sequences_waiting", "Sequences in the queue.", lambda: len(scheduler.waiting))
        if (prefixes := engine.prefixes) is not None:
            self._gauge(
                "shared_prompt_tokens",
                "Tokens of prompts that were in the cache already.",
                lambda: prefixes.shared_tokens,
            )
            self._gauge(
                "looked_up_prompt_tokens",
                "Tokens of prompts that were looked up in the cache.",
                lambda: prefixes.tokens,
            )
            self._gauge(
                "evicted_prompt_pages",
                "Pages of prompts that were given up for others.",
                lambda: prefixes.evicted_pages,
            )
            self._gauge(
                "restored_prompt_pages",
                "Of these, that came back from other memory.",
                lambda: prefixes.restored_pages,
            )
        self._gauge("cache_pages", "Pages of the cache.", lambda: pool.num_pages)
        self._gauge(
            "cache_pages_held", "Pages that are held.", lambda: pool.num_pages - pool.num_free
        )
        if engine.speculation is not None:
            counts = engine.speculation.figures
            self._gauge("drafted_tokens", "Guesses so far.", lambda: counts.drafted_tokens)
            self._gauge("accepted_tokens", "Of these, taken.", lambda: counts.accepted_tokens)

    def opened(self, num_prompt_tokens: int) -> None:
        """Count a generation that was queued."""
        self._prompt_tokens.inc(num_prompt_tokens)

    def ended(self, generation: Generation) -> None:
        """Count a generation that has ended."""
        stages, error = generation.stages, generation.error
        left = "left" if isinstance(error, Gone) else "failed"
        self._generations.labels("finished" if error is None else left).inc()
        self._new_tokens.inc(generation.num_tokens)
        if stages.started:
            self._queued.observe(max(0, stages.started - stages.received) / 1e9)
        if stages.first_token:
            self._first.observe((stages.first_token - stages.received) / 1e9)
        if error is None:
            self._whole.observe((stages.ended - stages.received) / 1e9)

    def response(self) -> Response:
        """Return the figures in the text format."""
        return Response(
            generate_latest(self._registry), headers={"content-type": CONTENT_TYPE_LATEST}
        )
