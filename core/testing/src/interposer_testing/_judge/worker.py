"""A process that loads functions and calls them on tensors in shared memory.

This file is copied into the folder of the functions and run there, without this package: it imports
torch and the standard library only. Its arguments are two file descriptors: requests and replies
are lines of JSON on the first, and the second is the shared memory. The other process reads
results out of this process's memory by the addresses in the replies, while this process is stopped.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import mmap
import os
import signal
import socket
import statistics  # noqa: F401  a kernel can replace its functions
import sys
import threading
import timeit  # noqa: F401  a kernel can replace its functions
import traceback
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.utils import _pytree

_PR_SET_PDEATHSIG, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 1, 24, 38
_SIGKILL, _CAP_SYS_PTRACE, _CAPABILITIES_VERSION = 9, 19, 0x20080522
_NO_ACCESS = 0  # PROT_NONE of mprotect
_MAX_TEXT = 4000
_LIBC = ctypes.CDLL(None, use_errno=True)
# Bound before a function under test can replace it.
_gradients = torch.autograd.grad


def limit_privileges() -> None:
    """Make this process end with its parent, and drop the right to read other processes' memory."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0)
    _LIBC.prctl(_PR_CAPBSET_DROP, _CAP_SYS_PTRACE, 0, 0, 0)
    _LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    header = (ctypes.c_uint32 * 2)(_CAPABILITIES_VERSION, 0)
    data = (ctypes.c_uint32 * 6)()  # two of (effective, permitted, inheritable)
    if _LIBC.capget(header, data) == 0:
        for index in range(3):
            data[index] &= ~(1 << _CAP_SYS_PTRACE)
        _LIBC.capset(header, data)


def _from_python(file: str, _name: str) -> ModuleType:
    """Import a Python file; a file in a folder is imported as a module of a package."""
    sys.path.insert(0, str(Path.cwd()))
    path = Path(file)
    module = path.parent if path.name == "__init__.py" else path.with_suffix("")
    return importlib.import_module(".".join(module.parts))


def import_triton() -> None:
    """Import Triton; if Triton's interpreter is on, correct the interpreter's rounding."""
    importlib.import_module("triton.testing")
    if importlib.import_module("triton").knobs.runtime.interpret:
        importlib.import_module("exact_interpreter").make_exact()


def _from_cpp(file: str, name: str) -> Any:
    """Compile a C++ file with the extension loader of torch.

    A file without PYBIND11_MODULE exports the function with this name.
    """
    source = Path(file).read_text(encoding="utf-8")
    cpp_extension = importlib.import_module("torch.utils.cpp_extension")
    bindings = "PYBIND11_MODULE" in source or "TORCH_LIBRARY" in source
    return cpp_extension.load_inline(
        name=f"solution_{Path(file).stem}",
        cpp_sources=[source],
        functions=None if bindings else [name],
        build_directory=str(Path.cwd()),
        extra_cflags=["-O3"],
    )


def _from_wheel(file: str, name: str) -> ModuleType:
    """Unpack a wheel, and import the top-level module that defines the function ``name``."""
    folder = Path.cwd() / "unpacked"
    with zipfile.ZipFile(file) as wheel:
        wheel.extractall(folder)
    sys.path.insert(0, str(folder))
    entries = sorted(p.stem.partition(".")[0] for p in folder.iterdir() if p.suffix != ".dist-info")
    modules = [importlib.import_module(entry) for entry in entries]
    matching = [module for module in modules if hasattr(module, name.partition(".")[0])]
    if not matching:
        raise AttributeError(f"no module of {file} has {name!r}; it has {', '.join(entries)}")
    return matching[0]


_LOADERS: dict[str, Callable[[str, str], Any]] = {
    "python": _from_python,
    "cpp": _from_cpp,
    "wheel": _from_wheel,
}


Action = Callable[[Mapping[str, Any]], dict[str, Any]]

_Function = Callable[..., Any]
_Arguments = tuple[list[Any], dict[str, Any]]
_Calls = Sequence[_Arguments]
_Export = tuple[int, int, int]
_ALIGNMENT = 256


