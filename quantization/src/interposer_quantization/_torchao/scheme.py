"""Checkpoints of torchao that are stored as safetensors."""

from __future__ import annotations

from interposer import LinearMethod
from interposer_quantization._scheme import StoredScheme
from interposer_quantization._torchao.config import Settings, Weights
from interposer_quantization._torchao.fp8_linear import TorchAoFp8Linear, TorchAoFp8WeightLinear
from interposer_quantization._torchao.int8_linear import TorchAoInt8Linear
from interposer_quantization._torchao.linear import TorchAoLinear


class TorchAo(StoredScheme):
    """Integers in 8 bits each, or 8-bit floats; inputs as they are, or quantized on the way."""

    method = "torchao"
    settings_class = Settings
    settings: Settings
    mend = "name all of them in 'modules_to_not_convert', or none"

    def _method(self, stored: Weights) -> LinearMethod:
        """Return the method for linear layers that are stored so."""
        plain = stored.inputs == "plain"
        if stored.kind == "float8":
            return TorchAoFp8WeightLinear(None) if plain else TorchAoFp8Linear()
        if plain or not stored.symmetric or stored.inputs_per_scale is not None:
            return TorchAoLinear(stored)
        return TorchAoInt8Linear(stored)
