"""Communicators over torch.distributed, for any device and any number of hosts."""

from interposer_ops.communicators._group import ordered_group
from interposer_ops.communicators._ordered import OrderedCommunicator
from interposer_ops.communicators._portable import TorchCommunicator

__all__ = ["OrderedCommunicator", "TorchCommunicator", "ordered_group"]
