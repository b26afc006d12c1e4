"""vLLM as a host of kernels: patched vLLM layers compute the test cases of ops."""

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
from interposer_vllm._patches.loading import patch_layers
from interposer_vllm._patching import VERDICTS
from interposer_vllm._session import closed_session, session
from interposer_vllm.register import register

__all__ = ["VLLM"]

# By op: the patch that puts kernels into vLLM's layers, and the names of these layers.
_LAYERS = {
    "linear": ("linear", ("RowParallelLinear", "ColumnParallelLinear")),
    "rms_norm": ("elementwise", ("RMSNorm",)),
    "silu_and_mul": ("elementwise", ("SiluAndMul",)),
}
_numbers = itertools.count()


class VLLM(Host):
    """Host for kernel tests that builds single vLLM layers without an engine."""

    def __init__(self) -> None:
        """Apply all patches, as each process of vLLM does.

        Raises: ConfigError: vLLM is not installed.
        """
        try:
            import vllm
        except ImportError as error:
            raise ConfigError(f"vLLM cannot be imported: {error}. Try: pip install vllm") from error
        register()
        patch_layers()
        self._version = str(vllm.__version__)

    @property
    def version(self) -> str:
        """The name and version of the engine, such as ``vllm 0.32.0``."""
        return f"vllm {self._version}"

    def layers(self, op: str) -> tuple[str, ...]:
        """Return the names of the vLLM layers that compute ``op``, empty if the patch failed."""
        patch, layers = _LAYERS.get(op, ("", ()))
        return layers if VERDICTS.get(patch) else ()

    def compute(self, layer: str, op: str, arguments: Mapping[str, Any]) -> Any:
        """Build a vLLM layer, load weights as from a checkpoint, and return the output.

        Raises: ConfigError: vLLM's own kernel would compute the layer; the text has the reason.
        """
        compute = _COMPUTE_BY_OP.get(op, _compute_linear)
        with _layer_context(), torch.no_grad():
            result, place = compute(layer, **arguments)
            if place not in session().taken:
                reason = session().kept.get(place, "no patched layer requested a kernel")
                raise ConfigError(f"{layer} stays vLLM's own: {reason}")
        return result


def _compute_linear(
    layer: str, x: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, str]:
    import vllm.model_executor.layers.linear as linears

    prefix = f"cases.{next(_numbers)}"
    vllm_layer = getattr(linears, layer)(
        weight.shape[1],
        weight.shape[0],
        bias=bias is not None,
        params_dtype=weight.dtype,
        prefix=prefix,
        return_bias=False,
        disable_tp=True,
    )
    vllm_layer.weight.weight_loader(vllm_layer.weight, weight)
    if bias is not None:
        vllm_layer.bias.weight_loader(vllm_layer.bias, bias)
    vllm_layer.quant_method.process_weights_after_loading(vllm_layer)
    return vllm_layer(x), prefix


def _compute_rms_norm(layer: str, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, str]:
    from vllm.model_executor.layers.layernorm import RMSNorm

    vllm_layer = RMSNorm(len(weight), eps, dtype=weight.dtype)
    vllm_layer.weight.data.copy_(weight)
    return vllm_layer(x), f"{layer} of {len(weight)}"


def _compute_silu_and_mul(layer: str, x: Tensor) -> tuple[Tensor, str]:
    from vllm.model_executor.layers.activation import SiluAndMul

    return SiluAndMul()(x), f"{layer} of {x.shape[-1] // 2}"


_COMPUTE_BY_OP: Mapping[str, Callable[..., tuple[Tensor, str]]] = {
    "rms_norm": _compute_rms_norm,
    "silu_and_mul": _compute_silu_and_mul,
}


@contextmanager
def _layer_context() -> Iterator[None]:
    """Set up a vLLM configuration and a fresh session, to build layers without an engine."""
    from vllm.config import CompilationConfig, VllmConfig, set_current_vllm_config

    # With compilation, vLLM would not call the patched norms and activations.
    eager = CompilationConfig(mode=0, custom_ops=["all"])
    with set_current_vllm_config(VllmConfig(compilation_config=eager)), closed_session():
        _form_group()
        yield


@cache
def _form_group() -> None:
    """Initialize a process group of one rank, which vLLM's parallel layers need to exist."""
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    # All processes of a group meet at this file. The only process of this group needs the file
    # during the initialization alone.
    with TemporaryDirectory() as folder:
        init_method = f"file://{Path(folder, 'group')}"
        init_distributed_environment(1, 0, init_method, local_rank=0, backend="gloo")
        initialize_model_parallel()
