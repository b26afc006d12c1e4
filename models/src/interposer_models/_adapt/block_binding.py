"""Layers of a foreign model that are blocks of a decoder, and the layers that compute them.

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
from interposer_models._adapt.attention_names import HELD
from interposer_models._adapt.block_trace import BlockParts, attention_child, trace_block
from interposer_models._adapt.block_watch import Watch
from interposer_models._adapt.module_forward import ModuleForward
from interposer_models._adapt.norm_candidates import find_norm
from interposer_models._adapt.paged_rows import PageRows, find_rows
from interposer_models._adapt.place import Place, notes
from interposer_models._adapt.projections import fill
from interposer_ops.attention import common_page_size
from interposer_ops.layers.decoder_block import DecoderBlock
from interposer_ops.layers.linear import Linear, MergedLinear
from interposer_ops.layers.mlp import GatedMLP
from interposer_ops.layers.norm import RMSNorm
from interposer_ops.layers.self_attention import SelfAttention
from interposer_ops.norms import rms_norm


def bind_blocks(adaptation: Adaptation) -> None:
    """Let layers that are blocks of a decoder be computed at once, where a layer does that.

    Their parts are bound already, and serve all other calls.
    """
    if adaptation.device.type != "cpu" or "transformers" not in sys.modules:
        # The halves of angles are compared at every step, which would wait for another device.
        return
    left: list[Place] = []
    binding = _Binding(adaptation)
    for name, module in adaptation.model.named_modules():
        attention = attention_child(module)
        layers = (adaptation.layers.get((id(child),)) for child in module.children())
        gated = [layer for layer in layers if isinstance(layer, GatedMLP)]
        if attention is None or len(gated) != 1:
            continue
        hidden_size = gated[0].gate_up_proj.in_features
        before = dict(adaptation.places), set(adaptation.done)
        bind = partial(binding.bind, module, name, attention, hidden_size)
        if not adaptation.attempt(module, name, bind):
            left.append(adaptation.places[name])
            adaptation.places, adaptation.done = before
    adaptation.remarks += (
        note.replace("left as it was", "computed part by part") for note in notes(left)
    )


def _rule(config: Config) -> str:
    """Return a rule that a block would not obey, as it has other ops, or its parts other places."""
    for rule in config.kernels:
        op, _, place = rule.partition("@")
        if op in ("*", "ragged_attention") or (place and op in ("rms_norm", "rotary_embedding")):
            return rule
    return ""


class _Binding:
    """The state that the blocks of one model share."""

    def __init__(self, adaptation: Adaptation) -> None:
        from interposer_models._adapt.block import Steps

        self._adaptation = adaptation
        self._steps = Steps()
        self._page_sizes: dict[AttentionSpec, int] = {}
        self._rows: dict[AttentionBackend, PageRows | Verdict] = {}

    def bind(self, module: nn.Module, name: str, attention: str, hidden_size: int) -> str | Verdict:
        """Bind one layer, and return the kernel's name or a refusal."""
        from interposer_models._adapt.block import BlockForward
        from interposer_models._adapt.block_trial import judge_block

        adaptation = self._adaptation
        inner: Any = module._modules[attention]
        if "forward" in vars(module) or not isinstance(
            vars(inner).get("forward", ModuleForward(inner)), ModuleForward
        ):
            return Verdict.refuse("another library put a forward of its own around it")
        if any(id(part) in adaptation.wrapped for part in module.modules()):
            return Verdict.refuse("another library put a forward of its own around a part of it")
        watch = Watch(module, inner)
        changed = watch.change()
        if changed:
            return Verdict.refuse(changed)
        config = getattr(inner, "config", None)
        if config is None or vars(config).get(HELD) != NAME:
            return Verdict.refuse("its attention is none that kernels serve")
        if any(p is not None for m in (module, inner) for p in m._parameters.values()):
            return Verdict.refuse("it has parameters besides those of its parts")
        rule = _rule(adaptation.resolver.config)
        if rule:
            return Verdict.refuse(f"the rule {rule!r} names the kernel of a part")
        parts = trace_block(module, attention, hidden_size)
        if isinstance(parts, Verdict):
            return parts
        block = self._built(module, name, parts, hidden_size)
        if isinstance(block, Verdict):
            return block
        backend = block.self_attn.attn.backend
        if backend not in self._rows:
            self._rows[backend] = find_rows(backend)
        rows = self._rows[backend]
        held = vars(config)

        def serves() -> bool:
            return bool(held.get(HELD) == NAME)

        def tell(reason: str) -> None:
            place = adaptation.places[name]
            said = f"some calls are computed part by part: {reason}"
            said = f"{place.reason}; {said}" if place.reason else said
            adaptation.places[name] = Place(name, place.kind, place.kernel, said)

        known = rows.reason if isinstance(rows, Verdict) else rows
        forward = BlockForward(module, parts, block, known, self._steps, serves, tell)
        verdict = judge_block(module, parts, forward, hidden_size)
        if not verdict:
            return verdict
        # Its parts refuse to be trained and converted.
        adaptation.changes.set(module, "forward", forward)
        forward.watch = watch
        return f"{type(block).__module__.partition('.')[0]}/{type(block).__name__}"

    def _built(
        self, module: nn.Module, name: str, parts: BlockParts, hidden_size: int
    ) -> DecoderBlock | Verdict:
        """Return the block with the kernels that the parts hold."""
        adaptation = self._adaptation

        def part(label: str) -> Any:
            return module.get_submodule(label)

        merged = adaptation.layers.get(
            tuple(id(part(label)) for label in (parts.query, parts.key, parts.value))
        )
        output = adaptation.layers.get((id(part(parts.output)),))
        mlp = adaptation.layers.get((id(part(parts.mlp)),))
        if not isinstance(merged, MergedLinear):
            return Verdict.refuse("its queries, keys and values are no single product")
        if not isinstance(output, Linear) or not isinstance(mlp, GatedMLP):
            return Verdict.refuse("its last projection or its gated MLP is not bound")
        dtype: torch.dtype = part(parts.query).weight.dtype
        norms = self._norms(module, parts, dtype)
        if isinstance(norms, Verdict):
            return norms
        (eps, _), (_, _), *heads = norms
        site = adaptation.site(name, dtype)
        spec = self._spec(parts, adaptation.site(f"{name}.{parts.attention}.attn", dtype))
        biases = [part(parts.query).bias, part(parts.key).bias, part(parts.value).bias]
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
                    part(parts.output).bias is not None,
                ),
                lambda _: mlp,
            )
        if type(block) is DecoderBlock:
            return Verdict.refuse("no installed layer computes a block at once")
        attending = block.self_attn
        for empty, held in ((attending.qkv_proj, merged), (attending.o_proj, output)):
            if type(empty) is not type(held):
                return Verdict.refuse(f"a block has a {type(empty).__name__} in place of a part")
            for parameter in empty._parameters:
                empty._parameters[parameter] = None
            empty.method, empty.kernel, empty.operands = held.method, held.kernel, held.operands
        layers = (block.input_layernorm, block.post_attention_layernorm)
        more = (attending.q_norm, attending.k_norm) if heads else ()
        for layer, (_, weight) in zip((*layers, *more), norms, strict=True):
            assert isinstance(layer, RMSNorm)
            fill(layer, weight=weight)
        return block

    def _norms(
        self, module: nn.Module, parts: BlockParts, dtype: torch.dtype
    ) -> list[tuple[float, Tensor]] | Verdict:
        """Return epsilon and weight of each norm, the per-head norms last."""
        found = []
        for label in (parts.input_norm, parts.post_norm, parts.query_norm, parts.key_norm):
            if not label:
                continue
            part = module.get_submodule(label)
            norm = find_norm(part)
            if norm is None or norm.op is not rms_norm or not norm.weight:
                return Verdict.refuse(f"its {label} is no RMS norm with a weight")
            weight = part._parameters[norm.weight]
            if weight is None or weight.dtype is not dtype:
                return Verdict.refuse(f"its {label} has a weight of another dtype")
            found.append((float(getattr(part, norm.eps)), weight.data))
        for pair in (found[:2], found[2:]):
            if len({eps for eps, _ in pair}) > 1 or len(pair) == 1:
                return Verdict.refuse("its norms differ in their epsilons")
        return found

    def _spec(self, parts: BlockParts, site: Site) -> AttentionSpec:
        """Return the attention request of the block, in pages that the best backend accepts."""

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
