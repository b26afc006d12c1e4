"""vLLM as a host of kernels: its layers, built with the seams taken, compute cases of ops."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from interposer.errors import ConfigError
from interposer_testing import Host
from interposer_vllm._seams.loading import take_layers
from interposer_vllm._session import closed_session, session
from interposer_vllm._taking import TAKEN
from interposer_vllm.register import register

__all__ = ["VLLM"]

# By op, the seam that puts kernels into the layers.
_LAYERS = {
    "linear": ("linear", ("RowParallelLinear", "ColumnParallelLinear")),
    "rms_norm": ("elementwise", ("RMSNorm",)),
    "silu_and_mul": ("elementwise", ("SiluAndMul",)),
}
_numbers = itertools.count()


class VLLM(Host):
    """Builds single layers of vLLM, without an engine around them."""

    def __init__(self) -> None:
        """Take the seams, as each of vLLM's processes does.

        Raises: ConfigError: vLLM is not installed.
        """
        try:
            import vllm
        except ImportError as error:
            raise ConfigError(
                f"vLLM cannot be imported: {error}. Try: install it beside interposer-vllm"
            ) from error
        register()
        take_layers()
        self._version = str(vllm.__version__)

    @property
    def version(self) -> str:
        """Name and version of the engine."""
        return f"vllm {self._version}"

    def layers(self, op: str) -> tuple[str, ...]:
        """Return the layers that compute ``op``; none where their seam was refused."""
        seam, layers = _LAYERS.get(op, ("", ()))
        return layers if TAKEN.get(seam) else ()

    def compute(self, layer: str, op: str, arguments: Mapping[str, Any]) -> Any:
        """Return ``op`` by a new layer, whose weights are loaded as those of a checkpoint.

        Raises: ConfigError: the layer stays vLLM's own; the reason is that of the report.
        """
        compute = _COMPUTED.get(op, _product)
        with _alone(), torch.no_grad():
            result, place = compute(layer, **arguments)
            if place not in session().taken:
                reason = session().kept.get(place, "it was not asked")
                raise ConfigError(f"{layer} stays vLLM's own: {reason}")
        return result


def _product(layer: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, str]:
    import vllm.model_executor.layers.linear as linears

    prefix = f"cases.{next(_numbers)}"
    built = getattr(linears, layer)(
        weight.shape[1],
        weight.shape[0],
        bias=bias is not None,
        params_dtype=weight.dtype,
        prefix=prefix,
        return_bias=False,
        disable_tp=True,
    )
    built.weight.weight_loader(built.weight, weight)
    if bias is not None:
        built.bias.weight_loader(built.bias, bias)
    built.quant_method.process_weights_after_loading(built)
    return built(x), prefix


def _normalised(layer: str, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, str]:
    from vllm.model_executor.layers.layernorm import RMSNorm

    built = RMSNorm(len(weight), eps, dtype=weight.dtype)
    built.weight.data.copy_(weight)
    return built(x), f"{layer} of {len(weight)}"


def _gated(layer: str, x: Tensor) -> tuple[Tensor, str]:
    from vllm.model_executor.layers.activation import SiluAndMul

    return SiluAndMul()(x), f"{layer} of {x.shape[-1] // 2}"


_COMPUTED: Mapping[str, Callable[..., tuple[Tensor, str]]] = {
    "rms_norm": _normalised,
    "silu_and_mul": _gated,
}


@contextmanager
def _alone() -> Iterator[None]:
    """Build layers outside of an engine, with a session of the configuration in force."""
    from vllm.config import CompilationConfig, VllmConfig, set_current_vllm_config

    # Norms and activations are themselves only where nothing compiles them.
    eager = CompilationConfig(mode=0, custom_ops=["all"])
    with set_current_vllm_config(VllmConfig(compilation_config=eager)), closed_session():
        _form_group()
        yield


@cache
def _form_group() -> None:
    """Make this process the only one of its group, of which layers ask their rank."""
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    # A file that all processes of the group meet at; this one has met itself when it is removed.
    with TemporaryDirectory() as folder:
        place = f"file://{Path(folder, 'group')}"
        init_distributed_environment(1, 0, place, local_rank=0, backend="gloo")
        initialize_model_parallel()
