"""Names under which dashboards of other servers expect the metrics of this one.

Sources: https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-metrics and
https://docs.vllm.ai/en/latest/usage/metrics.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

_GEN_AI = {
    "interposer_generation_seconds": "gen_ai_server_request_duration_seconds",
    "interposer_time_to_first_token_seconds": "gen_ai_server_time_to_first_token_seconds",
    "interposer_time_per_output_token_seconds": "gen_ai_server_time_per_output_token_seconds",
}
_VLLM = {
    "interposer_sequences_running": "vllm:num_requests_running",
    "interposer_sequences_waiting": "vllm:num_requests_waiting",
    "interposer_cache_usage": "vllm:kv_cache_usage_perc",
    "interposer_prompt_tokens": "vllm:prompt_tokens",
    "interposer_generated_tokens": "vllm:generation_tokens",
    "interposer_time_to_first_token_seconds": "vllm:time_to_first_token_seconds",
    "interposer_time_per_output_token_seconds": "vllm:inter_token_latency_seconds",
    "interposer_generation_seconds": "vllm:e2e_request_latency_seconds",
    "interposer_queue_seconds": "vllm:request_queue_time_seconds",
}


class RenamedMetrics(Collector):
    """The metrics of a registry under the names of OpenTelemetry's conventions and of vLLM."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._names = (_GEN_AI, "gen_ai_request_model"), (_VLLM, "model_name")

    def collect(self) -> Iterator[Metric]:
        """Yield each metric that has another name, with the usual label for the model."""
        metrics = [*self._registry.collect()]
        for names, label in self._names:
            for metric in metrics:
                if metric.name in names:
                    yield _renamed(metric, names[metric.name], label)


def _renamed(metric: Metric, name: str, model_label: str) -> Metric:
    renamed = Metric(name, metric.documentation, metric.type)
    for sample in metric.samples:
        # A sample adds a suffix such as "_total" or "_bucket" to the name of the metric.
        sample_name = name + sample.name.removeprefix(metric.name)
        labels = {**sample.labels}
        labels[model_label] = labels.pop("model")
        renamed.samples.append(Sample(sample_name, labels, sample.value, sample.timestamp))
    return renamed
