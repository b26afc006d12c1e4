"""Greedy tokens of an engine in this process, as JSON: ``python generation.py MODEL FACTS``.

FACTS is JSON: ``engine``, arguments of vLLM's engine, and ``prompts``, lists of tokens by name of a
run. Runs follow each other on one engine; the prompts of a run are one batch.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

__all__ = ["run"]


def run(model: str, engine: dict[str, Any], prompts: dict[str, Any], count: int) -> dict[str, Any]:
    """Return the tokens by run, and what was taken over."""
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    import vllm

    llm: Any = vllm.LLM(
        model=model, dtype="float32", skip_tokenizer_init=True, enforce_eager=True, **engine
    )
    params = vllm.SamplingParams(
        temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False
    )
    tokens = {
        name: [
            list(output.outputs[0].token_ids)
            for output in llm.generate(
                [{"prompt_token_ids": prompt} for prompt in batch], params, use_tqdm=False
            )
        ]
        for name, batch in prompts.items()
    }
    found: dict[str, Any] = {"tokens": tokens, "taken": [], "kept": {}}
    if os.environ.get("VLLM_PLUGINS") != "":
        from interposer_vllm._session import session

        found |= {"taken": session().taken, "kept": session().kept}
    return found


if __name__ == "__main__":
    facts = json.loads(sys.argv[2])
    result = run(sys.argv[1], facts["engine"], facts["prompts"], facts["count"])
    print("RESULT", json.dumps(result))
