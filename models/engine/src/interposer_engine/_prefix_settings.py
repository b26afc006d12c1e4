"""Settings and construction of the prefix cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from interposer import Platform
from interposer.errors import ConfigError
from interposer_engine._kv_cache import Caches, slots_for
from interposer_engine._kv_cache_budget import is_host
from interposer_engine._pages import StateCheckpoints, row_bytes
from interposer_engine._prefix_cache import SharedPrefixes
from interposer_engine._prefix_pool import PrefixPool, PrefixStore, file_memory, host_memory
from interposer_ops.layers.states import StateLayout

_LEAST_CHECKPOINTS = 16


@dataclass(frozen=True)
class PrefixCache:
    """Settings of the prefix cache: memory for evicted pages and for state checkpoints.

    Attributes:
        state_bytes: Device memory for checkpoints of recurrent states. None takes as much as the
            states of ``max_sequences`` sequences, and at least 16 checkpoints.
        offload_bytes: Memory for pages and checkpoints that the device evicts and that a later
            prompt restores; 0 drops evicted pages.
        offload_dir: Folder for a temporary file of ``offload_bytes``, which is deleted with the
            process. None takes host memory, which an accelerator reads and writes directly.
    Raises: ConfigError: a size is not an integer of at least 0, or a folder is set without a size.
    """

    state_bytes: int | None = None
    offload_bytes: int = 0
    offload_dir: str | Path | None = None

    def __post_init__(self) -> None:
        for name in ("state_bytes", "offload_bytes"):
            size = getattr(self, name)
            is_integer = isinstance(size, int) and not isinstance(size, bool)
            if not (size is None and name == "state_bytes") and not (is_integer and size >= 0):
                raise ConfigError(
                    f"{name} of PrefixCache is {size!r}, must be an integer of at least 0"
                )
        if self.offload_dir is not None and not self.offload_bytes:
            raise ConfigError(
                f"offload_dir of PrefixCache is {str(self.offload_dir)!r}, but nothing says how "
                "large the file may be. Try: offload_bytes=2**30"
            )

    @classmethod
    def of(cls, value: bool | PrefixCache) -> PrefixCache | None:
        """Convert the argument ``prefix_cache`` of ``load`` to settings; None for no prefix cache.

        Raises: ConfigError: the argument has another type.
        """
        if isinstance(value, bool):
            return cls() if value else None
        if not isinstance(value, PrefixCache):
            raise ConfigError(
                f"prefix_cache is of the type {type(value).__name__}. "
                "Try: True, or PrefixCache(...)"
            )
        return value

    def num_checkpoints(self, layouts: Sequence[StateLayout], max_sequences: int) -> int:
        """Return the number of state checkpoints to keep; 0 for a model without recurrent states.

        Raises: ConfigError: ``state_bytes`` is less than one checkpoint.
        """
        size = sum(layout.slot_bytes() for layout in layouts)
        if not size:
            return 0
        if self.state_bytes is None:
            return max(_LEAST_CHECKPOINTS, slots_for(max_sequences))
        if self.state_bytes < size:
            raise ConfigError(
                f"state_bytes of PrefixCache is {self.state_bytes}, a checkpoint takes {size}. "
                f"Try: {_LEAST_CHECKPOINTS * size}"
            )
        return self.state_bytes // size

    def check(self, platform: Platform) -> None:
        """Raise ConfigError if pages in host memory would be offloaded to host memory."""
        if self.offload_bytes and self.offload_dir is None and is_host(platform):
            raise ConfigError(
                f"offload_bytes of PrefixCache is {self.offload_bytes}, but the cache lies in host "
                "memory already. Try: a larger cache_tokens, or an offload_dir"
            )

    def shared(
        self, model_caches: Caches, caches: list[Any], device: str, platform: Platform
    ) -> SharedPrefixes:
        """Create the prefix cache for the KV-cache pages and states of a model.

        Args:
            model_caches: Page pools and state layouts of the model.
            caches: Result of ``Caches.allocate``.
            device: Device of the caches.
            platform: Platform of the device, for pinned host memory.
        Raises: ConfigError: the memory for offloaded pages cannot be allocated, or is too small.
        """
        pools = [pool for pool in model_caches.pools if isinstance(pool, PrefixPool)]
        contents = model_caches.contents(caches)
        checkpoints = None
        kinds = [
            (contents.page_bytes(pool_index), p.num_pages) for pool_index, p in enumerate(pools)
        ]
        if model_caches.states:
            num_checkpoints = self.num_checkpoints(model_caches.states, model_caches.max_sequences)
            checkpoint_rows = model_caches.allocate_states(num_checkpoints, device)
            checkpoints = StateCheckpoints(contents.states, checkpoint_rows, num_checkpoints)
            kinds.append((row_bytes(checkpoint_rows), num_checkpoints))
        store = None
        if self.offload_bytes:
            if self.offload_dir is None:
                memory = host_memory(self.offload_bytes, platform)
            else:
                memory = file_memory(self.offload_bytes, Path(self.offload_dir))
            # Only pinned memory allows copies that run while the host continues.
            store = PrefixStore(memory, kinds, queued=memory.is_pinned())
        return SharedPrefixes(pools, contents, checkpoints, store)

    def description(self, layouts: Sequence[StateLayout], max_sequences: int) -> str:
        """Describe the memory that the prefix cache takes besides pages; "" if there is none.

        Args:
            layouts: Layouts of the model's recurrent states.
        """
        parts = []
        if count := self.num_checkpoints(layouts, max_sequences):
            size = count * sum(layout.slot_bytes() for layout in layouts) / 2**20
            parts.append(f"{count} checkpoints of states, {size:.1f} MiB of these")
        if self.offload_bytes:
            where = "host memory" if self.offload_dir is None else f"a file in {self.offload_dir}"
            parts.append(f"{self.offload_bytes / 2**20:.1f} MiB of {where} for evicted pages")
        return f"the prefix cache has {', '.join(parts)}" if parts else ""
