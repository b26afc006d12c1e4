"""The device keeps the promises that torch makes for every accelerator."""

from __future__ import annotations

import ctypes
import io
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

# The tests of the device start processes as they need.
pytestmark = pytest.mark.process

DEVICE = "example:0"
backend = torch.get_device_module("example")


@pytest.fixture(autouse=True)
def settled() -> Iterator[None]:
    """Wait for the streams after each test, so that no test sees the error of another."""
    yield
    for index in range(backend.device_count()):
        torch.accelerator.synchronize(index)


def python(program: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **variables},
    )


def test_torch_loads_the_backend_itself() -> None:
    done = python("import torch; print(torch.ones(2, device='example').sum().item())")
    assert done.stdout == "2.0\n", done.stderr


def test_the_variable_sets_the_number_of_devices() -> None:
    program = "import torch; print(torch.accelerator.device_count())"
    assert python(program, EXAMPLE_DEVICES="5").stdout == "5\n"
    assert python(program, EXAMPLE_DEVICES="0").stdout == "0\n"


def test_the_host_cannot_access_device_memory() -> None:
    done = python(
        "import ctypes, torch\n"
        "tensor = torch.ones(4, device='example')\n"
        "torch.accelerator.synchronize()\n"
        "ctypes.string_at(tensor.data_ptr(), 4)"
    )
    assert done.returncode == -signal.SIGSEGV


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_copies_keep_values_strides_and_dtypes(dtype: torch.dtype) -> None:
    host = torch.arange(24).reshape(2, 3, 4).to(dtype)
    for view in (host, host.mT, host[:, 1:, ::2], host[0, 0].expand(5, 4), host[:0]):
        device_tensor = view.to(DEVICE)
        assert torch.equal(device_tensor.cpu(), view)
        assert torch.equal(device_tensor.to("example:1").cpu(), view)
        assert torch.equal(device_tensor.float().cpu(), view.float())
    transposed = host.to(DEVICE).mT
    assert transposed.stride() == host.mT.stride()
    assert torch.equal(transposed.contiguous().cpu(), host.mT)


def test_a_copy_to_part_of_a_tensor_leaves_the_rest() -> None:
    target = torch.zeros(3, 4, device=DEVICE)
    target[1:, ::2] = torch.ones(2, 2)
    host = torch.full((3, 4), 5.0)
    host[:, 1].copy_(target[:, 0])
    assert host.tolist() == [[5, 0, 5, 5], [5, 1, 5, 5], [5, 1, 5, 5]]


def test_fresh_memory_is_not_zero() -> None:
    assert torch.empty(1000, device=DEVICE).isnan().all().item()


def test_streams_run_in_parallel_and_events_order_them() -> None:
    main, side = torch.accelerator.current_stream(), torch.Stream(DEVICE)
    number = torch.zeros(1000, 1000, device=DEVICE)
    done = torch.Event(DEVICE)
    # Otherwise the main stream could write its zeros in the midst of the sums.
    side.wait_stream(main)
    with side:
        for _ in range(20):
            number.add_(1)
        number.record_stream(side)
        done.record(side)
    main.wait_event(done)
    assert number.sum().item() == 20 * number.numel()
    assert done.query()


def test_freed_memory_waits_for_the_streams_that_use_it() -> None:
    side = torch.Stream(DEVICE)
    total = torch.zeros(512, 512, device=DEVICE)
    gate = torch.Event(DEVICE)
    for _ in range(50):
        source = torch.ones(512, 512, device=DEVICE)
        gate.record()
        with side:
            side.wait_event(gate)
            total.add_(source)
        source.record_stream(side)
        # Its block would be filled anew now if the allocator forgot the side stream.
        del source
        torch.empty(512, 512, device=DEVICE)
    torch.accelerator.synchronize()
    assert torch.equal(total.cpu(), torch.full((512, 512), 50.0))


def test_memory_is_counted_and_given_back() -> None:
    torch.accelerator.empty_cache()
    before = torch.accelerator.memory_allocated(0)
    free_before, total = torch.accelerator.get_memory_info(0)
    torch.accelerator.reset_peak_memory_stats(0)
    tensor = torch.empty(1 << 20, dtype=torch.uint8, device=DEVICE)
    assert torch.accelerator.memory_allocated(0) == before + (1 << 20)
    del tensor
    assert torch.accelerator.memory_allocated(0) == before
    assert torch.accelerator.max_memory_allocated(0) == before + (1 << 20)
    torch.accelerator.empty_cache()
    assert torch.accelerator.get_memory_info(0) == (free_before, total)