def _is_of_torch(function: Any) -> bool:
    """Tell whether a function is defined in a file of torch.

    Torch replaces some of its own functions by wrappers during its first compilation.
    """
    code = getattr(function, "__code__", None)
    return code is not None and Path(code.co_filename).is_relative_to(Path(torch.__file__).parent)


class Surroundings:
    """Snapshot of a process's functions and settings, to find those that a kernel has changed."""

    # Functions that kernels are known to have replaced, and those beside them.
    _MODULES = (
        *("builtins", "gc", "math", "os", "random", "signal", "statistics", "sys", "threading"),
        *("time", "timeit"),
        *("torch", "torch.autograd", "torch.autograd.profiler", "torch.cuda", "torch.linalg"),
        *("torch.nn.functional", "torch.testing", "torch.utils._pytree"),
        *("triton", "triton.testing"),
    )
    _CLASSES = ("Tensor", "cuda.Event", "cuda.Stream", "nn.Module", "utils.data.DataLoader")

    def __init__(self) -> None:
        self._num_frozen = gc.get_freeze_count()
        self._functions = self._current_functions()
        self._settings = self._current_settings()
        self._changes: dict[str, None] = {}

    def note(self) -> None:
        """Record every changed setting, because a later call may restore the setting."""
        for name, value in self._current_settings().items():
            if value != self._settings[name]:
                self._changes[f"{name} was {self._settings[name]}, and is {value}"] = None

    def changes(self) -> list[str]:
        """Describe functions that were replaced, and settings that were changed."""
        self.note()
        current = self._current_functions()
        changes = [
            f"{name} was replaced"
            for name, value in self._functions.items()
            if current.get(name, value) is not value and not _is_of_torch(current[name])
        ]
        return [*changes, *self._changes]

    def _current_functions(self) -> dict[str, Any]:
        owners: dict[str, Any] = {
            name: sys.modules[name] for name in self._MODULES if name in sys.modules
        }
        for name in self._CLASSES:
            owner: Any = torch
            for part in name.split("."):
                owner = getattr(owner, part)
            owners["torch." + name] = owner
        return {
            f"{prefix}.{name}": value
            for prefix, owner in owners.items()
            for name, value in vars(owner).items()
            if callable(value) or isinstance(value, property)
            # Torch sets this one whenever a program changes the default dtype.
            if not (owner is torch and name == "Storage")
        }

    def _current_settings(self) -> dict[str, Any]:
        return {
            "torch.get_default_dtype()": str(torch.get_default_dtype()),
            "torch.get_num_threads()": torch.get_num_threads(),
            "torch.is_grad_enabled()": torch.is_grad_enabled(),
            "torch.is_inference_mode_enabled()": torch.is_inference_mode_enabled(),
            "torch.get_deterministic_debug_mode()": torch.get_deterministic_debug_mode(),
            "torch.get_float32_matmul_precision()": torch.get_float32_matmul_precision(),
            "the default device": str(torch.get_default_device()),
            "flushing of subnormals": bool(torch.tensor(1e-310, dtype=torch.float64) * 1 == 0),
            "a call of gc.freeze()": gc.get_freeze_count() > self._num_frozen,
            "gc.get_threshold()": gc.get_threshold(),
            "the current folder": str(Path.cwd()),
            "sys.gettrace()": repr(sys.gettrace()),
            "sys.getprofile()": repr(sys.getprofile()),
            "the handler of SIGTERM": repr(signal.getsignal(signal.SIGTERM)),
        }


