"""The portable communicators, over groups of real processes and in choices."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.forks import forks
from tests.waiting import WAIT_SECONDS

from interposer import Capability, Config, Device, Ranks, Registry, Resolver, explain
from interposer.errors import NoCandidateError, RankError
from interposer.tooling import Plugins
from interposer_ops import plugin
from interposer_ops.communicators import TorchCommunicator, _group
from interposer_ops.communicators._portable import sum_of_parts

# Two ranks that say to be of two platforms, so that tensors go through the host's memory.
MIXED = """
import dataclasses, json, sys
from datetime import timedelta
import torch
import torch.distributed as dist
from interposer import Config, Ranks, Registry, Resolver, Device, Capability, current_platform
from interposer.errors import RequestError
from interposer_ops.communicators import OrderedCommunicator, TorchCommunicator

rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group(
    "gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2, timeout=timedelta(seconds=300)
)
platform = current_platform(Config(platform="cpu"))
ranks = Ranks.of(dist.group.WORLD, platform, timeout_seconds=30)

class Other:
    name = f"of{rank}"
    def provides(self, member): return True
    def distributed_backend(self): return "nccl"

mixed = Ranks.of(dist.group.WORLD, Other())
found = {
    "ranks": [ranks.rank, ranks.size, ranks.hosts, ranks.platforms, ranks.backend],
    "mixed": [mixed.platforms, mixed.backend],
    "limit": ranks.timeout_seconds,
}
communicator = TorchCommunicator(ranks, "cpu")
ordered = OrderedCommunicator(mixed, "cpu")
kinds = (torch.float8_e4m3fn, torch.int16, torch.bool)
summed = [communicator.all_reduce(torch.ones(5).to(kind)) for kind in kinds]
found["dtypes"] = [x.float().sum().item() for x in summed]
rows = torch.full((rank, 2), 3.0).to(kinds[0])
found["moved"] = communicator.all_gather(rows, [0, 1]).float().tolist()
# Above the size up to which all is gathered, and below it.
x = torch.full((50_000,), 0.1 + rank)
found["ordered"] = torch.equal(ordered.all_reduce(x.clone())[:7], ordered.all_reduce(x[:7].clone()))
errors = []
for call in (
    lambda: communicator.all_gather(torch.ones(3), [2, 3 - rank]),
    lambda: communicator.all_to_all(torch.ones(3), [3], [3]),
    lambda: communicator.reduce_scatter(torch.tensor(1.0), [1, 0]),
    lambda: communicator.broadcast(torch.ones(3), 2),
):
    try:
        call()
    except RequestError as error:
        errors.append(str(error))
found["errors"] = errors
communicator.close()
communicator.close()
try:
    communicator.all_reduce(torch.ones(3))
except RuntimeError as error:
    found["closed"] = [type(error).__name__, str(error)]
ordered.close()
print(json.dumps(found), flush=True)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def rank_results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    store = tmp_path_factory.mktemp("ranks") / "store"
    both = [
        subprocess.Popen(
            forks().command("-c", MIXED, str(rank), store),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        )
        for rank in range(2)
    ]
    try:
        ends = [process.communicate(timeout=WAIT_SECONDS) for process in both]
    finally:
        for process in both:
            process.kill()
    assert all(out for out, _ in ends), ends
    return [json.loads(out.splitlines()[-1]) for out, _ in ends]


@pytest.mark.process
def test_ranks_agree_on_their_devices(rank_results: list[dict[str, Any]]) -> None:
    for rank, facts in enumerate(rank_results):
        assert facts["ranks"] == [rank, 2, [0, 0], ["cpu", "cpu"], "gloo"]
        assert facts["mixed"] == [["of0", "of1"], "gloo"]
        assert facts["limit"] == 30


@pytest.mark.process
def test_every_dtype_is_transferred_and_summed(rank_results: list[dict[str, Any]]) -> None:
    for facts in rank_results:
        assert facts["dtypes"] == [10.0, 10.0, 5.0]
        assert facts["moved"] == [[3.0, 3.0]]


@pytest.mark.process
def test_ordered_sums_do_not_depend_on_the_size(rank_results: list[dict[str, Any]]) -> None:
    assert all(facts["ordered"] for facts in rank_results)


@pytest.mark.process
def test_wrong_rows_are_an_error_before_anything_is_sent(
    rank_results: list[dict[str, Any]],
) -> None:
    first = rank_results[0]["errors"]
    assert len(first) == 4
    assert "all_gather of [3] with rows [2, 3] on rank 0 of 2" in first[0]
    assert "all_to_all of [3] with rows [3]" in first[1]
    assert "reduce_scatter of [] with rows [1, 0]" in first[2]
    assert "broadcast from rank 2, of 2 ranks" in first[3]


