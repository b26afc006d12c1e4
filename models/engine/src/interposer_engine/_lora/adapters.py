"""The LoRA adapters of a loaded model: loading, replacing, removing, and their memory.

Layers have hooks from the first adapter until the last one is removed.

Dimensions: A adapters, E experts, R the largest rank of a layer, P parts, I inputs, O outputs.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from interposer import Planned, Site
from interposer.errors import ConfigError, RequestError, UnknownNameError
from interposer_engine._checkpoint.weight_check import WeightCheck
from interposer_engine._engine import Engine
from interposer_engine._lora.experts import AdaptedExperts, AdaptedRouter
from interposer_engine._lora.files import (
    Adaptable,
    Adapter,
    AdapterPlaces,
    adapter_folder,
    read_adapter,
)
from interposer_engine._lora.layers import LowRank, LowRankTable, StepAdapters, StepHooks
from interposer_engine._lora.weight_copies import BaseCopies
from interposer_ops.devices.graphs import judge_choices
from interposer_ops.layers.moe.experts import Experts
from interposer_ops.layers.moe.router import Router


class Adapters:
    """Loads and removes LoRA adapters between the steps of an engine.

    Without adapters, layers are unchanged. All layers change together or none does: hooks for all
    layers are prepared before the first layer is changed.
    """

    def __init__(self, engine: Engine, plan: Planned, *, takes_none: bool) -> None:
        """Create the manager of an engine's adapters, without any adapter.

        Args:
            plan: plan of the model.
            takes_none: the model was adapted by ``adapt``, so that adapters must be added before.
        """
        self._engine, self._plan, self._takes_none = engine, plan, takes_none
        # By version. Numbers are never reused, as the prefix cache identifies pages by version.
        self._loaded: dict[int, Adapter] = {}
        self._current: dict[str, int] = {}
        self._versions = itertools.count()
        self._places: AdapterPlaces | None = None
        self._hooks = StepHooks({})
        # Kernel choices made for hooks, with the number of prefixes that had the choice before.
        self._hook_choices: dict[tuple[object, ...], int] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the adapters that requests can use."""
        return tuple(self._current)

    @property
    def _dtype(self) -> torch.dtype:
        dtype: torch.dtype = self._plan.dtype  # type: ignore[attr-defined]  # plans of models have one
        return dtype

    def load(self, name: str, path: str | Path, replace: bool = False) -> None:
        """Load the adapter in a folder; see ``LanguageModel.load_adapter``."""
        self._check(name, replace)
        if self._places is None:
            self._places = AdapterPlaces(self._engine.model)
        checkpoint = getattr(self._plan, "checkpoint", None)
        copies = BaseCopies(checkpoint, self._engine.model)
        kind = copies, self._dtype, self._engine.device, WeightCheck.of(self._plan)
        self._add({name: read_adapter(adapter_folder(path), self._places, *kind)})

    def _check(self, name: str, replace: bool) -> None:
        """Raise ConfigError if the name is invalid or in use, or the model supports no adapters."""
        if not isinstance(name, str) or not name:
            raise ConfigError(f"The name of an adapter is {name!r}, must be a text, not empty")
        if self._takes_none:
            raise ConfigError(
                "An adapted model takes adapters where it was made. "
                "Try: PeftModel.from_pretrained(model, folder) of PEFT, then adapt()"
            )
        if self._engine.runner.encoder_inputs is not None:
            raise ConfigError(
                "A model with an encoder takes no adapters: they would not apply to the tokens of "
                "the encoder. Try: merge_and_unload() of PEFT, and load what it saves"
            )
        if name in self._current and not replace:
            raise ConfigError(
                f"There is an adapter {name!r} already. Try: replace=True, or another name"
            )
        if self._engine.runner.compiled is not None:
            raise ConfigError(
                "A compiled model takes no adapters: its graphs were made without them. "
                "Try: Config(compile='off')"
            )

    def start(self, adapters: Mapping[str, Adapter]) -> None:
        """Add the adapters that were read before the engine was created."""
        for name in adapters:
            self._check(name, replace=False)
        if adapters:
            self._add(adapters)

    def _add(self, adapters: Mapping[str, Adapter]) -> None:
        versions = {name: next(self._versions) for name in adapters}
        new_adapters = {versions[name]: adapter for name, adapter in adapters.items()}
        self._set({**self._loaded, **new_adapters}, {**self._current, **versions})

    def remove(self, name: str) -> None:
        """Remove an adapter; see ``LanguageModel.remove_adapter``."""
        if name not in self._current:
            raise UnknownNameError("adapter", name, self._current)
        if num_users := self._num_users(self._current[name]):
            raise RequestError(
                f"The adapter {name!r} is in use by {num_users} unfinished "
                f"request{'s' if num_users > 1 else ''}. Try: finish or cancel first"
            )
        current = {key: version for key, version in self._current.items() if key != name}
        self._set(self._loaded, current)

    def reread_base_weights(self) -> None:
        """Recompute the adapters that depend on the base model's weights, after a weight update."""
        if self._loaded:
            self._set(self._loaded, self._current)

    def _num_users(self, version: int) -> int:
        scheduler = self._engine.scheduler
        unfinished = (*scheduler.running, *scheduler.waiting)
        return sum(sequence.adapter == version for sequence in unfinished)

    def _drop_if_unused(self, version: int) -> None:
        """Free a replaced version of an adapter after the version's last request has ended."""
        if not self._num_users(version):
            self._set(self._loaded, self._current)

    def _set(self, adapters: Mapping[int, Adapter], current: Mapping[str, int]) -> None:
        """Keep the adapters that requests use or can name, and drop all others."""
        used_versions = {version for version in adapters if self._num_users(version)}
        used_versions |= {*current.values()}
        adapters = {
            version: adapter for version, adapter in adapters.items() if version in used_versions
        }
        engine = self._engine
        graphs = engine.runner.graphs
        max_tokens = engine.scheduler.max_step_tokens
        if graphs is not None:
            max_tokens = max(max_tokens, graphs.buckets.sizes[-1])
        has_graphs = graphs is not None
        step = StepAdapters(
            adapters, current, max_tokens, engine.device, has_graphs, self._drop_if_unused
        )
        layers = {place.layer: None for adapter in adapters.values() for place in adapter}
        with self._replacing_choices():
            hooks = {layer: self._new_hook(layer, adapters, step) for layer in layers}
            if graphs is not None:
                choices = [choice for hook in hooks.values() for choice in hook.choices]
                verdict = judge_choices(choices, self._plan.resolver.accepted)
                if not verdict:
                    raise ConfigError(
                        f"With adapters, a step {verdict.reason}, or Config(graphs='off')"
                    )
        # Nothing below can fail.
        self._hooks.switch(False)
        self._hooks = step.hooks = StepHooks(hooks)
        self._hooks.switch(graphs is not None)
        members = [
            {place: m for hook in hooks.values() for place, m in hook.members[number].items()}
            for number in range(len(adapters))
        ]
        self._loaded = dict(zip(adapters, members, strict=True))
        self._current = dict(current)
        engine.runner.adapters = step if adapters else None
        # Captured graphs do not contain the new hooks.
        if graphs is not None:
            graphs.forget()

    @contextmanager
    def _replacing_choices(self) -> Iterator[None]:
        """Let kernel choices of a ``with`` block replace those of previous LoRA hooks."""
        choices = self._plan.resolver.choices
        before = {key: (choice, [*prefixes]) for key, (choice, prefixes) in choices.items()}
        # Remove the prefixes that hooks have added, and choices that only hooks had.
        for key, num_base_prefixes in self._hook_choices.items():
            if not num_base_prefixes:
                choices.pop(key, None)
            elif key in choices:
                del choices[key][1][num_base_prefixes:]
        base_prefixes = {key: len(prefixes) for key, (_, prefixes) in choices.items()}
        try:
            yield
        except BaseException:
            choices.clear()
            choices.update(before)
            raise
        self._hook_choices = {
            key: base_prefixes.get(key, 0)
            for key, (_, prefixes) in choices.items()
            if len(prefixes) > base_prefixes.get(key, 0)
        }

    def _new_hook(
        self, layer: Adaptable, adapters: Mapping[int, Adapter], step: StepAdapters
    ) -> LowRank | AdaptedExperts:
        members = [
            {place: m for place, m in adapter.items() if place.layer is layer}
            for adapter in adapters.values()
        ]
        site = Site(self._plan.resolver, layer.prefix, self._dtype)
        arguments = members, step, self._engine.device
        if isinstance(layer, Experts):
            return AdaptedExperts(site, layer, *arguments)
        if isinstance(layer, Router):
            return AdaptedRouter(Site(site.resolver, layer.prefix, layer.dtype), *arguments)
        is_table = any(place.is_table for member in members for place in member)
        return (LowRankTable if is_table else LowRank)(site, *arguments)


