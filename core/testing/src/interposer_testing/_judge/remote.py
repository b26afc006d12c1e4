"""Proxies for functions of another process, which are called like local functions."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from interposer_testing._checks.remote_value import RemoteValue
from interposer_testing._judge.process import KernelProcess, ProcessEndedError

# A result that shares its storage with scratch memory may have a storage larger than itself.
_MAX_STORAGE_BYTES = 1 << 33
_SECOND_READING_SECONDS = 0.005


class _Mirror(NamedTuple):
    """A local copy of one tensor storage of the other process."""

    address: int
    bytes: torch.Tensor


class RemoteFunctions:
    """Calls functions of another process; results are copies of the memory of that process.

    Within a ``scope``, the process keeps all results, and each call updates the copies of earlier
    results: a kernel that writes to a result which it has returned changes the copy as well.
    Results that share memory in the other process share memory here.
    """

    def __init__(self, process: KernelProcess) -> None:
        self.process = process
        self._mirrors: dict[int, _Mirror] = {}
        self._values: list[int] = []

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Free the arguments and results of all calls in a ``with`` block when the block ends."""
        first_value, mirrors = len(self._values), dict(self._mirrors)
        with self.process.memory.scope():
            try:
                yield
            finally:
                dropped, self._values = self._values[first_value:], self._values[:first_value]
                self._mirrors = mirrors
                if dropped:
                    self.process.request("drop", values=dropped)

    def load(self, *, name: str, **place: Any) -> RemoteValue:
        """Load a function in the other process, by the function's name.

        Args:
            place: "file" and "language" of a solution, or "module" that is installed; also the
                construction of an instance of a class, see the worker.

        Raises:
            KernelError: the module raised an exception, or has no such function.
            ProcessEndedError: the process ended.
        """
        reply = self.process.request("load", name=name, **place)
        return RemoteValue(_number(reply, "value"))

    def differentiated(
        self, function: RemoteValue, num_arguments: int, indices: Sequence[int]
    ) -> RemoteValue:
        """Return the forward and backward pass of a function; see ``worker.Differentiated``."""
        reply = self.process.request(
            "differentiate",
            function=function.number,
            num_arguments=num_arguments,
            indices=indices,
        )
        return RemoteValue(_number(reply, "value"))

    def call(
        self,
        function: RemoteValue,
        calls: Sequence[tuple[Sequence[Any], Mapping[str, Any]]],
        *,
        filled: bool = False,
        style: str = "plain",
        repeat: int = 1,
        threads: int = 1,
        is_opaque: bool = False,
    ) -> list[Any]:
        """Call a function once for each of ``calls`` and return the results.

        Args:
            calls: positional and keyword arguments of each call.
            filled: fill uninitialised memory of the process with NaN.
            style: "plain", "module" for calls from a thread within a module in inference mode, or
                "threads" for calls from several threads at once.
            repeat: number of times to make all calls; the last results are returned.
            threads: number of threads, for the style "threads".
            is_opaque: return the values by name as ``RemoteValue``, without reading them.

        Raises:
            KernelError: the function raised an exception.
            ProcessEndedError: the process ended, or its memory cannot be read.
        """
        request = self.requested(
            function,
            calls,
            filled=filled,
            style=style,
            repeat=repeat,
            threads=threads,
            is_opaque=is_opaque,
        )
        self.process.send(request)
        return self.results(self.process.receive(), len(calls))

    def call_with_copies(
        self,
        function: RemoteValue,
        calls: Sequence[Sequence[Any]],
        *,
        arguments: Sequence[int] = (),
        **options: Any,
    ) -> list[tuple[Any, list[Any]]]:
        """Call a function on copies of the arguments, which torch allocates in the other process.

        Args:
            arguments: indices of the arguments to return with each result, as the call left them.
            options: "style", "repeat" and "threads", as for ``call``.
        """
        pairs = [(call, dict[str, Any]()) for call in calls]
        request = self.requested(function, pairs, **options)
        reply = self.process.request(**request, copied=True, arguments=arguments)
        results = self.results(reply, len(calls))
        return [
            (result, [self._value(tree) for tree in described["arguments"]])
            for result, described in zip(results, reply["results"], strict=True)
        ]

    def kept(self, value: torch.Tensor) -> RemoteValue:
        """Store a shared-memory argument as one object of the other process, for several calls."""
        return RemoteValue(
            _number(self.process.request("keep", argument=self.encoded(value)), "value")
        )

    def requested(
        self,
        function: RemoteValue,
        calls: Sequence[tuple[Sequence[Any], Mapping[str, Any]]],
        **options: Any,
    ) -> dict[str, Any]:
        """Copy the arguments to shared memory, and build the request that makes the calls."""
        self.process.num_calls += len(calls) * int(options.get("repeat", 1))
        encoded = [
            ([self.encoded(a) for a in arguments], ["dict", self.encoded_items(keywords)])
            for arguments, keywords in calls
        ]
        return {
            "action": "call",
            "function": function.number,
            "calls": [[["list", arguments], keywords] for arguments, keywords in encoded],
            "protected": self.process.memory.protected,
            "exports": self.process.memory.has_exports,
            **options,
        }

    def results(self, reply: Mapping[str, Any], count: int) -> list[Any]:
        """Copy the results that a reply describes from the memory of the process.

        The process stays stopped until the next request: arguments that the call has written are in
        shared memory, and no thread of the process may write to them before they are compared.
        """
        self.process.raise_error(reply)
        results = reply.get("results")
        if not isinstance(results, list) or len(results) != count:
            raise ProcessEndedError("the process answered with another number of results")
        self.process.stop()
        if self.process.memory.has_exports:
            self.read_exports(reply.get("exports", []))
        else:
            self.refresh()
        return [self._result(result) for result in results]

    def refresh(self) -> None:
        """Copy the results of earlier calls again from the other process, which must be stopped."""
        for mirror in self._mirrors.values():
            self._copy(mirror)

    def read_exports(
        self, exports: Sequence[Any], timer: Callable[[], float] = time.perf_counter
    ) -> float:
        """Copy the results that the process exported; return the timestamp of the first reading.

        The process must be stopped. Its work on a device goes on all the same; a result that such
        work still writes differs in a second reading.

        Raises: ProcessEndedError: the reply is malformed, or a result changes.
        """
        memory = self.process.memory
        try:
            places = [tuple(map(int, export)) for value in exports for export in value]
        except (TypeError, ValueError):
            places = [()]  # refused below
        if not all(len(p) == 3 and memory.contains(p[2], p[1]) for p in places):
            raise ProcessEndedError("the process described the copies of its results wrongly")
        # Read twice: a result that changes between the readings was not finished in time.
        copies = [memory.view(offset, size).clone() for _, size, offset in places]
        memory.settle()
        first_reading = timer()
        time.sleep(_SECOND_READING_SECONDS)
        for (address, size, offset), copy in zip(places, copies, strict=True):
            if not torch.equal(memory.view(offset, size), copy):
                raise ProcessEndedError("a result changes after the call has returned")
            mirror = self._mirrors.get(address)
            if mirror is None or len(mirror.bytes) != size:
                self._mirrors[address] = _Mirror(address, copy)
            else:
                mirror.bytes.copy_(copy)
        return first_reading

    def read_timed(
        self, reply: Mapping[str, Any], indices: Sequence[int], timer: Callable[[], float]
    ) -> float:
        """Copy the exported results of some calls of a batch; return the timestamp of the reading.

        Raises: ProcessEndedError: the reply is malformed, or a result changes.
        """
        exports = reply.get("exports")
        if not isinstance(exports, list) or len(exports) <= max(indices):
            raise ProcessEndedError("the process answered without copies of its results")
        self.process.stop()
        return self.read_exports([exports[index] for index in indices], timer)

    def encoded_items(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Encode values by name for a request to the process."""
        return {name: self.encoded(value) for name, value in values.items()}

    def encoded(self, value: Any) -> Any:
        """Encode an argument for a request; tensors outside of shared memory are copied."""
        if isinstance(value, torch.Tensor):
            return ["tensor", self._shared(value)]
        if isinstance(value, RemoteValue):
            return ["value", value.number]
        if isinstance(value, torch.dtype):
            return ["dtype", str(value).removeprefix("torch.")]
        if isinstance(value, Mapping):
            return ["dict", self.encoded_items(value)]
        if isinstance(value, tuple | list):
            kind = "tuple" if isinstance(value, tuple) else "list"
            return [kind, [self.encoded(item) for item in value]]
        if value is None or isinstance(value, bool | int | float | str):
            return value
        raise TypeError(f"an argument of the class {type(value).__name__} cannot be sent")

    def _shared(self, tensor: torch.Tensor) -> list[Any]:
        dtype = str(tensor.dtype).removeprefix("torch.")
        form = [list(tensor.shape), list(tensor.stride())]
        storage = tensor.untyped_storage()
        if not storage.nbytes():
            return [0, 0, dtype, 0, *form]
        # Tensors that ``SharedMemory.allocate`` created need no copy.
        offset = self.process.memory.offset_of(storage.data_ptr())
        if offset is not None:
            return [offset, storage.nbytes(), dtype, tensor.storage_offset(), *form]
        # Copy only the bytes that the strides reach: the storage may be much larger than a view.
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        covered = 1 + sum((n - 1) * step for n, step in steps) if tensor.numel() else 0
        num_bytes = covered * tensor.itemsize
        buffer = self.process.memory.allocate(-(-num_bytes // 64) * 64)[:num_bytes]
        source = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
        start = tensor.storage_offset() * tensor.itemsize
        buffer.copy_(source[start : start + num_bytes])
        offset = self.process.memory.offset_of(buffer.data_ptr()) if num_bytes else 0
        return [offset, num_bytes, dtype, 0, *form]

    def _result(self, result: Any) -> Any:
        if not isinstance(result, dict):
            raise ProcessEndedError("the process described a result in a form that is unknown")
        # The process keeps the value until its number is released, even if the rest is malformed.
        self._values.append(_number(result, "value"))
        try:
            return self._value(result["tree"])
        # The judged kernel runs in that process, so the description can hold anything.
        except (KeyError, ValueError, TypeError, IndexError, RuntimeError, AttributeError) as error:
            raise ProcessEndedError(
                f"the process described a result in a form that is unknown ({error})"
            ) from error

    def _value(self, tree: Any) -> Any:
        if not isinstance(tree, list):
            return tree
        kind, content = tree
        match kind:
            case "list":
                return [self._value(item) for item in content]
            case "tuple":
                return tuple(self._value(item) for item in content)
            case "dict":
                return {str(name): self._value(item) for name, item in content.items()}
            case "tensor":
                return self._tensor(content)
            case "other":
                number, name, memory = content
                self._values.append(int(number))
                addresses = [int(address) for address, _ in filter(None, memory)]
                tensors = functools.partial(self._mirrored, addresses)
                return RemoteValue(int(number), str(name), tensors)
        raise ValueError(f"kind {kind!r}")

    def _tensor(self, facts: Mapping[str, Any]) -> torch.Tensor:
        dtype = getattr(torch, str(facts["dtype"]))
        shape = [int(size) for size in facts["shape"]]
        device = self.process.memory.device
        # The memory of a lazily conjugated or negated tensor does not hold its values.
        if facts["memory"] is None or facts["device"] != device or any(facts["bits"]):
            return _without_memory(facts, dtype, shape)
        address, num_bytes = (int(number) for number in facts["memory"])
        strides, start = [int(step) for step in facts["strides"]], int(facts["start"])
        if not math.prod(shape):
            return torch.empty_strided(shape, strides, dtype=dtype, device=device)
        storage = self._storage(address, num_bytes)
        return torch.empty(0, dtype=dtype, device=device).set_(
            storage.untyped_storage(), start, shape, strides
        )

    def _storage(self, address: int, num_bytes: int) -> torch.Tensor:
        # Both processes map the shared memory, at different addresses.
        offset = address - self.process.base
        memory = self.process.memory
        if offset >= 0 and memory.contains(offset, num_bytes):
            return memory.view(offset, num_bytes)
        mirror = self._mirrors.get(address)
        if mirror is None or len(mirror.bytes) < num_bytes:
            # The kernel states the size: a wrong one must not exhaust the memory of the judge.
            if memory.has_exports or not 0 < num_bytes <= _MAX_STORAGE_BYTES:
                raise ValueError(f"a storage of {num_bytes} bytes")
            mirror = _Mirror(address, torch.empty(num_bytes, dtype=torch.uint8))
            self._copy(mirror)
            self._mirrors[address] = mirror
        return mirror.bytes

    def _copy(self, mirror: _Mirror) -> None:
        self.process.read(mirror.address, mirror.bytes.data_ptr(), len(mirror.bytes))

    def _mirrored(self, addresses: Sequence[int]) -> list[torch.Tensor]:
        return [self._mirrors[a].bytes for a in addresses if a in self._mirrors]


def _without_memory(
    facts: Mapping[str, Any], dtype: torch.dtype, shape: Sequence[int]
) -> torch.Tensor:
    """Create a tensor whose form shows why a result without readable memory is wrong."""
    if facts["layout"] != "strided":
        return torch.sparse_coo_tensor(torch.zeros(len(shape), 0), [], tuple(shape), dtype=dtype)
    return torch.empty(shape, dtype=dtype, device="meta")


def _number(content: Mapping[str, Any], name: str) -> int:
    number = content.get(name)
    if not isinstance(number, int):
        raise ProcessEndedError(f"the process answered without the number {name!r}")
    return number


class RemoteFunction:
    """Proxy for one function of another process, called like a local function.

    Arguments that the function may write must be in shared memory.
    """

    def __init__(
        self, functions: RemoteFunctions, function: RemoteValue, *, is_opaque: bool = False
    ) -> None:
        """Create a proxy for a function that the other process has loaded.

        Args:
            is_opaque: leave the values that the function returns by name in the other process.
        """
        self.function = function
        self._functions = functions
        self._is_opaque = is_opaque

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Call the function; in torch's deterministic mode, fill uninitialised memory first."""
        filled = torch.get_deterministic_debug_mode() != 0
        calls = [(arguments, keywords)]
        return self._functions.call(self.function, calls, filled=filled, is_opaque=self._is_opaque)[
            0
        ]

    def differentiated(self, num_arguments: int, indices: Sequence[int]) -> RemoteFunction:
        """Return the forward and backward pass of the function."""
        step = self._functions.differentiated(self.function, num_arguments, indices)
        return RemoteFunction(self._functions, step)

    def together(self, calls: Sequence[Sequence[Any]], num_threads: int) -> list[Any]:
        """Call the function from several threads of the other process at once.

        Call ``n`` is made by thread ``n % num_threads``.
        """
        pairs = [(arguments, dict[str, Any]()) for arguments in calls]
        return self._functions.call(self.function, pairs, style="threads", threads=num_threads)
