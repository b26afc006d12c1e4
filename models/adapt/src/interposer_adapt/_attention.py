"""Attention of adapted models: a kernel for calls with a supported mask pattern, sdpa for others.

``AdaptedAttention`` chooses and checks the kernel of each call. ``plain_attention`` computes calls
with a softcap on scores or with sinks, both unsupported by sdpa.

In a graph of ``torch.compile`` the attention is one op. The graph stores the label of the module.
At run time the op finds the attention by this label, and computes the call as without a compiler.

Dimensions: B sequences, N heads, K kv heads, D size of a query and key, E size of a value, T query
tokens, U key tokens.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from interposer import Verdict
from interposer.errors import NoCandidateError
from interposer_adapt._adaptation import Adaptation, Place, kernel_name
from interposer_adapt._agreement import check_agreement, random_normals
from interposer_adapt._attention_options import unknown_option
from interposer_adapt._forwards import INTERCEPTOR, AttentionCall
from interposer_adapt._masks import (
    MaskFacts,
    Pattern,
    as_rows,
    mask_facts,
    ragged_layout,
    read_mask,
)
from interposer_ops.attention import ragged_attention

_NAMESPACE = "interposer_adapted"
_OP = (
    "attention(Tensor query, Tensor key, Tensor value, Tensor? mask, str label, float? scaling, "
    "bool? is_causal, float? softcap, Tensor? sinks) -> Tensor"
)


class AttentionOwner(Protocol):
    """Object that computes the attention of a model's modules for a compiled graph."""

    def compute(self, name: str, *args: Any) -> Tensor:
        """Compute the attention of the module ``name``; return ``[B, T, N, E]``."""
        ...


# Weak, so that a compiled graph does not keep a model alive.
_owners: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
_numbers = itertools.count()
_libraries: list[torch.library.Library] = []  # an op is unregistered with its library


def register_labels(owner: AttentionOwner, names: dict[int, str]) -> dict[int, str]:
    """Register an attention for compiled graphs; return the graph's label of each module, by id."""
    _define()
    number = str(next(_numbers))
    _owners[number] = owner
    return {key: f"{number}:{name}" for key, name in names.items()}