class Differentiated:
    """A callable that runs the forward and the backward pass of a function.

    A call takes the arguments of the function, followed by the gradients of its outputs, None for
    an output without one. It returns the outputs, and the gradients of some tensor arguments.
    """

    def __init__(self, function: _Function, num_arguments: int, indices: Sequence[int]) -> None:
        """Wrap a function whose gradients are computed too.

        Args:
            num_arguments: number of the function's own arguments.
            indices: those of the arguments that get gradients, unless they are None.
        """
        self._function = function
        self._count = num_arguments
        self._indices = indices

    def __call__(self, *values: Any) -> tuple[Any, ...]:
        """Run the forward and backward pass; return outputs and gradients as one tuple."""
        arguments, output_gradients = values[: self._count], values[self._count :]
        # A program may call from inference mode, which records nothing for a backward pass.
        with torch.inference_mode(False), torch.enable_grad():
            inputs = {
                index: arguments[index].detach().requires_grad_()
                for index in self._indices
                if isinstance(arguments[index], torch.Tensor)
            }
            result = self._function(*(inputs.get(n, value) for n, value in enumerate(arguments)))
            outputs = list(result) if isinstance(result, tuple | list) else [result]
            connected = [
                (output, gradient)
                for output, gradient in zip(outputs, output_gradients, strict=False)
                if gradient is not None and getattr(output, "requires_grad", False)
            ]
            sources = list(inputs.values())
            gradients: Sequence[torch.Tensor | None] = [None] * len(sources)
            if connected:
                ends, end_gradients = zip(*connected, strict=True)
                gradients = _gradients(ends, sources, end_gradients, allow_unused=True)
        if any(source.grad is not None for source in sources):
            raise RuntimeError("the backward pass writes the attribute 'grad' of an argument")
        # Autograd may pass on the gradient of an output as that of several arguments.
        used_addresses = {_address(gradient) for _, gradient in connected}
        results = list[torch.Tensor]()
        for source, gradient in zip(sources, gradients, strict=True):
            # For autograd, no gradient is one of zeros.
            gradient = torch.zeros_like(source) if gradient is None else gradient.detach()
            results.append(gradient.clone() if _address(gradient) in used_addresses else gradient)
            used_addresses.add(_address(gradient))
        return (*(o.detach() if isinstance(o, torch.Tensor) else o for o in outputs), *results)


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class Functions:
    """The functions and values that the worker holds, and the actions that requests name."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._surroundings = Surroundings()
        self._is_watched = False
        self._values: dict[int, Any] = {}
        self._count = 0
        self._calls: list[_Arguments] = []
        self._results: list[Any] = []
        self._device = "cpu"
        self._area = (0, 0)  # of the shared memory, for copies of results
        self._next_export = 0
        self._exported_addresses: set[int] = set()
        self._exports: list[list[_Export]] = []

    def load(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Import ``file`` or ``module``, and store the object ``name`` as a function to call."""
        name = request["name"]
        if "module" in request:
            module: Any = importlib.import_module(request["module"])
        else:
            if request["uses_triton"]:
                import_triton()  # a kernel can replace its functions
                self._surroundings = Surroundings()
            module = _LOADERS[request["language"]](request["file"], name)
        value = module
        for part in name.split("."):
            value = getattr(value, part)
        if request.get("create"):
            torch.manual_seed(request["seed"])
            value = value(*self._decoded(request["arguments"]))
            if self._device != "cpu":
                value = value.to(self._device)
            self._copy_state(value, request["state"])
        return {"value": self.add(value)}

    def differentiate(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Store the forward and backward pass of ``function`` as a new, numbered function."""
        function = self._values[request["function"]]
        step = Differentiated(function, request["num_arguments"], request["indices"])
        return {"value": self.add(step)}

    def _copy_state(self, module: torch.nn.Module, state: Mapping[str, Any]) -> None:
        """Copy the given weights to parameters and buffers of the same name and shape."""
        with torch.no_grad():
            values = dict(module.named_parameters()) | dict(module.named_buffers())
            for name, encoded in state.items():
                source = self._decoded(encoded)
                if name in values and values[name].shape == source.shape:
                    values[name].copy_(source)

    def call(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Call ``function`` once for each list of arguments, and describe the results."""
        self._prepare(request)
        self.run(request)
        return self.describe({**request, "indices": range(len(self._results))})

    def prepare(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Build the arguments of the calls that the action ``run`` makes later.

        Garbage is collected now, so that the collector has little to do while they are timed.
        """
        self._prepare(request)
        gc.collect()
        return {}

    def _prepare(self, request: Mapping[str, Any]) -> None:
        """Build the arguments of calls; with ``copied``, in memory that torch allocates."""
        self._calls = [(self._decoded(a), self._decoded(k)) for a, k in request["calls"]]
        if request.get("copied"):
            self._calls = _pytree.tree_map_only(torch.Tensor, _copied, self._calls)
        self._results, self._exports = [], []
        self._next_export = self._area[0]
        self._exported_addresses.clear()

    def change(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Overwrite arguments of the first prepared call in place, as a program would."""
        arguments, _ = self._calls[0]
        for index, values in request["values"]:
            if arguments[index].numel():
                arguments[index].copy_(self._decoded(values))
        return {}

    def keep(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Store an argument for several calls, and return its number."""
        return {"value": self.add(self._decoded(request["argument"]))}

    def run(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Run the prepared calls, and wait until their work on the device is done.

        With ``exports``, copy the results before the wait, as the next operation of a program would
        read them.
        """
        function = self._values[request["function"]]
        protected = request.get("protected", ())
        filled = _filled_memory() if request.get("filled") else contextlib.nullcontext()
        run = _STYLES[request.get("style", "plain")]
        gc.disable()
        self._protect(protected, _NO_ACCESS)
        try:
            with filled:
                self._results = run(function, self._calls, request)
            if request.get("exports"):
                self._exports = [self._exported(result) for result in self._results]
            _synchronize()
        finally:
            self._protect(protected, mmap.PROT_READ | mmap.PROT_WRITE)
            gc.enable()
        return {"exports": self._exports}

    def describe(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Describe the requested results of the last calls as JSON values."""
        if self._is_watched:
            self._surroundings.note()
        results = [self._results[index] for index in request["indices"]]
        described = self._opaque if request.get("is_opaque") else self._described
        replies = [{"value": self.add(r), "tree": described(r)} for r in results]
        # Arguments in memory of this process, which the function may have written.
        for reply, index in zip(replies, request["indices"], strict=True):
            arguments = [self._calls[index][0][i] for i in request.get("arguments", ())]
            reply["arguments"] = [self._described(argument) for argument in arguments]
        if not request.get("exports"):
            return {"results": replies}
        # Earlier results, which the last calls may have changed, and arguments that they wrote.
        calls = [call for call, _ in self._calls]
        other_exports = [self._exported(value) for value in (*self._values.values(), *calls)]
        _synchronize()
        return {"results": replies, "exports": [*self._exports, *other_exports]}

    def _exported(self, value: Any) -> list[_Export]:
        """Copy the storages of a value to shared memory; return address, size and offset of each.

        Storages that lie in shared memory, or were copied since the calls, are left out.
        """
        exports = []
        for tensor in _pytree.tree_leaves(value):
            if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
                continue
            storage = tensor.untyped_storage()
            address, num_bytes = storage.data_ptr(), storage.nbytes()
            is_shared = 0 <= address - self._base < self._area[1]
            is_elsewhere = str(tensor.device) != self._device
            if not num_bytes or is_shared or is_elsewhere or address in self._exported_addresses:
                continue
            self._exported_addresses.add(address)
            offset = self._next_export
            self._next_export += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
            if self._next_export > self._area[1]:
                raise MemoryError(f"results take more than {self._area[1] - self._area[0]} bytes")
            source = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            self._bytes(offset, num_bytes).copy_(source)
            exports.append((address, num_bytes, offset))
        return exports

    def _protect(self, pages: Sequence[int], access: int) -> None:
        for page in pages:
            _LIBC.mprotect(ctypes.c_void_p(self._base + page), mmap.PAGESIZE, access)

    def drop(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Delete the stored values of the given numbers, and the prepared calls and results."""
        self._calls = []
        self._results = []
        for number in request["values"]:
            self._values.pop(number, None)
        return {}

    def imported(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Import the modules that are installed, as a program that uses the functions would."""
        for name in request["modules"]:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
        return {}

    def base(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Map the device memory, if any, and return the base address of the shared memory.

        With ``is_watched``, settings that functions change are noted from now on.
        """
        self._is_watched, layout = request["is_watched"], request["layout"]
        if layout:
            self._device, self._area = layout["device"], layout["exports"]
        if "handle" in layout:
            torch.cuda.init()
            handle = [bytes.fromhex(p[1]) if isinstance(p, list) else p for p in layout["handle"]]
            self._arena = torch.UntypedStorage._new_shared_cuda(*handle)
            self._base = self._arena.data_ptr()
        return {"base": self._base, "threads": torch.get_num_threads(), "process": os.getpid()}

    def changes(self, _request: Mapping[str, Any]) -> dict[str, Any]:
        """Describe the functions of this process that were replaced, and the changed settings."""
        return {"changes": self._surroundings.changes()}

    def actions(self) -> dict[str, Action]:
        """Return the functions that answer requests, by the action that a request names."""
        return {
            "load": self.load,
            "differentiate": self.differentiate,
            "call": self.call,
            "prepare": self.prepare,
            "change": self.change,
            "keep": self.keep,
            "run": self.run,
            "describe": self.describe,
            "drop": self.drop,
            "import": self.imported,
            "base": self.base,
            "changes": self.changes,
        }

    def add(self, value: Any) -> int:
        """Store a value in this process, and return its number."""
        self._count += 1
        self._values[self._count] = value
        return self._count

    def _decoded(self, tree: Any) -> Any:
        """Decode an argument: a list ``[kind, content]`` of JSON, or a plain value."""
        if isinstance(tree, list):
            kind, content = tree
            if kind == "list":
                return [self._decoded(item) for item in content]
            if kind == "tuple":
                return tuple(self._decoded(item) for item in content)
            if kind == "dict":
                return {name: self._decoded(item) for name, item in content.items()}
            if kind == "dtype":
                return getattr(torch, content)
            if kind == "value":
                return self._values[content]
            return self._tensor(content)
        return tree

    def _tensor(self, content: list[Any]) -> torch.Tensor:
        offset, num_bytes, dtype_name, start, shape, strides = content
        dtype = getattr(torch, dtype_name)
        if not num_bytes:
            return torch.empty_strided(shape, strides, dtype=dtype, device=self._device)
        memory = self._bytes(offset, num_bytes)
        return torch.empty(0, dtype=dtype, device=self._device).set_(
            memory.untyped_storage(), start, shape, strides
        )

    def _bytes(self, offset: int, num_bytes: int) -> torch.Tensor:
        """Return a tensor over a range of the shared memory, with a storage of its own."""
        if self._device == "cpu":
            return torch.frombuffer(self._memory, dtype=torch.uint8, count=num_bytes, offset=offset)
        storage = torch._C._construct_storage_from_data_pointer(
            self._base + offset, torch.device(self._device), num_bytes
        )
        return torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)

    def _described(self, value: Any) -> Any:
        """Describe a result as JSON values, inspecting only plain containers and tensors."""
        kind = type(value)
        if kind is tuple or kind is list:
            return [kind.__name__, [self._described(item) for item in value]]
        if kind is dict:
            return ["dict", {str(name): self._described(item) for name, item in value.items()}]
        if kind is torch.Tensor or kind is torch.nn.Parameter:
            with torch._C.DisableTorchFunctionSubclass():
                return ["tensor", self._description(value.detach())]
        if value is None or kind in (bool, int, float, str):
            return value
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return ["tuple", [self._described(item) for item in value]]
        return ["other", self._facts(value)]

    def _opaque(self, values: Mapping[str, Any]) -> list[Any]:
        """Describe named values as opaque: they stay in this process, and no content is sent."""
        return ["dict", {str(name): ["other", self._facts(v)] for name, v in values.items()}]

    def _facts(self, value: Any) -> list[Any]:
        """Store a value in this process; return its number, class and addresses of memory."""
        leaves = [v for v in _pytree.tree_leaves(value) if type(v) is torch.Tensor]
        memory = [self._description(leaf)["memory"] for leaf in leaves]
        return [self.add(value), type(value).__qualname__, memory]

    def _description(self, tensor: torch.Tensor) -> dict[str, Any]:
        facts: dict[str, Any] = {
            "dtype": str(tensor.dtype)[6:],
            "shape": list(tensor.shape),
            "layout": str(tensor.layout)[6:],
            "device": str(tensor.device),
            "bits": [bool(tensor.is_conj()), bool(tensor.is_neg())],
            "memory": None,
        }
        if tensor.layout is not torch.strided or tensor.device.type == "meta":
            return facts
        storage = tensor.untyped_storage()
        facts["memory"] = [storage.data_ptr(), storage.nbytes()]
        facts["start"], facts["strides"] = tensor.storage_offset(), list(tensor.stride())
        return facts


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor to new memory; the copy has the same strides."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    covered = 1 + sum((n - 1) * step for n, step in steps) if tensor.numel() else 0
    memory = tensor.as_strided((covered,), (1,)).clone()
    return memory.as_strided(tensor.shape, tensor.stride())


def _plain(function: _Function, calls: _Calls, request: Mapping[str, Any]) -> list[Any]:
    results = [function(*arguments, **keywords) for arguments, keywords in calls]
    for _ in range(request.get("repeat", 1) - 1):
        results = [function(*arguments, **keywords) for arguments, keywords in calls]
    return results


class _Block(torch.nn.Module):
    def __init__(self, function: _Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        return self.function(*arguments, **keywords)


def _in_module(function: _Function, calls: _Calls, request: Mapping[str, Any]) -> list[Any]:
    """Call from a thread, inside of a ``torch.nn.Module``, in inference mode, in reverse order."""
    results: list[Any] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            block = _Block(function)
            with torch.inference_mode():
                for _ in range(request.get("repeat", 1)):
                    results[:] = [block(*a, **k) for a, k in reversed(calls)][::-1]
        except BaseException as error:  # noqa: BLE001  raised in the calling thread
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results


def _in_threads(function: _Function, calls: _Calls, request: Mapping[str, Any]) -> list[Any]:
    """Make the calls in as many concurrent threads as the request says."""
    results: list[Any] = [None] * len(calls)
    errors: list[BaseException] = []
    num_threads = request["threads"]
    # The barrier makes the first calls of all threads start together.
    barrier = threading.Barrier(num_threads)

    def run(first: int) -> None:
        try:
            barrier.wait()
            for index in range(first, len(calls), num_threads):
                results[index] = function(*calls[index][0], **calls[index][1])
        except BaseException as error:  # noqa: BLE001  raised in the calling thread
            errors.append(error)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(num_threads)]
    before = sys.getswitchinterval()
    # Python then switches often enough to interrupt functions that are written in Python.
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    if errors:
        raise errors[0]
    return results


_STYLES = {"plain": _plain, "module": _in_module, "threads": _in_threads}


@contextlib.contextmanager
def _filled_memory() -> Iterator[None]:
    """Make torch fill uninitialised memory with NaN or the largest integer.

    The kit has the same function, which this process must not import.
    """
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("warn")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*does not have a deterministic impl")
            yield
    finally:
        torch.set_deterministic_debug_mode(before)


def _synchronize() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


class Channel:
    """A socket over which requests and replies are sent as lines of JSON."""

    def __init__(self, connection: socket.socket) -> None:
        self._reader, self._writer = connection.makefile("r"), connection.makefile("w")

    def requests(self) -> Iterator[dict[str, Any]]:
        """Yield requests until the other process closes the channel."""
        for line in self._reader:
            yield json.loads(line)

    def send(self, reply: Mapping[str, Any]) -> None:
        """Send a reply."""
        self._writer.write(json.dumps(reply) + "\n")
        self._writer.flush()

    def serve(self, actions: Mapping[str, Action], last: str = "") -> None:
        """Answer requests until the channel is closed, or until a request for the action ``last``.

        The request for ``last`` is not answered.
        """
        for request in self.requests():
            if request["action"] == last:
                return
            try:
                reply = actions[request["action"]](request)
            except BaseException as error:  # noqa: BLE001  whatever it is, the reply says so
                reply = {"error": _error(error)}
            self.send(reply)


def _error(error: BaseException) -> list[str]:
    """Return class, text, trace and representation of an exception, whose methods may raise."""
    texts = [type(error).__name__]
    for describe in (str, lambda e: "".join(traceback.format_exception(e))[-_MAX_TEXT:], repr):
        try:
            texts.append("".join([describe(error)])[:_MAX_TEXT])
        except BaseException:  # noqa: BLE001  the code of the kernel may raise its own
            texts.append(f"{texts[0]}(...)")
    return texts


def main() -> None:
    """Serve the requests of the judge until the channel is closed."""
    limit_privileges()
    channel, memory = (int(argument) for argument in sys.argv[1:])
    del sys.argv[1:]
    # The collections before timed calls would visit all objects of torch, a tenth of a second each.
    gc.collect()
    gc.freeze()
    Channel(socket.socket(fileno=channel)).serve(Functions(mmap.mmap(memory, 0)).actions())


if __name__ == "__main__":
    main()
