"""Runs models on vLLM in this process and prints what each generated, as a line of JSON.

Arguments: a JSON list of runs, each with ``model``, arguments of ``vllm.LLM`` under ``options``,
``prompts`` of token ids, and ``tokens`` to generate. The prompts run one by one, and as a batch.
``adapter``, the folder of one, makes them run by that as well. ``scored`` are token ids whose log
probabilities are asked for. With ``held``, the bytes of all weights are counted.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_HUB_OFFLINE": "1",
}


def run(
    llm: Any, prompts: list[list[int]], together: bool, tokens: int, adapter: Any = None
) -> list[list[int]]:
    import vllm

    params = vllm.SamplingParams(
        temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False
    )
    batches = [prompts] if together else [[prompt] for prompt in prompts]
    return [
        list(output.outputs[0].token_ids)
        for batch in batches
        for output in llm.generate(
            [{"prompt_token_ids": ids} for ids in batch],
            params,
            use_tqdm=False,
            lora_request=adapter,
        )
    ]


def score(llm: Any, prompt: list[int]) -> list[float]:
    """Return the log probabilities of all tokens of a prompt but the first."""
    import vllm

    params = vllm.SamplingParams(max_tokens=1, prompt_logprobs=1, detokenize=False)
    (output,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    logprobs = output.prompt_logprobs
    return [logprobs[at][token].logprob for at, token in enumerate(prompt) if at]


def held_bytes(model: Any) -> int:
    """Return the bytes of all weights and of what kernels hold instead, shared ones once."""
    import torch
    from torch.utils import _pytree as pytree

    leaves: list[Any] = list(model.parameters())
    for module in model.modules():
        method = vars(getattr(module, "quant_method", None) or object)
        kernels = [method[name] for name in ("matmul", "lookup") if name in method]
        kernels += [method["adoption"].kernel] if "adoption" in method else []
        leaves += pytree.tree_leaves([kernel.operands for kernel in kernels])
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
        result: dict[str, Any] = {"alone": alone, "batch": batch}
        if "adapter" in asked:
            from vllm.lora.request import LoRARequest

            request = LoRARequest("adapter", 1, asked["adapter"])
            result["adapted"] = run(llm, asked["prompts"], True, asked["tokens"], request)
            result["bare"] = run(llm, asked["prompts"], True, asked["tokens"])
        if "scored" in asked:
            result["scores"] = score(llm, asked["scored"])
        if "held" in asked:
            (result["held_bytes"],) = llm.apply_model(held_bytes)
    except Exception as error:  # noqa: BLE001 - whatever stops a run is its result
        return {"error": repr(error)}
    finally:
        cleanup_dist_env_and_memory()
    if "interposer_vllm._session" in sys.modules:
        from interposer_vllm._report import Report
        from interposer_vllm._session import session

        result["report"] = json.loads(Report.of(session()).to_json())
    return result


def main() -> None:
    # Behind all else, so that plugins there register last.
    sys.path += filter(None, os.environ.get("LAST_PATH", "").split(os.pathsep))
    for asked in json.loads(sys.argv[1]):
        print("RESULT" + json.dumps(attempt(asked)), flush=True)


if __name__ == "__main__":
    main()
