"""The trials of the properties that kernels declare, on a few small cases."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from interposer import Candidate, CustomOp, Device, Platform, Registry, Request, Verdict
from interposer.errors import described, foreign_errors
from interposer.records import Kernel, PlatformEntry, load_target
from interposer_testing._checks.batch import check_batch_invariance
from interposer_testing._checks.call import Subject
from interposer_testing._checks.compilation import (
    MIN_DYNAMIC_ROWS,
    check_dynamic,
    check_static,
    why_no_compiler,
)
from interposer_testing._checks.exemplar import Exemplar, best_exemplars, has_rows
from interposer_testing._checks.fault import Fault
from interposer_testing._checks.graph import check_capture, check_no_waiting
from interposer_testing._checks.registered_op import check_opcheck
from interposer_testing._checks.repetition import check_determinism, check_threads
from interposer_testing._trials.kernels import Kernels, LocalKernels
from interposer_testing._trials.trial import SEPARABLE_ASPECTS, Aspect, Trial

_TRACER = "aot_eager"
_COMPILER = "inductor"

Check = Callable[[Subject, Exemplar], list[Fault]]


class PropertyTrials:
    """The trials of the kernels of one op in all aspects except numerics.

    opcheck and threads apply to every kernel, all other aspects only to kernels that declare the
    property.
    """

    def __init__(
        self,
        registry: Registry,
        op: CustomOp[..., Any],
        device: Device,
        exemplars: list[Exemplar],
        *,
        quick: bool,
        kernels: Kernels,
    ) -> None:
        self.op = op
        self.device = device
        self.exemplars = exemplars
        self.quick = quick
        self.kernels = kernels
        self.platform, self.no_capture = _platform_with_graphs(registry, device)
        self.no_compiler = "" if quick else why_no_compiler(device.torch_device)

    def trials(self, candidate: Candidate) -> Iterator[Trial]:
        """Yield the trials of one kernel, or of the reference."""
        by_dtype = best_exemplars(
            self.exemplars, lambda exemplar: bool(self._verdict(candidate, exemplar))
        )
        by_dtype = [exemplars[:1] for exemplars in by_dtype[:1]] if self.quick else by_dtype
        properties = candidate.properties
        for index, exemplar in enumerate(exemplars[0] for exemplars in by_dtype):
            is_compiled = bool(properties & {"traceable", "opaque"})
            # In a quick run, the compile trials below replace the tracing test of opcheck.
            check = partial(check_opcheck, traced=not (self.quick and is_compiled))
            yield self._trial(candidate, exemplar, "opcheck", check)
            if is_compiled:
                yield from self._compile_trials(candidate, exemplar, _TRACER)
                if not (index or self.quick):  # inductor takes seconds: once per kernel
                    yield from self._compile_trials(candidate, exemplar, _COMPILER)
        for exemplar in [exemplar for exemplars in by_dtype for exemplar in exemplars]:
            yield self._trial(candidate, exemplar, "threads", check_threads)
            if "deterministic" in properties:
                yield self._trial(candidate, exemplar, "determinism", check_determinism)
            if "batch_invariant" in properties:
                yield self._batch_trial(candidate, exemplar)
            if "graph_safe" in properties:
                yield self._capture_trial(candidate, exemplar)

    def _compile_trials(
        self, candidate: Candidate, exemplar: Exemplar, backend: str
    ) -> Iterator[Trial]:
        no_compiler = self.no_compiler if backend == _COMPILER else ""
        not_dynamic = ""
        if not has_rows(self.op):
            not_dynamic = "the op declares no batched arguments, so it has no number of rows"
        elif exemplar.num_rows < MIN_DYNAMIC_ROWS:
            not_dynamic = f"no small case of the op has {MIN_DYNAMIC_ROWS} rows"
        # In a quick run, the dynamic trial replaces the static one.
        if not_dynamic or not self.quick:
            check = partial(check_static, backend=backend)
            yield self._trial(
                candidate, exemplar, "compile static", check, no_compiler, suffix=backend
            )
        check = partial(check_dynamic, backend=backend)
        not_run = not_dynamic or no_compiler
        yield self._trial(candidate, exemplar, "compile dynamic", check, not_run, suffix=backend)

    def _batch_trial(self, candidate: Candidate, exemplar: Exemplar) -> Trial:
        missing = ""
        if not has_rows(self.op):
            missing = "the op declares no batched arguments, so it has no rows to compare"
        elif exemplar.num_rows < 2:
            missing = "no small case of the op has two rows"
        check = check_batch_invariance
        return self._trial(candidate, exemplar, "batch invariance", check, missing)

    def _capture_trial(self, candidate: Candidate, exemplar: Exemplar) -> Trial:
        checks: list[Check] = []
        if not isinstance(candidate.record, Kernel):
            checks.append(check_no_waiting)
        if self.platform is not None:
            checks.append(partial(check_capture, platform=self.platform))
        missing = "" if checks else self.no_capture
        return self._trial(candidate, exemplar, "graph capture", partial(_all, checks), missing)

    def _trial(
        self,
        candidate: Candidate,
        exemplar: Exemplar,
        aspect: Aspect,
        check: Check,
        not_run: str = "",
        suffix: str = "",
    ) -> Trial:
        # Tracing and capturing need the function in the process that traces.
        kernels = self.kernels if aspect in SEPARABLE_ASPECTS else LocalKernels()
        run = partial(_run, candidate, self.op, self.device.torch_device, check, exemplar, kernels)
        label = ", ".join(filter(None, (exemplar.planned.label, suffix)))
        request = self._request(exemplar)
        return Trial(candidate, request, label, Verdict.accept(), run, aspect, not_run)

    def _verdict(self, candidate: Candidate, exemplar: Exemplar) -> Verdict:
        return candidate.judge(self._request(exemplar))

    def _request(self, exemplar: Exemplar) -> Request:
        device, dtype = self.device, str(exemplar.planned.dtype).removeprefix("torch.")
        return Request(
            "kernel", self.op.name, device.platform, device.capability, dtype, exemplar.dims
        )


def _run(
    candidate: Candidate,
    op: CustomOp[..., Any],
    device: str,
    check: Check,
    exemplar: Exemplar,
    kernels: Kernels,
) -> list[Fault]:
    with kernels.subject(op, candidate, device) as subject, torch.no_grad(), _no_progress_monitor():
        return check(subject, exemplar)


@contextmanager
def _no_progress_monitor() -> Iterator[None]:
    """Keep torch's tracing from starting the monitor thread of tqdm, which never ends.

    A later examination of plugins in this process would count it as a thread of foreign code.
    """
    bars: Any = getattr(sys.modules.get("tqdm"), "tqdm", None)
    if bars is None:
        yield
        return
    before, bars.monitor_interval = bars.monitor_interval, 0
    try:
        yield
    finally:
        bars.monitor_interval = before


def _all(checks: list[Check], subject: Subject, exemplar: Exemplar) -> list[Fault]:
    return [fault for check in checks for fault in check(subject, exemplar)]


def _platform_with_graphs(registry: Registry, device: Device) -> tuple[Platform | None, str]:
    """Return the platform of ``device`` and ""; if graphs cannot be captured, None and why."""
    entries = [r for _, r in registry.records(PlatformEntry) if r.name == device.platform]
    if not entries:
        return (
            None,
            f"no plugin declares the platform {device.platform!r}, which would capture graphs",
        )
    try:
        platform: type[Platform] = load_target(entries[0].target)
        verdict = platform.provides("capture_graph")
        return (platform(), "") if verdict else (None, verdict.reason)
    except foreign_errors() as error:
        return None, f"the platform {device.platform!r} cannot be loaded: {described(error)}"
