"""Communicators over torch.distributed, for any device and any number of hosts."""

from interposer_ops.communicators._ordered import OrderedCommunicator
from interposer_ops.communicators._portable import TorchCommunicator

__all__ = ["OrderedCommunicator", "TorchCommunicator"]
