"""Binding of transformer layers that match the standard decoder block.

Dimensions: B sequences, T tokens, H hidden size, D head size.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from interposer import AttentionBackend, AttentionSpec, Config, Site, Verdict
from interposer_models._adapt.adaptation import Adaptation
from interposer_models._adapt.attention_name import NAME
from interposer_models._adapt.attention_registration import ATTENTION_FIELD
from interposer_models._adapt.block_trace import BlockParts, attention_child, trace_block
from interposer_models._adapt.block_watch import Watch
from interposer_models._adapt.module_forward import ModuleForward
from interposer_models._adapt.norm_candidates import find_norm
from interposer_models._adapt.paged_rows import PageIndex, find_page_index
from interposer_models._adapt.place import Place, notes
from interposer_models._adapt.projections import set_weights
from interposer_ops.attention import common_page_size
from interposer_ops.layers.decoder_block import DecoderBlock
from interposer_ops.layers.linear import Linear, MergedLinear
from interposer_ops.layers.mlp import GatedMLP
from interposer_ops.layers.norm import RMSNorm
from interposer_ops.layers.self_attention import SelfAttention
from interposer_ops.norms import rms_norm


def bind_blocks(adaptation: Adaptation) -> None:
    """Bind layers that one decoder block can compute.

    The parts of a layer are bound already, and serve the calls that the block does not support.
    """
    if adaptation.device.type != "cpu" or "transformers" not in sys.modules:
        # Each step compares the halves of the rotary tables, which would synchronize with a device.
        return
    skipped: list[Place] = []
    binder = _BlockBinder(adaptation)
    for name, module in adaptation.model.named_modules():
        attention = attention_child(module)
        layers = (adaptation.layers_by_modules.get((id(child),)) for child in module.children())
        gated = [layer for layer in layers if isinstance(layer, GatedMLP)]
        if attention is None or len(gated) != 1:
            continue
        hidden_size = gated[0].gate_up_proj.in_features
        results, handled_ids = dict(adaptation.results), set(adaptation.handled_ids)
        bind = partial(binder.bind, module, name, attention, hidden_size)
        if not adaptation.attempt(module, name, bind):
            skipped.append(adaptation.results[name])
            adaptation.results, adaptation.handled_ids = results, handled_ids
    adaptation.notes += (
        note.replace("left as it was", "computed part by part") for note in notes(skipped)
    )


def _conflicting_rule(config: Config) -> str:
    """Return a kernel rule for a part that a block would ignore, or ""."""
    for rule in config.kernels:
        op, _, place = rule.partition("@")
        if op in ("*", "ragged_attention") or (place and op in ("rms_norm", "rotary_embedding")):
            return rule
    return ""


class _BlockBinder:
    """Binds the blocks of one model, with the page sizes and tables that the blocks share."""

    def __init__(self, adaptation: Adaptation) -> None:
        from interposer_models._adapt.block import StepCache

        self._adaptation = adaptation
        self._steps = StepCache()
        self._page_sizes: dict[AttentionSpec, int] = {}
        self._page_indexes: dict[AttentionBackend, PageIndex | Verdict] = {}

    def bind(self, module: nn.Module, name: str, attention: str, hidden_size: int) -> str | Verdict:
        """Bind one layer, and return the block's name or a refusal."""
        from interposer_models._adapt.block import BlockForward
        from interposer_models._adapt.block_trial import check_block

        adaptation = self._adaptation
        inner: Any = module._modules[attention]
        if "forward" in vars(module) or not isinstance(
            vars(inner).get("forward", ModuleForward(inner)), ModuleForward
        ):
            return Verdict.refuse("another library wrapped its forward")
        if any(id(part) in adaptation.wrapped_ids for part in module.modules()):
            return Verdict.refuse("another library wrapped the forward of a part of it")
        watch = Watch(module, inner)
        change = watch.describe_change()
        if change:
            return Verdict.refuse(change)
        config = getattr(inner, "config", None)
        if config is None or vars(config).get(ATTENTION_FIELD) != NAME:
            return Verdict.refuse("its attention is not routed to kernels")
        if any(p is not None for m in (module, inner) for p in m._parameters.values()):
            return Verdict.refuse("it has parameters in addition to those of its parts")
        conflicting_rule = _conflicting_rule(adaptation.resolver.config)
        if conflicting_rule:
            return Verdict.refuse(f"the rule {conflicting_rule!r} names the kernel of a part")
        parts = trace_block(module, attention, hidden_size)
        if isinstance(parts, Verdict):
            return parts
        block = self._build_block(module, name, parts, hidden_size)
        if isinstance(block, Verdict):
            return block
        backend = block.self_attn.attn.backend
        if backend not in self._page_indexes:
            self._page_indexes[backend] = find_page_index(backend)
        page_index = self._page_indexes[backend]
        config_attributes = vars(config)

        def is_routed() -> bool:
            return bool(config_attributes.get(ATTENTION_FIELD) == NAME)

        def report(reason: str) -> None:
            place = adaptation.results[name]
            remark = f"some calls are computed part by part: {reason}"
            remark = f"{place.reason}; {remark}" if place.reason else remark
            adaptation.results[name] = Place(name, place.kind, place.kernel, remark)

        page_index_or_reason = page_index.reason if isinstance(page_index, Verdict) else page_index
        forward = BlockForward(
            module, parts, block, page_index_or_reason, self._steps, is_routed, report
        )
        verdict = check_block(module, parts, forward, hidden_size)
        if not verdict:
            return verdict
        # No _refuse_training here: the parts of the block refuse training and conversion already.
        adaptation.changes.set(module, "forward", forward)
        forward.watch = watch
        return f"{type(block).__module__.partition('.')[0]}/{type(block).__name__}"

    def _build_block(
        self, module: nn.Module, name: str, parts: BlockParts, hidden_size: int
    ) -> DecoderBlock | Verdict:
        """Return a decoder block that uses the kernels of the bound parts."""
        adaptation = self._adaptation

        def submodule(label: str) -> Any:
            return module.get_submodule(label)

        merged = adaptation.layers_by_modules.get(
            tuple(id(submodule(label)) for label in (parts.query, parts.key, parts.value))
        )
        output = adaptation.layers_by_modules.get((id(submodule(parts.output)),))
        mlp = adaptation.layers_by_modules.get((id(submodule(parts.mlp)),))
        if not isinstance(merged, MergedLinear):
            return Verdict.refuse("its queries, keys and values are not one merged matmul")
        if not isinstance(output, Linear) or not isinstance(mlp, GatedMLP):
            return Verdict.refuse("its last projection or its gated MLP is not bound")
        dtype: torch.dtype = submodule(parts.query).weight.dtype
        norms = self._norms(module, parts, dtype)
        if isinstance(norms, Verdict):
            return norms
        (eps, _), (_, _), *heads = norms
        site = adaptation.site(name, dtype)
        spec = self._spec(parts, adaptation.site(f"{name}.{parts.attention}.attn", dtype))
        biases = [
            submodule(parts.query).bias,
            submodule(parts.key).bias,
            submodule(parts.value).bias,
        ]
        with torch.device("meta"):
            block = DecoderBlock(
                site,
                hidden_size,
                eps,
                lambda at: SelfAttention(
                    at,
                    spec,
                    hidden_size,
                    parts.head_size,
                    heads[0][0] if heads else None,
                    any(bias is not None for bias in biases),
                    submodule(parts.output).bias is not None,
                ),
                lambda _: mlp,
            )
        # The standard class runs its parts one by one, as the transformers layer does already.
        if type(block) is DecoderBlock:
            return Verdict.refuse("no installed layer computes a block at once")
        self_attention = block.self_attn
        for block_layer, bound_layer in (
            (self_attention.qkv_proj, merged),
            (self_attention.o_proj, output),
        ):
            if type(block_layer) is not type(bound_layer):
                return Verdict.refuse(
                    f"a block has a {type(block_layer).__name__} in place of a part"
                )
            # The block shares kernels and packed constants of the bound parts: no weight is packed
            # twice.
            for parameter in block_layer._parameters:
                block_layer._parameters[parameter] = None
            block_layer.method, block_layer.kernel, block_layer.operands = (
                bound_layer.method,
                bound_layer.kernel,
                bound_layer.operands,
            )
        layers = (block.input_layernorm, block.post_attention_layernorm)
        head_norms = (self_attention.q_norm, self_attention.k_norm) if heads else ()
        for layer, (_, weight) in zip((*layers, *head_norms), norms, strict=True):
            assert isinstance(layer, RMSNorm)
            set_weights(layer, weight=weight)
        return block

    def _norms(
        self, module: nn.Module, parts: BlockParts, dtype: torch.dtype
    ) -> list[tuple[float, Tensor]] | Verdict:
        """Return epsilon and weight of each norm: input, post-attention, query, key."""
        norms = []
        for label in (parts.input_norm, parts.post_norm, parts.query_norm, parts.key_norm):
            if not label:
                continue
            norm_module = module.get_submodule(label)
            norm = find_norm(norm_module)
            if norm is None or norm.op is not rms_norm or not norm.weight:
                return Verdict.refuse(f"its {label} is no RMS norm with a weight")
            weight = norm_module._parameters[norm.weight]
            if weight is None or weight.dtype is not dtype:
                return Verdict.refuse(f"its {label} has a weight of another dtype")
            norms.append((float(getattr(norm_module, norm.eps)), weight.data))
        for pair in (norms[:2], norms[2:]):
            if len({eps for eps, _ in pair}) > 1 or len(pair) == 1:
                return Verdict.refuse("its norms differ in their epsilons")
        return norms

    def _spec(self, parts: BlockParts, site: Site) -> AttentionSpec:
        """Return the attention request of the block with the backends' common page size."""

        def spec(page_size: int) -> AttentionSpec:
            return AttentionSpec(
                num_heads=parts.num_heads,
                num_kv_heads=parts.num_kv_heads,
                head_size=parts.head_size,
                dtype=site.dtype,
                cache_dtype=site.dtype,
                page_size=page_size,
                scale=parts.scale,
                window_tokens=parts.window_tokens,
            )

        single = spec(1)
        if single not in self._page_sizes:
            resolver = self._adaptation.resolver
            self._page_sizes[single] = common_page_size(resolver, [(single, site)])
        return spec(self._page_sizes[single])
