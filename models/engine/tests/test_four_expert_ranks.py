"""Mixtures whose experts are whole on four ranks, three of which this process starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from models.engine.tests.test_expert_parallel import SMALL, check
from models.tests.family_checkpoints import family_configs, write_family

from interposer_engine import ExpertParallel, launched, load

# Of each form in which checkpoints store experts, with kv heads and sizes that four ranks share.
FAMILIES = ("deepseek_v3", "gpt_oss", "llama4", "mixtral", "qwen2_moe", "qwen3_moe")


@pytest.mark.process
@pytest.mark.slow
def test_four_ranks_give_the_tokens_of_one_process(tmp_path: Path) -> None:
    configs: dict[str, dict[str, Any]] = {}
    for name, config in family_configs():
        configs.setdefault(name.partition("-")[0], config)
    with launched(4) as loads:
        for family in FAMILIES:
            path = write_family(tmp_path / family, configs[family])
            alone = load(path, **SMALL)
            for settings in (True, ExpertParallel(3, 1), ExpertParallel(2, 8)):
                lm: Any = loads(path, expert_parallel=settings, **SMALL)
                check(lm, alone)
                lm.rebalance_experts()
                check(lm, alone)
