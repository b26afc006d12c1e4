"""Communicators over torch.distributed, for any device and any number of hosts."""

from interposer_ops.communicators._group import ordered_group
from interposer_ops.communicators._ordered import OrderedCommunicator
from interposer_ops.communicators._portable import TorchCommunicator, check_row_counts

__all__ = ["OrderedCommunicator", "TorchCommunicator", "check_row_counts", "ordered_group"]
