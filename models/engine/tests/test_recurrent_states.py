"""States of sequences in the engine: their rows, what becomes of them, and what they cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from models.conftest import write_checkpoint
from models.tests.family_checkpoints import examples
from transformers import Lfm2Config, Mamba2Config, NemotronHConfig

from interposer import AttentionBatch, Config, current_registry, explain
from interposer.errors import CheckpointError, ConfigError, MissingMemberError
from interposer.records import ModelEntry, load_target
from interposer_engine import LanguageModel, SamplingParams, load, quantize
from interposer_engine._batch import StepBatch
from interposer_engine._graphs import Bucket, GraphBatch
from interposer_engine._pages import PagePool
from interposer_engine._scheduler import Chunk
from interposer_engine._sequence import TokenSequence
from interposer_ops.layers.states import StateBatch, StateLayout

PROMPTS = [[3, 1, 4, 1, 5], [9, 2], list(range(40)), [7] * 23]


def fields_of(parts: Mapping[str, Any]) -> dict[str, Any]:
    return {**parts, "vocab_size": 256, "architectures": None}


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with convolutions and attention."""
    path = tmp_path_factory.mktemp("lfm2")
    write_checkpoint(Lfm2Config(**fields_of(examples.lfm2()["mixed"])), path)
    return path


@pytest.fixture(scope="module")
def spaces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of state spaces alone."""
    path = tmp_path_factory.mktemp("mamba2")
    write_checkpoint(Mamba2Config(**fields_of(examples.mamba2()["grouped"])), path)
    return path


def tokens(lm: LanguageModel, prompts: list[list[int]], count: int = 12) -> list[list[int]]:
    answers = lm.generate(prompts, temperature=0.0, max_new_tokens=count, ignore_eos=True)
    return [list(answer.token_ids) for answer in answers]


@pytest.mark.landing(1)
@pytest.mark.parametrize("name", ["mixed", "spaces"])
def test_any_schedule_gives_the_same_tokens(name: str, request: pytest.FixtureRequest) -> None:
    """Alone, in batches, in chunks of a prompt, and where some give up what they hold."""
    folder = request.getfixturevalue(name)
    usual: dict[str, Any] = {"dtype": "float32", "max_sequences": 4, "cache_tokens": 1024}
    expected = [tokens(load(folder, **usual), [prompt])[0] for prompt in PROMPTS]
    assert tokens(load(folder, **usual), PROMPTS) == expected
    in_chunks = load(folder, **{**usual, "max_step_tokens": 5})
    assert tokens(in_chunks, PROMPTS) == expected
    assert tokens(in_chunks, PROMPTS) == expected  # rows of the first ones are used again
    crowded = load(folder, **{**usual, "cache_tokens": 64, "max_sequences": 3})
    assert tokens(crowded, PROMPTS) == expected
    assert tokens(load(folder, **{**usual, "max_sequences": 1}), PROMPTS) == expected


def test_state_rows_are_freed(mixed: Path) -> None:
    lm = load(mixed, dtype="float32", max_sequences=2, cache_tokens=256)
    engine = lm.engine
    first = engine.add([1, 2, 3], lm_params(4))
    second = engine.add([4, 5], lm_params(4))
    third = engine.add([6], lm_params(4))
    engine.step()
    assert (first.state_slot, second.state_slot, third.state_slot) == (0, 1, -1)
    logits = engine.logits([1, 2])  # has a row of its own, though all sequences run
    engine.cancel(first)
    engine.step()
    assert (first.state_slot, third.state_slot) == (-1, 0)
    while engine.busy:
        engine.step()
    assert torch.equal(engine.logits([1, 2]), logits)
    assert sorted(engine.pool.take_slot() for _ in range(3)) == [0, 1, 2]
    assert engine.pool.take_slot() == -1


def lm_params(count: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_new_tokens=count, ignore_eos=True)


def test_states_count_in_the_memory_budget(spaces: Path, mixed: Path) -> None:
    lm = load(spaces, dtype="float32", max_sequences=3)
    (budget,) = [note for note in lm.resolver.notes if "recurrent states" in note]
    layouts = [layer.state_layout() for layer in lm.engine.model.state_layers]
    # 192 channels with 3 former inputs, and 8 heads of 16 x 16, of 3 sequences and one call.
    assert [layout.slot_bytes() for layout in layouts] == [4 * (192 * 3 + 8 * 16 * 16)] * 3
    assert lm.engine.runner.cache_bytes == 4 * sum(layout.slot_bytes() for layout in layouts)
    assert "0.0 MiB, beside 0.1 MiB of recurrent states" in budget
    with pytest.raises(ConfigError, match=r"recurrent states take .* smaller max_sequences"):
        load(spaces, max_sequences=2**40, cache_tokens=16)
    with pytest.raises(ConfigError, match=r"cache_tokens is \d+, the free memory holds"):
        load(mixed, cache_tokens=2**40)


def test_blocks_with_states_are_calibrated(mixed: Path, tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text(str(list(range(400))))
    result = quantize(mixed, tmp_path / "out", "int8", calibrate=text)
    smaller = load(result.path, dtype="float32", cache_tokens=256)
    assert "kernel 'int8_linear'" in str(explain(smaller))
    assert smaller.logits([1, 2, 3]).isfinite().all()


@pytest.mark.slow
def test_steps_without_attention_are_compiled(spaces: Path) -> None:
    plain = load(spaces, dtype="float32", cache_tokens=256)
    compiled = load(spaces, dtype="float32", cache_tokens=256, config=Config(compile="eager"))
    assert tokens(compiled, PROMPTS[:2], 4) == tokens(plain, PROMPTS[:2], 4)


def test_a_layout_gives_rows_of_each_part() -> None:
    layout = StateLayout((((3, 2), torch.bfloat16), ((4,), torch.float32)))
    assert layout.slot_bytes() == 28
    allocated: list[tuple[int, ...]] = []

    def empty(shape: Any, dtype: torch.dtype, device: str) -> torch.Tensor:
        allocated.append(tuple(shape))
        return torch.empty(shape, dtype=dtype, device=device)

    parts = layout.allocate(5, "cpu", empty)
    assert [part.shape for part in parts] == allocated == [(5, 3, 2), (5, 4)]
    assert [part.dtype for part in parts] == [torch.bfloat16, torch.float32]


def batch(slots: list[int] | None, host: AttentionBatch | None = None) -> AttentionBatch:
    return AttentionBatch(
        query_starts=torch.tensor([0, 3, 4]),
        seq_lens=torch.tensor([3, 9]),
        page_table=torch.tensor([[0], [1]]),
        slots=torch.arange(4),
        max_query_tokens=3,
        max_seq_tokens=9,
        state_slots=None if slots is None else torch.tensor(slots),
        host=host,
    )


def test_a_batch_states_the_cached_tokens() -> None:
    host = batch([1, 0])
    states = StateBatch.of(batch([1, 0], host))
    assert states.num_cached.tolist() == [0, 8]
    assert states.slots.tolist() == [1, 0]
    assert states.host is not None
    assert states.on_host().slots.data_ptr() == host.state_slots.data_ptr()  # type: ignore[union-attr]
    with pytest.raises(MissingMemberError, match="no slots of recurrent states"):
        StateBatch.of(batch(None))


def test_padding_rows_of_a_graph_have_no_state(build_step: Callable[..., Any]) -> None:
    graph_batch = GraphBatch(Bucket(4, 2), 16, [range(8, 9)], "cpu", with_states=True)
    assert graph_batch.step.attention.state_slots is not None
    assert graph_batch.step.attention.state_slots.tolist() == [-1] * 4
    for slots in ([5, 3, 2], [4]):
        assert graph_batch.fill(build_step(slots)) == len(slots)
        assert graph_batch.step.attention.state_slots.tolist() == [*slots, *[-1] * (4 - len(slots))]


@pytest.fixture
def build_step() -> Callable[..., Any]:
    def build(slots: list[int]) -> StepBatch:
        chunks = []
        for index, slot in enumerate(slots):
            sequence = TokenSequence(
                index, [1, 2], lm_params(1), 0, num_computed=1, pages=[[index]]
            )
            sequence.state_slot = slot
            chunks.append(Chunk(sequence, 1))
        return StepBatch.build(chunks, 16, "cpu", with_states=True)

    return build


@given(st.lists(st.integers(1, 9), max_size=30), st.integers(0, 40))
@settings(suppress_health_check=[HealthCheck.too_slow])
def test_pages_are_allocated_lowest_first(counts: list[int], num_pages: int) -> None:
    """Whatever came back before, and each to one holder."""
    pool, pages_of = PagePool(num_pages, 4), [list[int]() for _ in counts]
    for index, (pages, count) in enumerate(zip(pages_of, counts, strict=True)):
        free = set(range(num_pages)) - {page for owned in pages_of for page in owned}
        got = pool.extend(pages, 4 * count)
        assert got == (count <= len(free))
        assert pages == (sorted(free)[:count] if got else [])
        if index % 3 == 2:
            pool.release(pages_of[index - 1])
    assert pool.num_free == num_pages - sum(map(len, pages_of))


@pytest.mark.parametrize(
    ("name", "label", "changes", "message"),
    [
        ("mamba2", "grouped", {"n_groups": 3}, "num_heads 8 is not a multiple of n_groups 3"),
        ("mamba2", "grouped", {"expand": 3}, "times expand 3 is not num_heads 8"),
        ("mamba2", "grouped", {"state_size": 2**23}, "exceeds the limit of 268435456 elements"),
        ("mamba2", "grouped", {"conv_kernel": 9}, "conv_kernel"),
        ("mamba2", "grouped", {"hidden_act": "gelu"}, "convolutions compute with 'silu'"),
        ("lfm2", "mixed", {"layer_types": ["conv"]}, "layer_types has 1 of 3 layers"),
        ("lfm2", "mixed", {"conv_L_cache": 1}, "conv_L_cache"),
        ("bamba", "middle", {"mamba_d_head": 7}, "mamba_n_heads 8 times mamba_d_head 7"),
        ("bamba", "middle", {"mamba_n_groups": 3}, "not a multiple of mamba_n_groups 3"),
        ("falcon_h1", "plain", {"mamba_d_ssm": 97}, "the state's width 97"),
        ("nemotron_h", "kinds", {"n_groups": 3}, "mamba_num_heads 8 is not a multiple"),
        ("nemotron_h", "kinds", {"layers_block_type": ["mlp"]}, "has 1 of 4 layers"),
        (
            "nemotron_h",
            "experts",
            {"mlp_hidden_act": "silu"},
            "experts without a gate have 'relu2'",
        ),
        ("nemotron_h", "experts", {"n_group": 3}, "8 experts are not 3 groups"),
        ("nemotron_h", "experts", {"topk_group": 2}, "topk_group 2 exceeds n_group 1"),
        ("nemotron_h", "latent", {"num_experts_per_tok": 5}, "5 exceeds the experts of 1 groups"),
        (
            "nemotron_h",
            "latent",
            {"n_routed_experts": 2**14, "moe_intermediate_size": 2**24, "moe_latent_size": 2**14},
            "exceed the limit of 281474976710656 elements",
        ),
        ("nemotron_h", "kinds", {"layers_block_type": None}, "layers_block_type"),
        ("qwen3_5", "usual", {"linear_num_value_heads": 3}, "not a multiple of linear_num_key"),
        (
            "qwen3_5",
            "usual",
            {"linear_key_head_dim": 2**24},
            "exceeds the limit of 268435456 elements",
        ),
    ],
)
def test_impossible_states_are_refused(
    name: str, label: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        family(name).parse({**getattr(examples, name)()[label], **changes}, "config.json")


def test_a_pattern_names_the_layers() -> None:
    """As older checkpoints do."""
    fields = {**examples.nemotron_h()["kinds"], "hybrid_override_pattern": "M-*E"}
    del fields["layers_block_type"]
    kinds = family("nemotron_h").parse(fields, "config.json").layers_block_type
    assert kinds == ("mamba", "mlp", "attention", "moe")


def test_experts_without_a_gate_are_quantized(tmp_path: Path) -> None:
    write_checkpoint(NemotronHConfig(**fields_of(examples.nemotron_h()["experts"])), tmp_path)
    expected = load(tmp_path, dtype="float32").logits(PROMPTS[2])
    lm = load(tmp_path, dtype="float32", quantization={"quant_method": "int8", "head": "plain"})
    errors = (lm.logits(PROMPTS[2]) - expected).norm(dim=-1) / expected.norm(dim=-1)
    # Some tokens are sent to other experts.
    assert 0 < errors.median() < 0.1
    (row,) = (row for row in explain(lm).rows if row.choice.request.name == "moe_permute")
    assert row.choice.waits
    left_out = {"quant_method": "int8", "modules_to_not_convert": [r".*\.experts"]}
    rows = explain(load(tmp_path, dtype="float32", quantization=left_out)).rows
    assert "grouped_linear" in {row.choice.request.name for row in rows}


def family(name: str) -> Any:
    entries = current_registry().records(ModelEntry)
    (target,) = [entry.target for _, entry in entries if entry.name == name]
    return load_target(target)


def test_a_decoder_with_some_blocks_keeps_their_caches_and_angles(mixed: Path) -> None:
    """A step is measured with one block of each kind."""
    lm = load(mixed, dtype="float32", cache_tokens=64)
    decoder = lm.engine.model.model
    assert decoder.cache_indices == [1, 0, 2]  # a convolution, attention, a convolution
    all_angles = decoder.angles(torch.arange(3))
    with decoder.only_blocks([1, 2]):
        assert decoder.cache_indices == [0, 1]
        assert len(decoder.layers) == 2
        assert [pair[0].tolist() for pair in decoder.angles(torch.arange(3))] == [
            pair[0].tolist() for pair in all_angles[1:]
        ]
    assert decoder.cache_indices == [1, 0, 2]
    assert len(decoder.layers) == 3
