"""Communicators over torch.distributed, for any device and any number of hosts."""

from interposer_ops.communicators.ordered import OrderedCommunicator
from interposer_ops.communicators.portable import TorchCommunicator

__all__ = ["OrderedCommunicator", "TorchCommunicator"]
