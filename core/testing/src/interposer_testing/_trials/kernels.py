"""The kernels under test: in this process, or in a process of their own."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Protocol

import torch

from interposer import Candidate, CustomOp, Platform
from interposer.records import Kernel, load_target
from interposer.tooling import child_environment
from interposer_testing._checks.call import Subject
from interposer_testing._checks.remote_value import RemoteValue
from interposer_testing._judge.process import KernelProcess, ProcessEndedError
from interposer_testing._judge.remote import RemoteFunction, RemoteFunctions


class Kernels(Protocol):
    """Interface to the processes that run kernels under test."""

    def subject(
        self, op: CustomOp[..., Any], candidate: Candidate, device: str
    ) -> AbstractContextManager[Subject]:
        """Return a context manager that provides the function under test of a candidate."""


class LocalKernels:
    """Kernels in this process."""

    @contextmanager
    def subject(
        self, op: CustomOp[..., Any], candidate: Candidate, device: str
    ) -> Iterator[Subject]:
        """Return a context manager that provides the function under test of a candidate."""
        record = candidate.record
        if not isinstance(record, Kernel):
            yield _reference(op, candidate, device)
            return
        function = load_target(record.target)
        prepare = load_target(record.prepare) if record.prepare else None
        # The record may declare roundings that the op does not have, which widen the tolerance.
        op = op.allowing(record.extra_roundings)
        yield Subject(op, function, prepare, candidate.properties, device)


class SeparateKernels:
    """Kernels in another process, which is started again after a crash.

    References stay in this process: the op's author wrote them, not the kernel's.
    """

    def __init__(self, platform: type[Platform], limit_seconds: float = 600.0) -> None:
        """Create the interface; the kernels' process is started on first use.

        Args:
            platform: created in the process before the first kernel, because a platform can change
                how its kernels run, such as Triton's interpreter.
            limit_seconds: time limit of one call.
        """
        self._platform = platform
        self._limit_seconds = limit_seconds
        self._open = ExitStack()
        self._functions: RemoteFunctions | None = None
        self._loaded: dict[str, RemoteValue] = {}

    def __enter__(self) -> SeparateKernels:
        return self

    def __exit__(self, *_error: object) -> None:
        self.end()

    @contextmanager
    def subject(
        self, op: CustomOp[..., Any], candidate: Candidate, device: str
    ) -> Iterator[Subject]:
        """Return a context manager that provides the function under test of a candidate."""
        record = candidate.record
        if not isinstance(record, Kernel):
            yield _reference(op, candidate, device)
            return
        try:
            functions = self.functions
            function = self.load(record.target)
            prepare = self.load(record.prepare) if record.prepare else None
            with functions.scope():
                yield Subject(
                    op.allowing(record.extra_roundings),
                    RemoteFunction(functions, function),
                    None if prepare is None else RemoteFunction(functions, prepare, is_opaque=True),
                    candidate.properties,
                    device,
                    functions.process.memory.allocate,
                )
        except ProcessEndedError as error:
            if self._functions is not None:
                error.add_note(self._functions.process.output())
            self.end()
            raise

    @property
    def functions(self) -> RemoteFunctions:
        """The functions of the kernels' process; the process is started if necessary."""
        return self._functions or self._start()

    def load(self, target: str) -> RemoteValue:
        """Load the object of an import string in the process.

        Raises:
            KernelError: the module raised an exception, or has no such object.
            ProcessEndedError: the process ended.
        """
        if target not in self._loaded:
            module, _, name = target.partition(":")
            self._loaded[target] = self.functions.load(module=module, name=name)
        return self._loaded[target]

    def end(self) -> None:
        """End the process; the next use starts another one."""
        self._open.close()
        self._functions = None
        self._loaded.clear()

    def _start(self) -> RemoteFunctions:
        process = KernelProcess(
            {},
            paths=tuple(path for path in sys.path if path),
            limit_seconds=self._limit_seconds,
            is_watched=False,
            environment={
                name: value
                for name, value in child_environment().items()
                if not name.startswith("PYTEST_")
            }
            | {"OMP_NUM_THREADS": str(torch.get_num_threads())},
        )
        functions = RemoteFunctions(self._open.enter_context(process))
        platform = functions.load(
            module=self._platform.__module__, name=self._platform.__qualname__
        )
        functions.call(platform, [((), {})])
        self._functions = functions
        return functions


def _reference(op: CustomOp[..., Any], candidate: Candidate, device: str) -> Subject:
    return Subject(op, op.reference, None, candidate.properties, device)
