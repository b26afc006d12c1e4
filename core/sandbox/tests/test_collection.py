import gc
from collections.abc import Iterator

import pytest

from interposer_sandbox import paused_collection


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    """Restore the garbage collector of the test's process."""
    was_enabled = gc.isenabled()
    yield
    (gc.enable if was_enabled else gc.disable)()


def test_collection_is_paused_inside_the_block_only() -> None:
    gc.enable()
    with paused_collection():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_collection_resumes_after_an_error() -> None:
    gc.enable()
    with pytest.raises(ValueError, match="acme"), paused_collection():
        raise ValueError("acme")
    assert gc.isenabled()


def test_a_paused_collector_stays_paused() -> None:
    gc.disable()
    with paused_collection():
        pass
    assert not gc.isenabled()
