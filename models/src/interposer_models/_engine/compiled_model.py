"""A model behind torch.compile: one graph of the whole, for batches of any size.

Dimensions: T tokens of the step, R tokens whose logits are wanted.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental import _config as symbolic
from torch.utils import _pytree

from interposer import Choice, Config, Placement, Resolver, Verdict
from interposer.errors import ConfigError, UnknownNameError
from interposer_models._engine.compiled_artifacts import CompiledArtifacts
from interposer_ops.devices.compilation import expose_kernels

# Of sizes, 0 and 1 are never dynamic: tokens, sequences, wanted rows and whether they are given
# lead to different graphs, seven with that of ``Engine.logits``. Backends may add to it.
_MOST_GRAPHS = 64
_OWN_GRAPHS = ("cudagraphs",)


class CompiledModel:
    """Calls a model by what torch.compile makes of it, and keeps that for later processes.

    Attributes:
        graphs: how many were compiled; a new one takes seconds to minutes.
    """

    def __init__(
        self,
        model: nn.Module,
        caches: Sequence[Any],
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
        self._caches = _pytree.tree_leaves(caches)
        self._build: Callable[..., Any] = torch._dynamo.lookup_backend(backend)
        self._artifacts = artifacts
        # Else two sizes that are equal when a graph is made, such as the tokens and half of a head,
        # count as one, and another graph is made for a batch in which they differ.
        self._sizes_apart: Any = symbolic.patch(use_duck_shape=False)  # type: ignore[attr-defined]
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
        caches: Sequence[Any],
        plans: Sequence[object],
        rows: Tensor | None,
    ) -> Tensor:
        """Return the logits, see ``CausalLM``."""
        before = self.graphs
        with self._sizes_apart:
            logits: Tensor = self._compiled(token_ids, positions, caches, plans, rows)
        if self.graphs != before:
            self._artifacts.save()
        return logits

    def fix_sizes(self) -> None:
        """Tell the compiler whose sizes are no part of a batch; again where weights moved."""
        for tensor in (*self._caches, *_constants(self._model)):
            torch._dynamo.mark_static(tensor)

    def _counted(self, graph: Any, inputs: Any, **options: Any) -> Any:
        built = self._build(graph, inputs, **options)
        # Not before: torch may find on the way that numbers are constant, and start again.
        self.graphs += 1
        return built


def judge_compiler(
    config: Config,
    placement: Placement,
    graphs: Verdict | None = None,
    choices: Iterable[Choice] = (),
) -> Verdict | None:
    """Say by which backend the steps of a model are compiled; None where nobody asks for it.

    Args:
        graphs: whether decode steps are captured as well.
        choices: of the model.
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
    name, said = config.compile, "as Config(compile=...) says"
    if name == "on":
        said = f"the backend of platform {placement.platform.name!r}"
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
    return Verdict.accept(f"by {name!r}, {said}")


def backend_name(config: Config, placement: Placement, verdict: Verdict) -> str:
    """Return the backend that a model is compiled by.

    Args:
        verdict: of ``judge_compiler``.
    Raises:
        ConfigError: the platform has none, or it may not be used.
        UnknownNameError: torch knows no such backend.
    """
    if not verdict:
        raise ConfigError(f"compile={config.compile!r} was asked for, but {verdict.reason}")
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
