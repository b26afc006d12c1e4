"""Runs models on vLLM in this process and prints what they generated, as JSON.

Arguments: a JSON list of runs, each with ``model``, arguments of ``vllm.LLM`` under ``options``,
``prompts`` of token ids, ``together``: whether they are one batch, and ``tokens`` to generate.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_HUB_OFFLINE": "1",
}


def run(llm: Any, prompts: list[list[int]], together: bool, tokens: int) -> list[list[int]]:
    import vllm

    params = vllm.SamplingParams(
        temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False
    )
    batches = [prompts] if together else [[prompt] for prompt in prompts]
    return [
        list(output.outputs[0].token_ids)
        for batch in batches
        for output in llm.generate(
            [{"prompt_token_ids": ids} for ids in batch], params, use_tqdm=False
        )
    ]


def held_bytes(model: Any) -> int:
    """Return the bytes of all weights and of what kernels hold instead, shared ones once."""
    import torch
    from torch.utils import _pytree as pytree

    leaves: list[Any] = list(model.parameters())
    for module in model.modules():
        method = vars(getattr(module, "quant_method", None) or object)
        holders = (method.get(name) for name in ("adoption", "product", "lookup"))
        leaves += pytree.tree_leaves([holder.operands for holder in holders if holder])
    strided = [t for t in leaves if getattr(t, "layout", None) == torch.strided]
    return sum({t.data_ptr(): t.nbytes for t in strided}.values())


def attempt(asked: dict[str, Any]) -> dict[str, Any]:
    import vllm
    from vllm.distributed import cleanup_dist_env_and_memory

    if "interposer_vllm._session" in sys.modules:
        from interposer_vllm._session import closed_session

        # That of the model before this one ends, and with it its report.
        with closed_session():
            pass
    options = {
        "skip_tokenizer_init": True,
        "max_num_seqs": 4,
        "max_model_len": 512,
        "max_num_batched_tokens": 512,
        "enable_prefix_caching": False,
        **asked["options"],
    }
    try:
        llm = vllm.LLM(model=asked["model"], **options)
        alone, batch = (
            run(llm, asked["prompts"], together, asked["tokens"]) for together in (False, True)
        )
    except Exception as error:  # noqa: BLE001 - whatever stops a run is its result
        return {"error": repr(error)}
    finally:
        cleanup_dist_env_and_memory()
    result: dict[str, Any] = {"alone": alone, "batch": batch}
    (result["held_bytes"],) = llm.apply_model(held_bytes)
    if "interposer_vllm._session" in sys.modules:
        from interposer_vllm._report import Report
        from interposer_vllm._session import session

        result["report"] = json.loads(Report.of(session()).to_json())
    return result


def main() -> None:
    print("RESULT" + json.dumps([attempt(asked) for asked in json.loads(sys.argv[1])]))


if __name__ == "__main__":
    main()
