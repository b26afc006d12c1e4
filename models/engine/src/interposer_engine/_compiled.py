"""A model compiled by torch.compile: one graph of the whole model, with dynamic batch sizes.

Dimensions: T tokens of the step, R tokens with requested logits.
"""

from __future__ import annotations

import base64
import binascii
import inspect
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental import _config as symbolic
from torch.utils import _pytree

from interposer import Choice, Config, Placement, Resolver, Verdict
from interposer.errors import ConfigError, StorageError, UnknownNameError
from interposer.tooling import Store, checksum
from interposer_ops.devices.compilation import expose_kernels

_KIND = "compiled"
_log = logging.getLogger("interposer")


class CompiledArtifacts:
    """Stored kernels and graphs of torch's compiler for one model, device and kernel choice.

    torch validates the inputs of each artifact before use, so that a stale artifact only costs
    time. Artifacts contain code: write access to the store allows running code, as with torch's own
    cache.
    """

    def __init__(self, store: Store, key: Mapping[str, Any]) -> None:
        self._store = store
        self._key = dict(key)
        self._parts = 0
        self._stored_names: set[str] = set()

    def load(self) -> int:
        """Load the stored artifacts into torch's cache, and return the number of stored parts."""
        try:
            while (encoded := self._store.read(_KIND, self._part())) is not None:
                code = base64.b64decode(str(encoded), validate=True)
                self._stored_names |= _names(torch.compiler.load_cache_artifacts(code))
                self._parts += 1
        except (StorageError, binascii.Error) as error:
            _log.warning("%s; the model is compiled anew", error)
        return self._parts

    def save(self) -> None:
        """Store the artifacts that this process compiled since the last call, as another part.

        torch reads only the last artifacts of a file that was saved in several turns, so each call
        writes a separate part.
        """
        artifacts = torch.compiler.save_cache_artifacts()
        if artifacts is None:  # the backend generates nothing that can be stored
            return
        code, info = artifacts
        # Artifacts of an earlier part are in the result again, so store only if there are new ones.
        new_names = _names(info) - self._stored_names
        if not new_names:
            return
        try:
            self._store.write(_KIND, self._part(), base64.b64encode(code).decode("ascii"))
        except StorageError as error:
            _log.warning("%s; later processes compile again", error)
            return
        self._stored_names |= new_names
        self._parts += 1

    def _part(self) -> dict[str, Any]:
        return {**self._key, "part": self._parts}


def _names(info: Any) -> set[str]:
    """Return the names of compiled artifacts; each name is a digest of the artifact's inputs."""
    kinds = ("inductor_artifacts", "autotune_artifacts", "aot_autograd_artifacts")
    return {name for kind in kinds for name in getattr(info, kind, ())}


