"""Models of all families, computed by two and by four processes that exchange sums over gloo."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from models.tests.family_checkpoints import family_configs, write_family
from models.tests.rank_families import ADAPTER
from tests.adapter_files import write_adapter
from tests.forks import forks

from interposer_models._families.examples import SIZES

WORKER = Path(__file__).with_name("rank_families.py")
SIZE = 4
ADAPTED = "llama"
# Latent attention with experts, fused weights and plain ones; the other families are among the slow
# tests, as they take two minutes.
QUICK = ("deepseek_v3", "gpt2", "llama")
# Encoder and decoder share one table with the head.
WHOLE_TABLES = ("bart", "mbart")
# float32: each logit is a sum of some hundred products, and each of six sums over ranks in a model
# of three blocks is rounded once more; log probabilities differ by twice as much as logits.
BOUND = 2e-4


def one_of_each() -> dict[str, dict[str, Any]]:
    """Return one configuration of each family."""
    found: dict[str, dict[str, Any]] = {}
    for name, config in family_configs():
        found.setdefault(name.partition("-")[0], config)
    return found


@pytest.fixture(scope="module")
def told(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> list[dict[str, dict[str, Any]]]:
    """What each process said of each family that is asked for, by the number of ranks."""
    root = tmp_path_factory.mktemp("families")
    out = tmp_path_factory.mktemp("told")
    here = [item for item in request.session.items if item.path == request.path]
    wanted = {ADAPTED} | {item.callspec.params["family"] for item in here}  # type: ignore[attr-defined]
    for name, config in one_of_each().items():
        if name in wanted:
            write_family(root / name, config)
    hidden, inner = SIZES["hidden_size"], SIZES["intermediate_size"]
    block = "model.layers.0"
    modules = {
        f"{block}.self_attn.o_proj": (hidden, hidden),
        f"{block}.self_attn.q_proj": (hidden, hidden),
        f"{block}.mlp.up_proj": (inner, hidden),
        f"{block}.mlp.down_proj": (hidden, inner),
        "lm_head": (SIZES["vocab_size"], hidden),
    }
    write_adapter(root / ADAPTED / ADAPTER, modules)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    running = [
        subprocess.Popen(
            forks().command(WORKER, str(rank), str(SIZE), root, out),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            text=True,
        )
        for rank in range(SIZE)
    ]
    texts = [process.communicate()[0] for process in running]
    assert [process.returncode for process in running] == [0] * SIZE, "\n".join(texts)
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(SIZE)]


@pytest.mark.process
@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow])
        for name in sorted(one_of_each())
    ],
)
def test_ranks_give_the_tokens_of_one_process(
    told: list[dict[str, dict[str, Any]]], family: str
) -> None:
    by_size: dict[str, list[dict[str, Any]]] = {}
    for of_rank in told:
        for size, answer in of_rank[family].items():
            by_size.setdefault(size, []).append(answer)
    (alone,) = by_size.pop("1")
    assert by_size
    for size, answers in by_size.items():
        assert len(answers) == int(size)
        for answer in answers:
            assert answer["tokens"] == alone["tokens"]
            # Every rank draws from the same bits.
            assert answer["logprobs"] == answers[0]["logprobs"]
            assert answer["logprobs"] == pytest.approx(alone["logprobs"], abs=BOUND)
            assert ("vocabulary" in answer["shards"]) == (family not in WHOLE_TABLES)
            assert answer["adapted"] == pytest.approx(alone["adapted"], abs=BOUND)
            assert bool(answer["adapted"]) == (family == ADAPTED)
            assert not answer["adapted"] or answer["adapted"] != answer["logprobs"]
