"""The trials of kernels' declared properties, on few small cases."""

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
from interposer_testing._trials.trial import Aspect, Trial

_TRACER = "aot_eager"
_COMPILER = "inductor"

Check = Callable[[Subject, Exemplar], list[Fault]]


class Promises:
    """The aspects of the kernels of one op besides their results.

    Some are asked of every kernel, as an op of torch's registry and in threads; the others only
    where the record promises them.
    """

    def __init__(
        self,
        registry: Registry,
        op: CustomOp[..., Any],
        device: Device,
        found: list[Exemplar],
        *,
        quick: bool,
    ) -> None:
        self.op = op
        self.device = device
        self.found = found
        self.quick = quick
        self.platform, self.no_capture = _capturing(registry, device)
        self.no_compiler = "" if quick else why_no_compiler(device.torch_device)

    def trials(self, candidate: Candidate) -> Iterator[Trial]:
        """Yield the trials of one kernel, or of the reference."""
        by_dtype = best_exemplars(
            self.found, lambda exemplar: bool(self._verdict(candidate, exemplar))
        )
        by_dtype = [few[:1] for few in by_dtype[:1]] if self.quick else by_dtype
        properties = candidate.properties
        for number, exemplar in enumerate(few[0] for few in by_dtype):
            is_traced = bool(properties & {"traceable", "opaque"})
            # What is compiled below need not be traced here as well where time is short.
            checked = partial(check_opcheck, traced=not (self.quick and is_traced))
            yield self._trial(candidate, exemplar, "opcheck", checked)
            if is_traced:
                yield from self._compile_trials(candidate, exemplar, _TRACER)
                if not (number or self.quick):  # it takes seconds
                    yield from self._compile_trials(candidate, exemplar, _COMPILER)
        for exemplar in [exemplar for few in by_dtype for exemplar in few]:
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
        absent = self.no_compiler if backend == _COMPILER else ""
        fixed = ""
        if not has_rows(self.op):
            fixed = "the op declares no batched arguments, whose number could vary"
        elif exemplar.num_rows < MIN_DYNAMIC_ROWS:
            fixed = f"no small case of the op has {MIN_DYNAMIC_ROWS} rows"
        # What is traced with a number of rows that varies is not traced with a fixed one as well
        # where time is short.
        if fixed or not self.quick:
            static = partial(check_static, backend=backend)
            yield self._trial(candidate, exemplar, "compile static", static, absent, suffix=backend)
        dynamic = partial(check_dynamic, backend=backend)
        absent = fixed or absent
        yield self._trial(candidate, exemplar, "compile dynamic", dynamic, absent, suffix=backend)

    def _batch_trial(self, candidate: Candidate, exemplar: Exemplar) -> Trial:
        missing = ""
        if not has_rows(self.op):
            missing = "the op declares no batched arguments, so that it says nothing of rows"
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
        run = partial(_run, candidate, self.op, self.device.torch_device, check, exemplar)
        label = ", ".join(filter(None, (exemplar.planned.label, suffix)))
        request = self._request(exemplar)
        return Trial(candidate, request, label, Verdict.accept(), run, aspect, not_run)

    def _verdict(self, candidate: Candidate, exemplar: Exemplar) -> Verdict:
        return candidate.judge(self._request(exemplar))

    def _request(self, exemplar: Exemplar) -> Request:
        device, dtype = self.device, str(exemplar.planned.dtype).removeprefix("torch.")
        place = device.platform, device.capability
        return Request("kernel", self.op.name, *place, dtype, exemplar.dims)


def _run(
    candidate: Candidate,
    op: CustomOp[..., Any],
    device: str,
    check: Check,
    exemplar: Exemplar,
) -> list[Fault]:
    record = candidate.record
    if isinstance(record, Kernel):
        function = load_target(record.target)
        prepare = load_target(record.prepare) if record.prepare else None
        op = op.allowing(record.extra_roundings)
    else:
        function, prepare = op.reference, None
    subject = Subject(op, function, prepare, candidate.properties, device)
    with torch.no_grad(), _no_progress_monitor():
        return check(subject, exemplar)


@contextmanager
def _no_progress_monitor() -> Iterator[None]:
    """Keep torch's tracing from leaving a thread behind, which watches progress bars of tqdm.

    An examination in this process would take it for one of somebody else's, and watch less.
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


def _capturing(registry: Registry, device: Device) -> tuple[Platform | None, str]:
    """Return the platform of ``device`` if it captures graphs, or why there is none."""
    entries = [r for _, r in registry.records(PlatformEntry) if r.name == device.platform]
    if not entries:
        return None, f"no plugin declares the platform {device.platform!r}, which would capture it"
    try:
        platform: type[Platform] = load_target(entries[0].target)
        verdict = platform.provides("capture_graph")
        return (platform(), "") if verdict else (None, verdict.reason)
    except foreign_errors() as error:
        return None, f"the platform {device.platform!r} cannot be loaded: {described(error)}"