# The current matrices are freed after their replacements are complete.
_NUM_SETS = 2
# Kernels of a host use packed matrices, next to the plain ones that the next change reads.
_NUM_HOST_FORMS = 2


@dataclass(frozen=True, slots=True)
class AdapterMemory:
    """The memory that is reserved for the adapters that are loaded together with the model.

    Attributes:
        num_bytes: memory while one version replaces another, which is the maximum.
        count: A.
    """

    num_bytes: int = 0
    count: int = 0

    @classmethod
    def of(cls, adapters: Collection[Adapter], itemsize: int, on_host: bool) -> AdapterMemory:
        """Compute the memory that all adapters need together.

        Args:
            itemsize: bytes of a number in the model's dtype.
            on_host: the model computes on the host.
        """
        layers: dict[Adaptable, None] = {
            place.layer: None for adapter in adapters for place in adapter
        }
        num_elements = sum(_matrices(layer, adapters) for layer in layers)
        forms = _NUM_HOST_FORMS if on_host else 1
        if on_host:
            # Layers of experts with adapters need their plain matrices next to the packed ones.
            num_elements += sum(_experts(layer) for layer in layers if isinstance(layer, Experts))
        return cls(_NUM_SETS * forms * itemsize * num_elements, len(adapters))

    def __str__(self) -> str:
        return (
            f"{self.num_bytes / 2**20:.1f} MiB are kept for {self.count} adapters, as much as they "
            "take while one is replaced"
        )


def _matrices(layer: Adaptable, adapters: Collection[Adapter]) -> int:
    """Return the number of elements of all adapters' matrices for a layer, padded to equal rank."""
    members = [
        (place, matrices)
        for adapter in adapters
        for place, matrices in adapter.items()
        if place.layer is layer
    ]
    rank = max(matrices.rank for _, matrices in members)
    # All adapters have matrices for each place: missing ones are zeros.
    places = {place: None for place, _ in members}
    per_adapter = sum(
        (place.experts or 1) * rank * (place.inputs + place.outputs) for place in places
    )
    return len(adapters) * per_adapter


def _experts(layer: Experts) -> int:
    spec = layer.spec
    return 3 * spec.num_experts * spec.hidden_size * spec.intermediate_size
