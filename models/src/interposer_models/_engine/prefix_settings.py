"""The settings of a prefix cache, and the parts that they stand for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from interposer import Platform
from interposer.errors import ConfigError
from interposer_models._engine.cache_budget import is_host
from interposer_models._engine.cache_contents import row_bytes
from interposer_models._engine.caches import Caches, slots_for
from interposer_models._engine.prefix_pages import PrefixPool
from interposer_models._engine.prefix_store import PrefixStore, file_memory, host_memory
from interposer_models._engine.shared_prefixes import SharedPrefixes
from interposer_models._engine.state_checkpoints import StateCheckpoints
from interposer_ops.layers.states import StateLayout

_LEAST_CHECKPOINTS = 16


@dataclass(frozen=True)
class PrefixCache:
    """The memory in which beginnings of prompts are kept, besides the pages of the cache.

    Attributes:
        state_bytes: for checkpoints of recurrent states, on the device; None takes as much as the
            states of ``max_sequences`` sequences take, and that of 16 checkpoints at least.
        offload_bytes: for pages and checkpoints that the device gives up, which come back when a
            prompt wants them; 0 drops them.
        offload_dir: the folder in which these bytes are a file without a name, which goes with the
            process; None takes host memory, which an accelerator reads and writes itself.
    Raises: ConfigError: a size is no integer of at least 0, or a folder is given without a size.
    """

    state_bytes: int | None = None
    offload_bytes: int = 0
    offload_dir: str | Path | None = None

    def __post_init__(self) -> None:
        for name in ("state_bytes", "offload_bytes"):
            size = getattr(self, name)
            whole = isinstance(size, int) and not isinstance(size, bool)
            if not (size is None and name == "state_bytes") and not (whole and size >= 0):
                raise ConfigError(
                    f"{name} of PrefixCache is {size!r}, must be an integer of at least 0"
                )
        if self.offload_dir is not None and not self.offload_bytes:
            raise ConfigError(
                f"offload_dir of PrefixCache is {str(self.offload_dir)!r}, but nothing says how "
                "large the file may be. Try: offload_bytes=2**30"
            )

    @classmethod
    def of(cls, given: bool | PrefixCache) -> PrefixCache | None:
        """Return the settings that ``load`` was given; None where there is no prefix cache.

        Raises: ConfigError: they are of another type.
        """
        if isinstance(given, bool):
            return cls() if given else None
        if not isinstance(given, PrefixCache):
            raise ConfigError(
                f"prefix_cache is of the type {type(given).__name__}. "
                "Try: True, or PrefixCache(...)"
            )
        return given

    def num_checkpoints(self, layouts: Sequence[StateLayout], max_sequences: int) -> int:
        """Return how many checkpoints of states there are room for; 0 of a model without any.

        Raises: ConfigError: there is not room for one.
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
        """Raise ConfigError if the platform's memory is that to which pages would be copied."""
        if self.offload_bytes and self.offload_dir is None and is_host(platform):
            raise ConfigError(
                f"offload_bytes of PrefixCache is {self.offload_bytes}, but the cache lies in host "
                "memory already. Try: a larger cache_tokens, or an offload_dir"
            )

    def shared(
        self, held: Caches, caches: list[Any], device: str, platform: Platform
    ) -> SharedPrefixes:
        """Return what shares the pages and states of caches.

        Args:
            held: the pools of the caches.
        Raises: ConfigError: memory for what is given up cannot be had, or is too small.
        """
        pools = [pool for pool in held.pools if isinstance(pool, PrefixPool)]
        contents = held.contents(caches)
        checkpoints = None
        kinds = [(contents.page_bytes(place), p.num_pages) for place, p in enumerate(pools)]
        if held.states:
            count = self.num_checkpoints(held.states, held.max_sequences)
            kept = held.allocate_states(count, device)
            checkpoints = StateCheckpoints(contents.states, kept, count)
            kinds.append((row_bytes(kept), count))
        store = None
        if self.offload_bytes:
            if self.offload_dir is None:
                memory = host_memory(self.offload_bytes, platform)
            else:
                memory = file_memory(self.offload_bytes, Path(self.offload_dir))
            store = PrefixStore(memory, kinds, queued=memory.is_pinned())
        return SharedPrefixes(pools, contents, checkpoints, store)

    def told(self, layouts: Sequence[StateLayout], max_sequences: int) -> str:
        """Return what people should know of its memory; empty where it has none besides pages.

        Args:
            layouts: of the states of the model.
        """
        parts = []
        if count := self.num_checkpoints(layouts, max_sequences):
            size = count * sum(layout.slot_bytes() for layout in layouts) / 2**20
            parts.append(f"{count} checkpoints of states, {size:.1f} MiB of these")
        if self.offload_bytes:
            where = "host memory" if self.offload_dir is None else f"a file in {self.offload_dir}"
            parts.append(f"{self.offload_bytes / 2**20:.1f} MiB of {where} for what is given up")
        return f"the prefix cache has {', '.join(parts)}" if parts else ""