@pytest.mark.process
def test_a_closed_communicator_raises_a_clear_error(rank_results: list[dict[str, Any]]) -> None:
    for rank, facts in enumerate(rank_results):
        assert facts["closed"] == ["RankError", f"Rank {rank}: the communicator is closed"]


def test_sums_are_rounded_once() -> None:
    parts = torch.tensor([256.0, 1.0, 1.0, -256.0], dtype=torch.bfloat16)[:, None]
    assert sum_of_parts(parts).tolist() == [2.0]
    assert sum_of_parts(parts.to(torch.int32)).dtype == torch.int32


def chosen(ranks: Ranks, **config: Any) -> Resolver:
    device = Device("cpu", "cpu", "test", Capability("x86_64"))
    resolver = Resolver(
        Registry(Plugins.of(plugin)), device, Config(**config), described=True, ranks=ranks
    )
    choice, communicator = resolver.communicator(
        "all_reduce", torch.bfloat16, 4096, "model.layers.0.mlp"
    )
    assert communicator is None
    assert choice in [recorded for recorded, _ in resolver.choices.values()]
    return resolver


def test_required_properties_decide_the_choice() -> None:
    ranks = Ranks(0, 2, (0, 1), ("cpu", "cuda"))
    names = []
    for required in ((), ("batch_invariant",)):
        ((choice, places),) = chosen(ranks, require=required).choices.values()
        names.append(choice.chosen.name)
        assert places == ["model.layers.0.mlp"]
        assert str(choice.request).startswith("communicator 'all_reduce'")
    assert names == ["torch", "ordered"]


def test_an_explanation_lists_the_choice_and_the_refusals() -> None:
    resolver = chosen(Ranks(0, 2, (0, 0), ("cpu", "cpu")), require=("deterministic",))
    explanation = explain(SimpleNamespace(resolver=resolver))
    text = str(explanation.why("all_reduce"))
    request = "bytes=4096 hosts=1 platforms=1 ranks=2"
    assert f"communicator 'all_reduce' [bfloat16 cpu {request}]" in text
    assert "-> ordered (interposer_ops.plugin in code): the only one accepted" in text
    assert "not torch (interposer_ops.plugin in code): does not promise deterministic" in text
    everything = str(explanation.why("broadcast"))
    assert "communicator 'broadcast'" in everything
    assert "ordered" in everything


def test_a_pin_without_a_required_property_is_refused() -> None:
    with pytest.raises(NoCandidateError, match="batch_invariant"):
        chosen(
            Ranks(0, 2, (0, 0), ("cpu", "cpu")),
            require=("batch_invariant",),
            communicators={"all_reduce": "torch"},
        )


@pytest.mark.process
def test_devices_without_a_backend_transfer_over_host_memory(tmp_path: Path) -> None:
    """One rank alone has a group, too; its tensors have no memory, so only copies are seen."""
    init = f"file://{tmp_path}/store"
    dist.init_process_group("gloo", init_method=init, rank=0, world_size=1)
    try:
        ranks = Ranks(0, 1, (0,), ("acme",), dist.group.WORLD)
        communicator = TorchCommunicator(ranks, "meta")
        assert communicator._transfer_device == torch.device("cpu")
        communicator.close()
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("reports_at", "lost"), [({1: 0.0, 2: 0.5}, []), ({1: 0.5}, [2]), ({1: 0.0, 2: 5.0}, [2])]
)
def test_a_failure_names_the_ranks_that_do_not_report_it_in_time(
    reports_at: dict[int, float], lost: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, now = dist.HashStore(), 0.0  # type: ignore[attr-defined]

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        for rank, at in reports_at.items():
            if now >= at:
                store.set(f"interposer/lost/the start of a communicator/{rank}", "it failed")

    def fail(*_: object) -> None:
        raise RuntimeError("Connection closed by peer\nand more")

    monkeypatch.setattr(_group, "ordered_group", fail)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda _: [0, 1, 2])
    group = SimpleNamespace(get_group_store=lambda: store)
    ranks = Ranks(0, 3, (0, 0, 0), ("cpu",) * 3, group)
    with pytest.raises(RankError, match=r"torch.distributed says: Connection closed") as raised:
        _group.RankGroup(ranks, clock=lambda: now, sleep=sleep)
    assert list(raised.value.lost) == lost
    assert now < 2
