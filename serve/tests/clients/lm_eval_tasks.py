"""lm-eval: scores choices by their log probabilities, and compares generated texts."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

url, model, tokenizer, folder = sys.argv[1:]
os.environ |= {"HF_HOME": folder, "HF_HUB_OFFLINE": "1", "OPENAI_API_KEY": "none"}

from lm_eval import simple_evaluate  # noqa: E402 - reads the environment

data = Path(folder, "data.json")
data.write_text(json.dumps([{"question": "hello", "choices": ["Bad day!", "Good day!"]}]))
task: dict[str, Any] = {
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": str(data)},
    "test_split": "train",
    "doc_to_text": "{{question}}",
    "target_delimiter": "",
}
choice: dict[str, Any] = {
    **task,
    "task": "choice",
    "output_type": "multiple_choice",
    "doc_to_choice": "choices",
    "doc_to_target": 1,
    "metric_list": [{"metric": "acc"}],
}
generation: dict[str, Any] = {
    **task,
    "task": "generation",
    "output_type": "generate_until",
    "doc_to_target": "{{choices[1]}}",
    "generation_kwargs": {"until": ["\n"]},
    "metric_list": [{"metric": "exact_match"}],
}


def evaluate(kind: str, path: str, tasks: list[Any], **fields: Any) -> dict[str, float]:
    arguments = {"model": model, "base_url": url + path, "tokenizer": tokenizer}
    results = simple_evaluate(kind, arguments, tasks, bootstrap_iters=0, **fields)["results"]
    return {
        f"{name} {metric.partition(',')[0]}": value
        for name, values in results.items()
        for metric, value in values.items()
        if metric in ("acc,none", "exact_match,none")
    }


completions = evaluate("local-completions", "/v1/completions", [choice, generation])
chat = evaluate(
    "local-chat-completions", "/v1/chat/completions", [generation], apply_chat_template=True
)
print(json.dumps({"completions": completions, "chat": chat}))
