"""Formats that checkpoints are written in, and the methods that round weights to them."""
