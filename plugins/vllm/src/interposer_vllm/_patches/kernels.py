"""The patch that lets vLLM build layers of packed integers without a CPU kernel of vLLM."""

from __future__ import annotations

from interposer import Verdict
from interposer.tooling import HostMember
from interposer_vllm._patch import Patch

__all__ = ["PATCH"]

_KERNELS = "vllm.model_executor.kernels.linear"


def _apply() -> Verdict:
    from vllm.model_executor.kernels.linear import register_linear_kernel
    from vllm.platforms import PlatformEnum

    from interposer_vllm._missing_kernel import MissingKernel

    register_linear_kernel(MissingKernel, PlatformEnum.CPU, "mp")
    return Verdict.accept()


PATCH = Patch(
    name="kernels",
    members=(
        HostMember(
            f"{_KERNELS}:register_linear_kernel", "(kernel_class, platform, kernel_type='mp')"
        ),
        HostMember(
            f"{_KERNELS}:MPLinearLayerConfig",
            "(full_weight_shape, partition_weight_shape, weight_type, act_type, group_size, "
            "zero_points, out_type=None)",
        ),
        HostMember(
            f"{_KERNELS}:MPLinearKernel.__init__",
            "(self, c, w_q_param_name, w_s_param_name, w_zp_param_name=None)",
        ),
        HostMember(f"{_KERNELS}:MPLinearKernel.can_implement", "(c)"),
        HostMember(f"{_KERNELS}:MPLinearKernel.process_weights_after_loading", "(self, layer)"),
        HostMember(f"{_KERNELS}:MPLinearKernel.apply_weights", "(self, layer, x, bias=None)"),
    ),
    apply=_apply,
    scope="Refusals of packed integers without a kernel of vLLM's",
)
