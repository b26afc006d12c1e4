"""A model behind torch.compile: one graph of the whole, for batches of any size.

Dimensions: T tokens of the step, R tokens whose logits are wanted.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from interposer import Config, Placement, Resolver, Verdict
from interposer.errors import ConfigError, UnknownNameError
from interposer_models._engine.compiled_artifacts import CompiledArtifacts
from interposer_ops.devices.compilation import expose_kernels

# Of sizes, 0 and 1 are never dynamic: tokens, sequences, wanted rows and whether they are given
# lead to different graphs, of which a process seldom meets more than six.
_MOST_GRAPHS = 64


class CompiledModel:
    """Calls a model by what torch.compile makes of it, and keeps that for later processes.

    Attributes:
        graphs: how many were compiled; a new one takes seconds to minutes.
    """

    def __init__(
        self,
        model: nn.Module,
        caches: Sequence[Tensor],
        backend: str,
        resolver: Resolver,
        artifacts: CompiledArtifacts,
    ) -> None:
        """Compile nothing yet.

        Args:
            caches: whose sizes never change.
            backend: of torch.compile.
            resolver: through which the model was built.
            artifacts: what former processes compiled.
        Raises: ConfigError: a kernel cannot be part of a graph.
        """
        expose_kernels(resolver)
        self.graphs = 0
        self._model = model
        self._caches = caches
        self._build: Callable[..., Any] = torch._dynamo.lookup_backend(backend)
        self._artifacts = artifacts
        artifacts.load()
        self.fix_sizes()
        limit: dict[str, Any] = {"recompile_limit": _MOST_GRAPHS}
        if "recompile_limit" not in inspect.signature(torch.compile).parameters:
            # Before torch has it as an argument, it is a setting of the process.
            settings = torch._dynamo.config
            settings.recompile_limit = max(settings.recompile_limit, limit.pop("recompile_limit"))
        self._compiled = torch.compile(
            model, fullgraph=True, dynamic=True, backend=self._counted, **limit
        )

    def __call__(
        self,
        token_ids: Tensor,
        positions: Tensor,
        caches: Sequence[Tensor],
        plans: Sequence[object],
        rows: Tensor | None,
    ) -> Tensor:
        """Return the logits, see ``CausalLM``."""
        before = self.graphs
        logits: Tensor = self._compiled(token_ids, positions, caches, plans, rows)
        if self.graphs != before:
            self._artifacts.save()
        return logits

    def fix_sizes(self) -> None:
        """Tell the compiler whose sizes are no part of a batch; again where weights moved."""
        for tensor in (*self._caches, *_constants(self._model)):
            torch._dynamo.mark_static(tensor)

    def _counted(self, graph: Any, inputs: Any, **options: Any) -> Any:
        self.graphs += 1
        return self._build(graph, inputs, **options)


def judge_compiler(config: Config, placement: Placement) -> Verdict | None:
    """Say by which backend the steps of a model are compiled; None where nobody asks for it."""
    if config.compile == "off":
        return None
    name = placement.platform.name
    if config.compile != "on":
        return Verdict.accept(f"by {config.compile!r}, as Config(compile=...) says")
    if placement.described:
        return Verdict.accept(f"by the backend of platform {placement.device.platform!r}")
    verdict = placement.platform.provides("compile_backend")
    if not verdict:
        return Verdict.refuse(f"{verdict.reason}. Try: Config(compile='inductor')")
    backend = placement.platform.compile_backend()
    return Verdict.accept(f"by {backend!r}, the backend of platform {name!r}")


def backend_name(config: Config, placement: Placement) -> str:
    """Return the backend that a model is compiled by.

    Raises:
        ConfigError: the platform has none.
        UnknownNameError: torch knows no such backend.
    """
    verdict = judge_compiler(config, placement)
    if verdict is None or not verdict:
        reason = "nobody asks for it" if verdict is None else verdict.reason
        raise ConfigError(f"compile={config.compile!r} was asked for, but {reason}")
    name = config.compile
    if name == "on":
        name = placement.platform.compile_backend()
    known = torch._dynamo.list_backends(exclude_tags=())
    if name not in known:
        raise UnknownNameError("compile backend", name, known)
    return name


def _constants(model: nn.Module) -> Iterator[Tensor]:
    """Yield the tensors that layers hold as operands, which are no parameters."""
    for module in model.modules():
        held: Mapping[str, Any] = vars(module)
        for name in ("operands", "_operands", "constants", "product"):
            leaves = _pytree.tree_leaves(held.get(name))
            yield from (leaf for leaf in leaves if isinstance(leaf, Tensor))