def artifacts_key(resolver: Resolver, backend: str, model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the store key of compiled code: versions, device, backend, model and kernel choices.

    Args:
        model: Sizes and options of the model.
    """
    device = resolver.device
    choices = sorted(
        [*map(str, choice.request.key), choice.chosen.qualified_name, choice.chosen.version]
        for choice, _ in resolver.choices.values()
    )
    return {
        "torch": torch.__version__,
        "platform": device.platform,
        "device": device.name,
        "capability": checksum(device.capability.to_json()),
        "backend": backend,
        # Configurations of models may hold infinity, which a checksum of values refuses.
        "model": checksum(json.dumps(model, sort_keys=True)),
        "choices": checksum(choices),
    }


# torch never treats the sizes 0 and 1 as dynamic. So the numbers of tokens, sequences and requested
# rows lead to different graphs: seven with that of ``Engine.logits``. Backends may compile more.
_MOST_GRAPHS = 64
_OWN_GRAPHS = ("cudagraphs",)


class CompiledModel:
    """Calls a model through torch.compile, and stores the compiled code for later processes.

    Attributes:
        graphs: Number of graphs compiled so far; each takes seconds to minutes.
    """

    def __init__(
        self,
        model: nn.Module,
        caches: Sequence[Any],
        backend: str,
        resolver: Resolver,
        artifacts: CompiledArtifacts,
    ) -> None:
        """Prepare the model for compilation, which happens at the first calls.

        Args:
            caches: KV caches and states, which have fixed sizes.
            backend: Backend of torch.compile.
            resolver: The resolver of the model's kernels.
            artifacts: Code that earlier processes compiled.
        Raises: ConfigError: a kernel cannot be part of a graph.
        """
        expose_kernels(resolver)
        self.graphs = 0
        self._model = model
        self._caches = _pytree.tree_leaves(caches)
        self._build: Callable[..., Any] = torch._dynamo.lookup_backend(backend)
        self._artifacts = artifacts
        # Without this, torch takes two sizes that are equal during tracing (such as the number of
        # tokens and half of the head size) for one, and compiles again when they differ.
        self._sizes_apart: Any = symbolic.patch(use_duck_shape=False)  # type: ignore[attr-defined]
        artifacts.load()
        self.fix_sizes()
        limit: dict[str, Any] = {"recompile_limit": _MOST_GRAPHS}
        if "recompile_limit" not in inspect.signature(torch.compile).parameters:
            # In older torch the limit is no argument, but a setting of the whole process.
            settings = torch._dynamo.config
            settings.recompile_limit = max(settings.recompile_limit, limit.pop("recompile_limit"))
        self._compiled = torch.compile(
            model, fullgraph=True, dynamic=True, backend=self._compile_and_count, **limit
        )

    def __call__(
        self,
        token_ids: Tensor,
        positions: Tensor,
        caches: Sequence[Any],
        plans: Sequence[object],
        rows: Tensor | None,
    ) -> Tensor:
        """Compute the logits; see ``CausalLM``."""
        num_graphs_before = self.graphs
        with self._sizes_apart:
            logits: Tensor = self._compiled(token_ids, positions, caches, plans, rows)
        if self.graphs != num_graphs_before:
            self._artifacts.save()
        return logits

    def fix_sizes(self) -> None:
        """Mark caches and constants as static for torch.compile; call again after weights moved."""
        for tensor in (*self._caches, *_constants(self._model)):
            torch._dynamo.mark_static(tensor)

    def _compile_and_count(self, graph: Any, inputs: Any, **options: Any) -> Any:
        compiled_graph = self._build(graph, inputs, **options)
        # Count at the end only: torch may find that a number is constant, and start again.
        self.graphs += 1
        return compiled_graph


def check_compiler(
    config: Config,
    placement: Placement,
    graphs: Verdict | None = None,
    choices: Iterable[Choice] = (),
) -> Verdict | None:
    """Decide whether torch.compile compiles the steps, with backend or reason; None if off.

    Args:
        graphs: Whether decode steps are captured as graphs, too.
        choices: The kernel choices of the model.
    """
    if config.compile == "off":
        return None
    for choice in choices:
        if choice.waits:
            return Verdict.refuse(
                f"a graph holds whole steps, and {choice.request.name!r} stops them: "
                f"{choice.notes[-1]}. Try: Config(compile='off'), or a format of weights that one "
                "op computes"
            )
    name, reason = config.compile, "as Config(compile=...) says"
    if name == "on":
        reason = f"the backend of platform {placement.platform.name!r}"
        # A device that is only described has no hardware whose backend could be looked up.
        if placement.described:
            return Verdict.accept(f"by the backend of platform {placement.device.platform!r}")
        verdict = placement.platform.provides("compile_backend")
        if not verdict:
            return Verdict.refuse(f"{verdict.reason}. Try: Config(compile='inductor')")
        name = placement.platform.compile_backend()
    if graphs and name in _OWN_GRAPHS:
        return Verdict.refuse(
            f"{name!r} captures graphs of its own, and decode steps are captured already. Try: "
            f"Config(compile={name!r}, graphs='off'), or Config(compile='inductor') with graphs"
        )
    return Verdict.accept(f"by {name!r}, {reason}")


def backend_name(config: Config, placement: Placement, verdict: Verdict) -> str:
    """Return the name of the torch.compile backend to use.

    Args:
        verdict: Result of ``check_compiler``.
    Raises:
        ConfigError: the platform has no backend, or the verdict is a refusal.
        UnknownNameError: torch has no such backend.
    """
    if not verdict:
        raise ConfigError(f"compile={config.compile!r} was requested, but {verdict.reason}")
    name = config.compile
    if name == "on":
        name = placement.platform.compile_backend()
    # With no excluded tags the list contains debug and experimental backends, too.
    known_backends = torch._dynamo.list_backends(exclude_tags=())
    if name not in known_backends:
        raise UnknownNameError("compile backend", name, known_backends)
    return name


def _constants(model: nn.Module) -> Iterator[Tensor]:
    """Yield the tensors that the model's layers pass to kernels but do not hold as parameters."""
    for module in model.modules():
        attributes: Mapping[str, Any] = vars(module)
        for name in ("operands", "_operands", "constants", "product"):
            leaves = _pytree.tree_leaves(attributes.get(name))
            yield from (leaf for leaf in leaves if isinstance(leaf, Tensor))