def test_a_tensor_larger_than_the_memory_is_refused() -> None:
    _, total = torch.accelerator.get_memory_info(0)
    with pytest.raises(torch.OutOfMemoryError, match="example:0 has no free block"):
        torch.empty(total + 1, dtype=torch.uint8, device=DEVICE)


def test_pinned_memory_is_copied_while_the_host_goes_on() -> None:
    pinned = torch.arange(100_000.0).pin_memory()
    assert pinned.is_pinned()
    assert not torch.arange(3.0).is_pinned()
    device_tensor = pinned.to(DEVICE, non_blocking=True)
    back = torch.empty_like(pinned, pin_memory=True)
    back.copy_(device_tensor, non_blocking=True)
    torch.accelerator.synchronize()
    assert torch.equal(back, pinned)


def test_random_numbers_follow_the_seed() -> None:
    torch.manual_seed(7)
    first = torch.rand(5, device=DEVICE)
    state = backend.get_rng_state(DEVICE)
    second = torch.randn(5, device=DEVICE)
    torch.manual_seed(7)
    assert torch.equal(torch.rand(5, device=DEVICE).cpu(), first.cpu())
    backend.set_rng_state(state, DEVICE)
    assert torch.equal(torch.randn(5, device=DEVICE).cpu(), second.cpu())
    own = torch.Generator(DEVICE).manual_seed(3)
    again = torch.Generator(DEVICE).manual_seed(3)
    draws = [torch.rand(4, device=DEVICE, generator=g).cpu() for g in (own, own, again)]
    assert torch.equal(draws[0], draws[2])
    assert not torch.equal(draws[0], draws[1])


def test_autocast_lowers_matmuls_only() -> None:
    x = torch.ones(2, 2, device=DEVICE)
    with torch.autocast("example", dtype=torch.bfloat16):
        assert (x @ x).dtype == torch.bfloat16
        assert torch.nn.functional.linear(x, x).dtype == torch.bfloat16
        assert (x + x).dtype == torch.float32


def test_tensors_are_saved_and_loaded(tmp_path: Path) -> None:
    tensor = torch.arange(6.0).reshape(2, 3).to(DEVICE)
    file = tmp_path / "tensor.pt"
    torch.save({"weight": tensor.mT}, file)
    loaded = torch.load(file)["weight"]
    assert loaded.device == torch.device(DEVICE)
    assert torch.equal(loaded.cpu(), tensor.cpu().mT)
    assert torch.load(file, map_location="cpu")["weight"].device.type == "cpu"
    buffer = io.BytesIO()
    torch.save(torch.ones(2), buffer)
    buffer.seek(0)
    assert torch.load(buffer, map_location="example:1").device == torch.device("example:1")


def test_missing_operators_are_counted_or_refused() -> None:
    x = torch.tensor([3.0, 1.0, 2.0]).to(DEVICE)
    backend.clear_fallback_calls()
    assert x.erfinv().device == x.device
    assert backend.fallback_calls() == {"aten::erfinv.out": 1}
    allowed = backend.allow_fallback(False)
    try:
        with pytest.raises(NotImplementedError, match=r"no operator aten::erfinv\.out"):
            x.erfinv()
        assert (x + x).sum().item() == 12.0
    finally:
        backend.allow_fallback(allowed)


def test_an_operator_that_fails_later_is_reported_by_the_next_wait() -> None:
    table = torch.ones(4, 2, device=DEVICE)
    rows = torch.tensor([9]).to(DEVICE)
    table.index_select(0, rows)
    with pytest.raises(RuntimeError, match=r"some time before this call: .*out of range"):
        torch.accelerator.synchronize()
    torch.accelerator.synchronize()


def test_tensors_of_two_devices_are_refused() -> None:
    with pytest.raises(RuntimeError, match=r"same device|example:0 and example:1"):
        torch.ones(2, device="example:0") + torch.ones(2, device="example:1")
    with pytest.raises(RuntimeError, match=r"same device|a tensor of cpu with 1 dimensions"):
        torch.ones(2, device="example:0") + torch.ones(2)


def test_gradients_flow() -> None:
    weight = torch.ones(3, 3, device=DEVICE, requires_grad=True)
    (torch.full((2, 3), 2.0, device=DEVICE) @ weight).sum().backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad.cpu(), torch.full((3, 3), 4.0))


def test_addresses_are_of_the_device() -> None:
    tensor = torch.ones(2, device=DEVICE)
    with pytest.raises(TypeError, match="numpy"):
        tensor.numpy()
    assert isinstance(ctypes.c_void_p(tensor.data_ptr()).value, int)