def traced_attention(
    label: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    is_causal: bool | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Compute attention ``[B, T, N, E]`` as one op of a graph that ``torch.compile`` traces."""
    out: Tensor = torch.ops.interposer_adapted.attention(
        query, key, value, mask, label, scaling, is_causal, softcap, sinks
    )
    return out


def is_traceable(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return True if an attention call can be traced as one op of a compiled graph.

    The op reads the mask's values, which would synchronize within captured graphs on another
    device. An exported program may run in a process where the label is not registered.
    """
    if torch.compiler.is_exporting() or query.device.type != "cpu":
        return False
    return not (query.requires_grad or key.requires_grad or value.requires_grad)


def _define() -> None:
    if _libraries:
        return
    library = torch.library.Library(_NAMESPACE, "FRAGMENT")
    _libraries.append(library)
    library.define(_OP)

    def attention(
        query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, label: str, *options: Any
    ) -> Tensor:
        number, _, name = label.partition(":")
        owner: AttentionOwner = _owners[number]
        return owner.compute(name, query, key, value, mask, *options)

    def fake(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Tensor:
        batch, num_heads, num_queries, _size = query.shape
        return query.new_empty(batch, num_queries, num_heads, value.shape[3])

    torch.library.impl(f"{_NAMESPACE}::attention", "cpu", attention, lib=library)
    torch.library.register_fake(f"{_NAMESPACE}::attention", fake, lib=library)


ATTENTION_ATTRIBUTE = "_interposer_attention"
_LABEL_ATTRIBUTE = "_interposer_label"
# Set on modules whose softcap and sinks ("score options") must be computed.
_SCORE_OPTIONS_ATTRIBUTE = "_interposer_caps"
Result = tuple[Tensor, Tensor | None]
Attend = Callable[..., Result]

_FULL = Pattern(False)
_CAUSAL = Pattern(True)


class _KernelKey(NamedTuple):
    """The properties of an attention call that determine the choice of its kernel."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    value_size: int
    causal: bool
    windowed: bool
    softcapped: bool
    sinks: bool
    dtype: torch.dtype


class AdaptedAttention:
    """Attention function of one adapted model: runs a kernel, or delegates the call to sdpa.

    Args:
        sdpa: the attention function that serves delegated calls.
    """

    def __init__(self, adaptation: Adaptation, sdpa: Attend) -> None:
        self._adaptation = adaptation
        self._sdpa = sdpa
        self._names = {id(module): name for name, module in adaptation.model.named_modules()}
        self._kernels: dict[_KernelKey, tuple[Callable[..., Tensor] | None, str]] = {}
        self._recorded_reasons: dict[tuple[int, str], None] = {}

    def __deepcopy__(self, memo: object) -> AdaptedAttention:
        return self

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        scaling: float | None,
        is_causal: bool | None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Result | str:
        """Compute attention output and weights, or return the reason why sdpa must do so."""
        num_heads, num_queries, head_size = query.shape[1:]
        num_kv_heads, num_keys, value_size = value.shape[1:]
        facts = None
        if mask is not None:
            facts = mask_facts(mask) or read_mask(mask, query.shape[0], num_queries, num_keys)
            if facts is not None and facts.num_keys < num_keys:
                # The cache has spare capacity: the mask hides all keys after these.
                key, value = key[:, :, : facts.num_keys], value[:, :, : facts.num_keys]
                num_keys = facts.num_keys
        if mask is None:
            pattern = _CAUSAL if _is_causal(module, query, is_causal) else _FULL
            if pattern.causal and num_keys > num_queries:
                # The cache has spare capacity: keys after the queries are not filled yet.
                key, value = key[:, :, :num_queries], value[:, :, :num_queries]
                num_keys = num_queries
        elif facts is None:
            return "its mask has no pattern that kernels support"
        elif (facts.num_queries, facts.num_keys) != (num_queries, num_keys):
            return "its mask has another number of queries or keys"
        else:
            pattern = facts.pattern
        if reason := _unsupported_reason(query, key, value, self._adaptation.device):
            return reason
        # A window that covers all keys hides none, so that no windowed kernel is needed.
        windowed = pattern.window is not None and pattern.window <= num_keys
        kernel_key = _KernelKey(
            num_heads,
            num_kv_heads,
            head_size,
            value_size,
            pattern.causal,
            windowed,
            softcap is not None,
            sinks is not None,
            query.dtype,
        )
        kernel, reason = self._kernel(module, kernel_key)
        if kernel is None:
            return reason
        window = pattern.window if windowed else None
        scale = head_size**-0.5 if scaling is None else scaling
        states, options = (query, key, value), (scale, softcap, sinks)
        return _run_kernel(kernel, *states, pattern.causal, window, facts, *options), None

    def compute(
        self,
        name: str,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        scaling: float | None,
        is_causal: bool | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """Compute an attention call within a compiled graph, ``[B, T, N, E]``."""
        module = self._adaptation.model.get_submodule(name)
        states = query, key, value, mask, scaling, is_causal
        result = self(module, *states, softcap, sinks)
        if isinstance(result, str):
            self.delegate(module, result)
            result = _fallback(module, self._sdpa, *states, {"softcap": softcap, "s_aux": sinks})
        return result[0].contiguous()

    def _kernel(
        self, module: nn.Module, key: _KernelKey
    ) -> tuple[Callable[..., Tensor] | None, str]:
        """Return the attention kernel and its name; without a kernel, None and the reason."""
        if key not in self._kernels:
            self._kernels[key] = self._bind(self._name(module), key)
        kernel_and_name = self._kernels[key]
        if kernel_and_name[0] is not None:
            self._record(module, kernel_and_name[1], "")
        return kernel_and_name

    def _bind(self, name: str, key: _KernelKey) -> tuple[Callable[..., Tensor] | None, str]:
        dims = dict(zip(_KernelKey._fields[:-1], key[:-1], strict=True))
        site = self._adaptation.site(name, key.dtype)
        try:
            bound_kernel = site.bind_kernel(ragged_attention, **dims, alibi=False)
        except NoCandidateError as error:
            return None, str(error)
        verdict = _check_kernel(bound_kernel.function, key, self._adaptation.device, self._sdpa)
        if not verdict:
            return None, f"{kernel_name(bound_kernel.choice)}: {verdict.reason}"
        return bound_kernel.function, kernel_name(bound_kernel.choice)

    def delegate(self, module: nn.Module, reason: str) -> None:
        """Record that sdpa, or plain operations for softcaps and sinks, compute a call."""
        has_score_options = vars(module).get(_SCORE_OPTIONS_ATTRIBUTE)
        substitute = "plain operations" if has_score_options else "sdpa"
        self._record(module, "", f"calls are delegated to {substitute}: {reason}")

    def _name(self, module: nn.Module) -> str:
        name: str | None = self._names.get(id(module))
        return type(module).__name__ if name is None else name

    def _record(self, module: nn.Module, kernel: str, reason: str) -> None:
        # Called at every attention call: each kernel and reason is recorded once.
        if (id(module), kernel or reason) in self._recorded_reasons:
            return
        self._recorded_reasons[id(module), kernel or reason] = None
        name, results = self._name(module), self._adaptation.results
        previous = results.get(name)
        if previous is not None:
            kernel = kernel or previous.kernel
            reason = "; ".join(dict.fromkeys(filter(None, (previous.reason, reason))))
        results[name] = Place(name, type(module).__name__, kernel, reason)


def assign_attention(attention: AdaptedAttention, adaptation: Adaptation) -> None:
    """Set ``attention`` as the attention of the model's modules until the changes are undone."""
    names = {id(module): name for name, module in adaptation.model.named_modules()}
    labels_by_id = register_labels(attention, names)
    for module in adaptation.model.modules():
        adaptation.changes.set(module, ATTENTION_ATTRIBUTE, attention)
        adaptation.changes.set(module, _LABEL_ATTRIBUTE, labels_by_id[id(module)])


def allow_softcap_and_sinks(adaptation: Adaptation, config: object) -> None:
    """Let attention calls of the modules with this configuration pass softcaps and sinks.

    For classes that refuse sdpa. sdpa ignores softcaps and sinks, so that a model that selects sdpa
    expects results without both.
    """
    for module in adaptation.model.modules():
        if getattr(module, "config", None) is config:
            adaptation.changes.set(module, _SCORE_OPTIONS_ATTRIBUTE, True)


def make_attention(sdpa: Attend) -> Attend:
    """Return the attention function to register with transformers; ``sdpa`` is the fallback."""

    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        **options: Any,
    ) -> Result:
        interceptor = None if is_compiling() else INTERCEPTOR.get()
        if interceptor is not None:
            call = AttentionCall(
                module, query, key, value, attention_mask, scaling, is_causal, options
            )
            return interceptor.attend(call), None
        attributes = vars(module)
        owner: AdaptedAttention | None = attributes.get(ATTENTION_ATTRIBUTE)
        takes_score_options = bool(attributes.get(_SCORE_OPTIONS_ATTRIBUTE))
        score_options = options.get("softcap"), options.get("s_aux")
        if not takes_score_options:
            score_options = None, None
        states = query, key, value, attention_mask, scaling, is_causal
        if owner is not None:
            outcome: Result | str = ""
            if dropout:
                outcome = "it applies dropout"
            elif unknown := unknown_option(options):
                outcome = f"its attention is passed {unknown!r}, which no kernel takes"
            elif options.get("softcap") is not None and not takes_score_options:
                outcome = "it caps its scores, which sdpa does not"
            elif options.get("output_attentions") and takes_score_options:
                outcome = "its attention weights are requested"
            elif not is_compiling():
                outcome = owner(module, *states, *score_options)
            elif is_traceable(query, key, value):
                label = attributes[_LABEL_ATTRIBUTE]
                return traced_attention(label, *states, *score_options), None
            if not isinstance(outcome, str):
                return outcome
            if not is_compiling():
                # No record under torch.compile: delegate changes Python state, which a graph cannot
                # repeat.
                owner.delegate(module, outcome)
        return _fallback(module, sdpa, *states, options, dropout)

    return attention


def plain_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float,
    causal: bool,
    softcap: float | None,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Compute the attention and the attention weights in float32 or wider.

    weights = softmax(cap(scale * q k^T) + mask) with cap(s) = softcap * tanh(s / softcap). A sink
    is one more score in the softmax, without a value.

    Args:
        mask: ``[B, 1, T, U]``, bool or added to scores. None: all keys, or with ``causal`` the keys
            up to each query.
    Returns: ``[B, T, N, E]``, dtype of ``query``; ``[B, N, T, U]``.
    """
    groups = query.shape[1] // key.shape[1]
    wide = torch.promote_types(query.dtype, torch.float32)
    keys = key.repeat_interleave(groups, 1).to(wide)
    values = value.repeat_interleave(groups, 1).to(wide)
    scores = query.to(wide) @ keys.transpose(2, 3) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is None and causal:
        mask = torch.ones(scores.shape[2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None and mask.dtype is torch.bool:
        scores = scores.masked_fill(~mask, torch.finfo(wide).min)
    elif mask is not None:
        scores = scores + mask
    if sinks is not None:
        column = sinks.to(wide).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], -1)
    weights = scores.softmax(-1)[..., : key.shape[2]]
    out = (weights @ values).to(query.dtype)
    return out.transpose(1, 2).contiguous(), weights.to(query.dtype)


def _fallback(
    module: nn.Module,
    sdpa: Attend,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    is_causal: bool | None,
    options: Mapping[str, Any],
    dropout: float = 0.0,
) -> Result:
    """Compute attention by sdpa, or by plain operations if there are softcaps or sinks."""
    if vars(module).get(_SCORE_OPTIONS_ATTRIBUTE) and not dropout:
        if unknown := unknown_option(options):
            raise NotImplementedError(
                f"The attention of {type(module).__name__} is passed {unknown!r}, which no kernel "
                "takes. Try: leave it out of the call, or adapted.restore()"
            )
        scale = query.shape[3] ** -0.5 if scaling is None else scaling
        causal = _is_causal(module, query, is_causal)
        score_options = options.get("softcap"), options.get("s_aux")
        return plain_attention(query, key, value, mask, scale, causal, *score_options)
    if options.get("softcap") is None:
        options = {name: option for name, option in options.items() if name != "softcap"}
    return sdpa(
        module,
        query,
        key,
        value,
        mask,
        dropout=dropout,
        scaling=scaling,
        is_causal=is_causal,
        **options,
    )


def _is_causal(module: nn.Module, query: Tensor, is_causal: bool | None) -> bool:
    """Return whether an attention call without a mask is causal, by argument or by module."""
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    return bool(causal) and query.shape[2] > 1


def _unsupported_reason(query: Tensor, key: Tensor, value: Tensor, device: torch.device) -> str:
    """Return the reason why an attention kernel cannot read the tensors, or ""."""
    if not query.dtype == key.dtype == value.dtype:
        return "query, key and value differ in their dtype"
    if query.device.type != device.type:
        return f"it runs on {query.device}"
    if query.requires_grad or key.requires_grad or value.requires_grad:
        return "it records gradients"
    if query.shape[0] != key.shape[0] or key.shape[:3] != value.shape[:3]:
        return "query, key and value are of different batches"
    if not (query.shape[0] and query.shape[2] and key.shape[2]) or query.shape[1] % key.shape[1]:
        return "it is empty, or its heads share no keys evenly"
    return ""


def _run_kernel(
    kernel: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    causal: bool,
    window: int | None,
    facts: MaskFacts | None,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Run the kernel of ``ragged_attention`` on a padded batch, ``[B, T, N, E]``."""
    batch, num_heads, num_queries, _ = query.shape
    num_keys = key.shape[2]
    queries = query.transpose(1, 2).reshape(batch * num_queries, num_heads, -1)
    (keys, values), sequence_rows = as_rows((key, value))
    runs = None if facts is None else facts.runs
    batch_layout = ragged_layout(
        batch, num_queries, num_keys, sequence_rows, runs, causal, query.device
    )
    if sinks is not None:
        # Sinks are parameters, which may require gradients; kernels are bound for one dtype.
        sinks = sinks.detach().to(query.dtype)
    out = kernel(queries, keys, values, *batch_layout, scale, causal, window, softcap, sinks, None)
    return out.view(batch, num_queries, num_heads, -1)


_TRIAL_SOFTCAP = 1.5
_TRIAL_SIZES = ((1, 1, 7), (2, 5, 9), (2, 6, 6))  # B, T, U: decode, chunk after a prefix, prefill


def _check_kernel(
    kernel: Callable[..., Tensor], key: _KernelKey, device: torch.device, sdpa: Attend
) -> Verdict:
    """Refuse an attention kernel that disagrees with sdpa on small masked batches."""
    window = 3 if key.windowed else None
    for batch, num_queries, num_keys in _TRIAL_SIZES:
        sizes = (
            (key.num_heads, num_queries, key.head_size),
            (key.num_kv_heads, num_keys, key.head_size),
            (key.num_kv_heads, num_keys, key.value_size),
        )
        query, keys, values = (random_normals((batch, *size), key.dtype, device) for size in sizes)
        distance = torch.arange(num_queries)[:, None] + num_keys - num_queries
        distance = distance - torch.arange(num_keys)
        visible = distance >= 0 if key.causal else torch.ones_like(distance, dtype=torch.bool)
        if window is not None:
            visible = visible & (distance.abs() < window)
        mask = visible[None, None].to(device)
        score_options: tuple[float | None, Tensor | None] = (None, None)
        if key.softcapped or key.sinks:
            cap = _TRIAL_SOFTCAP if key.softcapped else None
            sinks = random_normals((key.num_heads,), key.dtype, device) if key.sinks else None
            score_options = cap, sinks
            expected, _ = plain_attention(query, keys, values, mask, 0.25, False, *score_options)
        else:
            # sdpa repeats kv heads only for modules that name num_key_value_groups.
            groups = key.num_heads // key.num_kv_heads
            wide = (keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1))
            expected, _ = sdpa(nn.Module(), query, *wide, mask, scaling=0.25, is_causal=False)
        actual = _run_kernel(
            kernel, query, keys, values, key.causal, window, None, 0.25, *score_options
        )
        largest = float(values.abs().max())
        reduction = num_keys + key.head_size
        verdict = check_agreement(
            ragged_attention.tolerance, expected, actual, reduction, largest, largest
        )
        if not verdict:
            return verdict
    return Verdict.accept()
