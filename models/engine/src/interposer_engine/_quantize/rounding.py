"""Quantization of a model's linear layers, by rounding to nearest or by GPTQ."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from interposer.errors import CheckpointError, ConfigError, UnknownNameError
from interposer_engine._plan import Plan
from interposer_engine._quantize.calibration import CalibratedBlocks, decoder_of
from interposer_engine._quantize.files import (
    DTYPE_NAMES,
    TensorSource,
    layout_bytes,
    read_file,
    write_shard,
)
from interposer_models.decoder import LatentProjection
from interposer_ops.layers.linear import Linear
from interposer_ops.layers.moe.experts import Experts
from interposer_ops.layers.moe.router import Router
from interposer_quantization.writing import (
    Curvature,
    WeightFormat,
    second_order_rounded,
    tensor_peak,
)

_REGEX = "re:"
_GROUP_SIZES = (128, 64, 32, 16)


@dataclass(frozen=True, slots=True)
class Layer:
    """A linear layer of the checkpoint that can be quantized.

    Attributes:
        product: prefix of the model's layer that runs it, alone or merged with others as one
            matmul.
    """

    name: str
    in_features: int
    out_features: int
    product: str


def layers_of(model: nn.Module) -> list[Layer]:
    """List the linear layers of a model in order, with the names that the checkpoint uses.

    Raises: ConfigError: a weight is stored as ``[I, O]``.
    """
    layers = []
    for module in model.modules():
        if isinstance(module, Linear):
            # GPT-2 stores weights transposed.
            if getattr(module._parameters.get("weight"), "stored_transposed", False):
                raise ConfigError(
                    f"the weight of {module.prefix} is stored as [inputs, outputs], which no "
                    "format of quantized weights has. Try: quantize while it loads, "
                    'load(path, quantization="fp8")'
                )
            parent = module.prefix.rpartition(".")[0]
            layers += [
                Layer(f"{parent}.{part}", module.in_features, size, module.prefix)
                for part, size in module.parts.items()
            ]
    return layers


def plain_patterns(model: nn.Module) -> list[str]:
    """Return name patterns of layers that stay unquantized: routers, experts, latent projections.

    Other programs treat the matrices of such layers as linear layers.
    """
    patterns = []
    for module in model.modules():
        if isinstance(module, Experts | Router | LatentProjection):
            name = re.escape(module.prefix.rpartition(".")[2])
            # Experts have submodules in checkpoints; routers and projections are layers themselves.
            end = r"\." if isinstance(module, Experts) else "$"
            patterns.append(rf"{_REGEX}.*\.{name}{end}")
    return list(dict.fromkeys(patterns))


def unused_layers(source: TensorSource) -> list[str]:
    """Return the linear layers of the checkpoint that are not in the model, such as an encoder's.

    Other programs may run these layers, which stay unquantized.
    """
    matrices = [
        name
        for name in source.unused
        if name.endswith(".weight") and len(source.tensors[name].shape) == 2
    ]
    return [name.removesuffix(".weight") for name in matrices]


def unignored_layers(layers: Sequence[Layer], ignore: Sequence[str]) -> list[Layer]:
    """Return the layers that no ``ignore`` entry matches, a full name or ``re:`` with a pattern.

    A pattern after ``re:`` matches at the start of the name, as in the compressed-tensors library.

    Raises:
        UnknownNameError: no layer has the name.
        ConfigError: a pattern matches no layer or is invalid, no layer remains, or layers that run
            as one matmul would be stored in different ways.
    """
    ignored: set[str] = set()
    for pattern in ignore:
        matched = {layer.name for layer in layers if _matches(pattern, layer.name)}
        # A model with tied embeddings has no lm_head, but users may always name it.
        if not matched and pattern != "lm_head":
            _raise_unmatched(pattern, layers)
        ignored |= matched
    remaining = [layer for layer in layers if layer.name not in ignored]
    if not remaining:
        raise ConfigError("--ignore names every linear layer, so nothing is left to quantize")
    # A merged layer can be quantized only as a whole.
    for product in dict.fromkeys(layer.product for layer in remaining):
        parts = [layer.name for layer in layers if layer.product == product]
        ignored_parts = [name for name in parts if name in ignored]
        if ignored_parts:
            raise ConfigError(
                f"--ignore names {', '.join(ignored_parts)}, but not all layers of the same "
                f"matmul: {', '.join(parts)}. Try: name all of them, or none"
            )
    return remaining


def fitting_group_size(layers: Sequence[Layer], default: int) -> int:
    """Return the first common group size that divides all layers' inputs, else ``default``.

    Args:
        default: the group size of the scheme.
    """
    sizes = (size for size in _GROUP_SIZES if size <= default)
    return next(
        (size for size in sizes if not any(layer.in_features % size for layer in layers)), default
    )


def check_groups(layers: Sequence[Layer], chosen: WeightFormat, adjustable: bool) -> None:
    """Raise ConfigError unless the group size divides the inputs of every layer.

    Args:
        adjustable: the scheme supports other group sizes.
    """
    size = chosen.inputs_per_scale
    if size is None:
        return
    undivided = [layer for layer in layers if layer.in_features % size]
    if not undivided:
        return
    endings = sorted({layer.name.rpartition(".")[2] for layer in undivided})
    patterns = " ".join(f"--ignore 're:.*{ending}'" for ending in endings)
    # The largest group size that divides the inputs of all layers.
    common = math.gcd(*(layer.in_features for layer in layers))
    largest = max(n for n in range(1, min(size, common) + 1) if common % n == 0)
    size_hint = f", or --group-size {largest}, which divides all inputs" if adjustable else ""
    more_layers = f" and {len(undivided) - 1} more layers" if len(undivided) > 1 else ""
    raise ConfigError(
        f"{undivided[0].name}{more_layers}: groups of {size} do not divide the "
        f"{undivided[0].in_features} inputs. Try: {patterns}, which leaves them plain{size_hint}"
    )


def _matches(pattern: str, name: str) -> bool:
    if not pattern.startswith(_REGEX):
        return pattern == name
    try:
        return re.match(pattern.removeprefix(_REGEX), name) is not None
    except (re.error, OverflowError, RecursionError) as error:
        raise ConfigError(f"--ignore {pattern!r} is no regular expression: {error}") from None


def _raise_unmatched(pattern: str, layers: Sequence[Layer]) -> None:
    names = [layer.name for layer in layers]
    if pattern.startswith(_REGEX):
        raise ConfigError(
            f"--ignore {pattern!r} matches no linear layer, such as {names[0]}. "
            "Try: begin the pattern with re:.* to match the end of a name"
        )
    is_part_of_name = any(pattern in name for name in names)
    hint = f"Try: --ignore 're:.*{re.escape(pattern)}'" if is_part_of_name else ""
    raise UnknownNameError("layer", pattern, names, hint, "in --ignore")


Progress = Callable[[str, int, int], None]
"""Receives the name of the activity, the amount done and the total."""

_DTYPES = {DTYPE_NAMES[dtype]: dtype for dtype in (torch.bfloat16, torch.float16, torch.float32)}


class RoundedLayers:
    """The quantized tensors of all selected layers, computed for one layer at a time.

    Raises: CheckpointError: the weight of a layer is missing, or has another shape or dtype.
    """

    def __init__(
        self,
        source: TensorSource,
        target_format: WeightFormat,
        layers: Sequence[Layer],
        path: object,
    ) -> None:
        self._source = source
        self._format = target_format
        self._layers = {layer.name: layer for layer in layers}
        self._peaks: dict[str, torch.Tensor] = {}
        self._calibrated: dict[str, Path] = {}
        for layer in layers:
            self._check(layer, path)

    def layer_of(self, tensor: str) -> str | None:
        """Return the selected layer that a weight belongs to; None for any other tensor."""
        layer = tensor.removesuffix(".weight")
        return layer if layer != tensor and layer in self._layers else None

    def layout(self, layer: str) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Return dtype name and shape of every tensor into which a layer is quantized."""
        stored = self._source.tensors[f"{layer}.weight"]
        rows, columns = stored.shape
        return {
            name: (DTYPE_NAMES[tensor.dtype], tuple(tensor.shape))
            for name, tensor in self._format.layout((rows, columns), _DTYPES[stored.dtype]).items()
        }

    def tensors(self, layer: str) -> dict[str, torch.Tensor]:
        """Return the quantized tensors of one layer.

        Raises: CheckpointError: the weight is not finite.
        """
        if layer not in self._calibrated:
            return self._format.rounded(self._weight(layer), self._peak(layer))
        prefix = f"{layer}."
        block_tensors = read_file(self._calibrated[layer])
        return {n.removeprefix(prefix): t for n, t in block_tensors.items() if n.startswith(prefix)}

    def calibrate(
        self,
        folder: Path,
        planned: Plan,
        sequences: Sequence[Sequence[int]],
        act_order: bool,
        progress: Progress,
    ) -> None:
        """Round all weights by GPTQ, block by block, and store each block's tensors in ``folder``.

        Blocks with an existing file are read, not computed again.

        Raises: CheckpointError: a layer's inputs on the text are not finite.
        """
        pairs = self._files(folder, planned)
        self._calibrated = {name: file for file, names in pairs for name in names}
        if all(file.exists() for file, _ in pairs):
            return
        num_done, num_layers = 0, len(self._layers)
        progress("calibrating", num_done, num_layers)
        blocks = CalibratedBlocks(planned, self._source, sequences)
        tensors: dict[str, torch.Tensor] = {}

        def round_layers(
            weights: Mapping[str, torch.Tensor], moments: torch.Tensor
        ) -> list[torch.Tensor]:
            nonlocal num_done
            self._check_finite(weights, moments)
            curvature = Curvature(moments, act_order=act_order)
            dequantized = []
            for name, weight in weights.items():
                dtype = _DTYPES[self._source.tensors[f"{name}.weight"].dtype]
                parts = second_order_rounded(
                    self._format, weight.to(dtype), curvature, self._peak(name)
                )
                tensors.update({f"{name}.{part}": tensor for part, tensor in parts.items()})
                dequantized.append(self._format.read(parts).to(weight.device))
                num_done += 1
                progress("calibrating", num_done, num_layers)
            return dequantized

        for index, (file, names) in enumerate(pairs):
            if file.exists():
                # A resumed run: the block was quantized before, but later blocks need its outputs.
                blocks.skip(index, {name: self._format.read(self.tensors(name)) for name in names})
                num_done += len(names)
                progress("calibrating", num_done, num_layers)
            else:
                # ``round_layers`` fills the dictionary for each layer of the block.
                tensors.clear()
                blocks.quantize(index, names, round_layers)
                write_shard(file, tensors)

    def remaining_bytes(self, folder: Path, planned: Plan) -> int:
        """Return the number of bytes that ``calibrate`` will still write to ``folder``."""
        missing_blocks = [
            names for file, names in self._files(folder, planned) if not file.exists()
        ]
        return sum(layout_bytes(self.layout(name)) for names in missing_blocks for name in names)

    def _files(self, folder: Path, planned: Plan) -> list[tuple[Path, list[str]]]:
        """Return the file of each block, and the layers whose tensors each file stores."""
        pairs = []
        for index, block in enumerate(decoder_of(planned).layers):
            names = [layer.name for layer in layers_of(block) if layer.name in self._layers]
            pairs.append((folder / f"{index}.safetensors", names))
        return pairs

    def _check_finite(self, weights: Mapping[str, torch.Tensor], moments: torch.Tensor) -> None:
        for name, weight in weights.items():
            if not (weight.isfinite().all() and moments.isfinite().all()):
                raise CheckpointError(
                    self._source.tensors[f"{name}.weight"].shard,
                    f"{name} or its inputs on the text are infinite or not a number",
                    "give a sound checkpoint, or leave --calibrate out",
                )

    def _weight(self, layer: str) -> torch.Tensor:
        weight = self._source.read(f"{layer}.weight")
        if not weight.isfinite().all():
            shard = self._source.tensors[f"{layer}.weight"].shard
            raise CheckpointError(
                shard,
                f"tensor '{layer}.weight' has values that are infinite or not a number",
                "copy the checkpoint again",
            )
        return weight

    def _peak(self, layer: str) -> torch.Tensor | None:
        """Return the largest weight magnitude of all layers that run as one matmul with this layer.

        The merged layer has only one tensor scale.
        """
        if not self._format.shares_tensor_scale:
            return None
        product = self._layers[layer].product
        if product not in self._peaks:
            members = [
                name for name, layer_info in self._layers.items() if layer_info.product == product
            ]
            peaks = [tensor_peak(self._weight(name)) for name in members]
            self._peaks[product] = torch.stack(peaks).amax(0)
        return self._peaks[product]

    def _check(self, layer: Layer, path: object) -> None:
        name = f"{layer.name}.weight"
        if name not in self._source.tensors:
            raise CheckpointError(path, f"lacks the tensor {name!r}", "copy the checkpoint again")
        stored = self._source.tensors[name]
        if stored.dtype not in _DTYPES:
            raise CheckpointError(
                stored.shard,
                f"tensor {name!r} is stored as {stored.dtype}, which is no plain weight",
                f"give a model in {', '.join(_DTYPES)}",
            )
        expected = (layer.out_features, layer.in_features)
        if stored.shape != expected:
            raise CheckpointError(
                stored.shard,
                f"tensor {name!r} has shape {list(stored.shape)}, "
                f"the config asks for {list(expected)}",
            )
