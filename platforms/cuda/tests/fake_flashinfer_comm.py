"""Stand-ins for the functions of flashinfer.comm, for two ranks that hold equal tensors.

Signatures: those of flashinfer-python 0.7.2, limited to the used parameters.
"""

# mypy: ignore-errors
from types import ModuleType, SimpleNamespace

import torch

from interposer_ops.norms import fused_add_rms_norm


class Workspace:
    """Room for sums, which says what it was made of."""

    def __init__(self, facts):
        self.facts = facts
        self.ipc_handles = [[0, 0], [0, 0], [0, 0]]
        self.destroyed = 0

    def destroy(self):
        self.destroyed += 1


class Package(ModuleType):
    """The module; its kernels take what the real ones take."""

    AllReduceFusionPattern = SimpleNamespace(kAllReduce=0, kARResidualRMSNorm=1)

    def __init__(self):
        super().__init__("flashinfer.comm")
        self.made = []
        self.freed = []
        self.calls = []

    def create_allreduce_fusion_workspace(
        self, backend="auto", world_size=None, rank=None, max_token_num=None, hidden_dim=None,
        dtype=None, gpus_per_node=None, comm_backend=None, force_oneshot_support=False, group=None,
    ):  # fmt: skip
        self.made.append(Workspace(locals()))
        return self.made[-1]

    def allreduce_fusion(
        self, input, workspace, pattern, launch_with_pdl=False, trigger_completion_at_end=True,
        output=None, residual_out=None, norm_out=None, residual_in=None, rms_gamma=None,
        rms_eps=1e-6, use_oneshot=None, fp32_acc=False,
    ):  # fmt: skip
        rows, hidden = input.shape
        facts = workspace.facts
        assert (facts["dtype"] == torch.float32) == (input.dtype == torch.float32)
        assert input.numel() <= facts["max_token_num"] * facts["hidden_dim"]
        threads = hidden * input.itemsize // 16
        assert hidden * input.itemsize % 16 == 0
        assert 8 <= threads <= 1024 or (threads % 8 == 0 and threads <= 8192)
        tensors = [input, output, residual_out, norm_out, residual_in, rms_gamma]
        for tensor in (tensor for tensor in tensors if tensor is not None):
            assert tensor.is_contiguous()
            assert tensor.data_ptr() % 16 == 0
            assert tensor.dtype == input.dtype
            assert tensor.shape[-1] == hidden
        assert fp32_acc
        self.calls.append((pattern, (rows, hidden)))
        if pattern == 0:
            output.copy_(input * 2)
            return output
        normed, total = fused_add_rms_norm(input * 2, residual_in, rms_gamma, rms_eps)
        residual_out.copy_(total)
        norm_out.copy_(normed)
        return norm_out

    def trtllm_destroy_ipc_workspace_for_all_reduce_fusion(self, workspace, group=None):
        self.freed.append(workspace)
