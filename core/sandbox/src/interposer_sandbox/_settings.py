"""Process settings that foreign code has no reason to change, each with a restore function."""

from __future__ import annotations

import _imp
import codecs
import ctypes
import faulthandler
import gc
import locale
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

if sys.platform != "win32":
    import resource

    _LIMITS = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]

_TINY = sys.float_info.min
# Lines of /proc/self/status with the rights of a process.
_RIGHTS = ("Uid", "Gid", "Groups", "NoNewPrivs", "Seccomp", "CapEff", "CapBnd", "CapAmb")
# Signals 32 and 33, which libc catches once there is a thread.
_LIBC_SIGNALS = 3 << 31
_ERROR_HANDLERS = ("strict", "ignore", "replace", "backslashreplace", "surrogateescape")
# Dispatch keys that are ignored: torch itself registers kernels for Meta at run time, and
# PrivateUse belongs to devices of third parties.
_IGNORED_KEYS = ("Meta", "PrivateUse", "AutogradPrivateUse")


class Setting(NamedTuple):
    """One setting of the process; ``name`` completes the sentence "changes ..."."""

    name: str
    get: Callable[[], Any]
    restore: Callable[[Any], object]


def settings(light: bool) -> Iterator[Setting]:
    """Yield the settings of this process that can be compared now.

    Settings of libraries that are not imported yet are left out. So are the settings that code may
    change if the code is not ``light``, such as the root logger.
    """
    yield from _INTERPRETER
    yield from _SYSTEM
    if light:
        yield from _LIGHT
    loaded = sys.modules
    if (module := loaded.get("random")) is not None:
        yield Setting("the state of random", module.getstate, module.setstate)
    if (module := loaded.get("numpy.random")) is not None and hasattr(module, "get_state"):
        yield _numpy(module)
        parent = loaded["numpy"]
        yield Setting("NumPy's errors", parent.geterr, lambda state: parent.seterr(**state))
    if (module := loaded.get("socket")) is not None:
        yield Setting(
            "the default timeout of sockets", module.getdefaulttimeout, module.setdefaulttimeout
        )
    if (module := loaded.get("multiprocessing")) is not None:
        yield _start_method(module)
    torch = loaded.get("torch")
    # Without this function, another thread may still be importing torch.
    if hasattr(torch, "set_float32_matmul_precision"):
        for name, get, restore in _TORCH:
            yield Setting(f"torch's {name}", attrgetter(get)(torch), attrgetter(restore)(torch))
        yield _generator(torch)
        yield _autocast(torch)
        yield from _interceptors(torch)


# Settings of torch, each with the functions that get and set it.
_TORCH = (
    ("default dtype", "get_default_dtype", "set_default_dtype"),
    ("default device", "get_default_device", "set_default_device"),
    ("number of threads", "get_num_threads", "set_num_threads"),
    ("gradient mode", "is_grad_enabled", "set_grad_enabled"),
    ("deterministic mode", "get_deterministic_debug_mode", "set_deterministic_debug_mode"),
    ("float32 precision", "get_float32_matmul_precision", "set_float32_matmul_precision"),
    ("anomaly mode", "is_anomaly_enabled", "set_anomaly_enabled"),
    ("switch of oneDNN", "_C._get_mkldnn_enabled", "_C._set_mkldnn_enabled"),
    ("switch of cuDNN", "_C._get_cudnn_enabled", "_C._set_cudnn_enabled"),
    ("benchmark mode of cuDNN", "_C._get_cudnn_benchmark", "_C._set_cudnn_benchmark"),
    ("deterministic mode of cuDNN", "_C._get_cudnn_deterministic", "_C._set_cudnn_deterministic"),
    ("switch of flash attention", "_C._get_flash_sdp_enabled", "_C._set_sdp_use_flash"),
    (
        "switch of memory-efficient attention",
        "_C._get_mem_efficient_sdp_enabled",
        "_C._set_sdp_use_mem_efficient",
    ),
    ("switch of plain attention", "_C._get_math_sdp_enabled", "_C._set_sdp_use_math"),
)


def _generator(torch: Any) -> Setting:
    def state() -> bytes:
        tensor = torch.get_rng_state()
        # As bytes, because settings are compared with ``!=``.
        return ctypes.string_at(tensor.data_ptr(), tensor.numel())

    def restore(state: bytes) -> None:
        # The code may have changed the default dtype and device, so the tensor must not use them.
        torch.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))

    return Setting("the state of torch's generator", state, restore)


def _autocast(torch: Any) -> Setting:
    accelerator = torch.accelerator.current_accelerator()
    devices = ["cpu", *([accelerator.type] if accelerator is not None else [])]

    def restore(state: list[bool]) -> None:
        for device, enabled in zip(devices, state, strict=True):
            torch.set_autocast_enabled(device, enabled)

    return Setting(
        "torch's autocast", lambda: [torch.is_autocast_enabled(d) for d in devices], restore
    )


def _interceptors(torch: Any) -> Iterator[Setting]:
    """Yield torch's dispatch modes and hooks, which intercept calls of torch functions."""
    for kind, arguments in (("function", ()), ("dispatch", (None,))):  # None pops any mode
        depth = getattr(torch._C, f"_len_torch_{kind}_stack")
        pop = getattr(torch._C, f"_pop_torch_{kind}_stack")
        yield Setting(
            f"torch's stack of {kind} modes",
            depth,
            partial(_shorten, depth, partial(pop, *arguments)),
        )
    hooks = [hooks for name, hooks in vars(torch.nn.modules.module).items() if _is_hooks(name)]

    def restore_hooks(state: list[dict[Any, Any]]) -> None:
        for registered, before in zip(hooks, state, strict=True):
            registered.clear()
            registered.update(before)

    yield Setting("torch's hooks of all modules", lambda: [dict(h) for h in hooks], restore_hooks)
    # Only the owner of the library object can remove a kernel, so nothing is restored.
    yield Setting("torch's kernels of aten", _Overrides(torch.library._impls), lambda before: None)


class _Overrides:
    """Lists the aten kernels that Python registered for devices, and caches the list."""

    cached: tuple[int, frozenset[str]] = (0, frozenset())

    def __init__(self, registered: set[str]) -> None:
        self._registered = registered

    def __call__(self) -> frozenset[str]:
        if len(self._registered) != self.cached[0]:
            names = (name for name in self._registered if name.startswith("aten/"))
            kernels = {n for n in names if not n.rpartition("/")[2].startswith(_IGNORED_KEYS)}
            _Overrides.cached = len(self._registered), frozenset(kernels)
        return self.cached[1]


def _shorten(depth: Callable[[], int], pop: Callable[[], object], before: int) -> None:
    while depth() > before:
        pop()


def _is_hooks(name: str) -> bool:
    return name.startswith("_global") and name.endswith(("_hooks", "_always_called", "_kwargs"))


def _numpy(module: Any) -> Setting:
    def state() -> tuple[Any, ...]:
        kind, values, *remaining_state = module.get_state()
        return kind, values.tobytes(), *remaining_state

    def restore(state: tuple[Any, ...]) -> None:
        kind, values, *remaining_state = state
        module.set_state((kind, memoryview(values).cast("I"), *remaining_state))

    return Setting("the state of numpy.random", state, restore)


def _start_method(module: Any) -> Setting:
    return Setting(
        "the start method of multiprocessing",
        lambda: module.get_start_method(allow_none=True),
        lambda method: module.set_start_method(method, force=True),
    )


def _collector() -> tuple[bool, tuple[int, ...], int]:
    return gc.isenabled(), gc.get_threshold(), gc.get_debug()


def _restore_collector(state: tuple[bool, tuple[int, ...], int]) -> None:
    (gc.enable if state[0] else gc.disable)()
    gc.set_threshold(*state[1])
    gc.set_debug(state[2])


def _unlock_imports(was_held: bool) -> None:
    while _imp.lock_held() and not was_held:
        _imp.release_lock()


def _error_handlers() -> list[Any]:
    return [codecs.lookup_error(name) for name in _ERROR_HANDLERS]


def _restore_error_handlers(state: list[Any]) -> None:
    for name, handler in zip(_ERROR_HANDLERS, state, strict=True):
        codecs.register_error(name, handler)


def _restore_async_hooks(state: Any) -> None:
    sys.set_asyncgen_hooks(*state)


def _status(names: tuple[str, ...]) -> list[str]:
    """Return lines of /proc/self/status; none if the system has no such file."""
    try:
        text = Path("/proc/self/status").read_text("utf-8", "replace")
    except OSError:
        return []
    return [line for line in text.splitlines() if line.startswith(names)]


def _handled_signals() -> list[int]:
    """Return the bit masks of ignored and of caught signals, without libc's own two signals."""
    return [int(line.split()[1], 16) & ~_LIBC_SIGNALS for line in _status(("SigIgn", "SigCgt"))]


def _sys_setting(name: str) -> Setting:
    """Create the setting of a plain value in the module sys; lists are copied."""

    def get() -> Any:
        value = getattr(sys, name, None)
        return [*value] if isinstance(value, list) else value

    def restore(state: Any) -> None:
        if state is None and name == "tracebacklimit":  # None differs from an absent value
            del sys.tracebacklimit
        else:
            setattr(sys, name, state)

    return Setting(f"sys.{name}", get, restore)


def _arithmetic() -> tuple[bool, ...]:
    """Probe the FPU: whether subnormals are flushed, and three sums that show the rounding.

    Loading a library that was built with -ffast-math may disable subnormal numbers in the thread.
    """
    return _TINY / 2 > 0, 1 + _TINY == 1, 1 - _TINY == 1, -1 - _TINY == -1


def _restore_arithmetic(_state: object) -> None:
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_flush_denormal(False)


def _restore_locale(state: str) -> None:
    with suppress(locale.Error):
        locale.setlocale(locale.LC_ALL, state)


def _logger() -> tuple[object, ...]:
    root = logging.root
    return root.level, root.manager.disable, tuple(root.handlers)


def _restore_logger(state: tuple[Any, ...]) -> None:
    root = logging.root
    root.level, root.manager.disable, root.handlers[:] = state


def _interposer_logger() -> tuple[object, ...]:
    logger = logging.getLogger("interposer")
    return (
        logging.getLoggerClass(),
        logger.level,
        logger.disabled,
        logger.propagate,
        [*logger.handlers],
    )


def _restore_interposer_logger(state: tuple[Any, ...]) -> None:
    logger = logging.getLogger("interposer")
    cls, level, logger.disabled, logger.propagate, logger.handlers[:] = state
    logging.setLoggerClass(cls)
    logger.setLevel(level)


# Settings that code which is not light may change for its own purposes.
_LIGHT = [
    Setting("the root logger", _logger, _restore_logger),
    Setting(
        "the logger of interposer, or the class of loggers",
        _interposer_logger,
        _restore_interposer_logger,
    ),
    Setting("the fault handler", faulthandler.is_enabled, lambda _: faulthandler.enable()),
    *map(_sys_setting, ("argv", "dont_write_bytecode", "pycache_prefix", "tracebacklimit")),
]
_INTERPRETER = [
    Setting("the profile function", sys.getprofile, sys.setprofile),
    Setting("the trace function", sys.gettrace, sys.settrace),
    Setting("the profile function of threads", threading.getprofile, threading.setprofile),
    Setting("the trace function of threads", threading.gettrace, threading.settrace),
    Setting("the stack size of threads", threading.stack_size, threading.stack_size),
    Setting("the recursion limit", sys.getrecursionlimit, sys.setrecursionlimit),
    Setting("the switch interval", sys.getswitchinterval, sys.setswitchinterval),
    Setting("the limit of digits", sys.get_int_max_str_digits, sys.set_int_max_str_digits),
    Setting("the garbage collector", _collector, _restore_collector),
    Setting("the locale", lambda: locale.setlocale(locale.LC_ALL), _restore_locale),
    Setting("the arithmetic of floats", _arithmetic, _restore_arithmetic),
    Setting("the lock of imports", _imp.lock_held, _unlock_imports),
    Setting("the handlers of codecs' errors", _error_handlers, _restore_error_handlers),
    Setting("the hooks of asynchronous generators", sys.get_asyncgen_hooks, _restore_async_hooks),
    Setting(
        "the origins of coroutines",
        sys.get_coroutine_origin_tracking_depth,
        sys.set_coroutine_origin_tracking_depth,
    ),
]
_SYSTEM: list[Setting] = []
if sys.platform != "win32":

    def _limits() -> list[tuple[int, int]]:
        return [resource.getrlimit(limit) for limit in _LIMITS]

    def _restore_limits(state: list[tuple[int, int]]) -> None:
        for limit, (soft, hard) in zip(_LIMITS, state, strict=True):
            with suppress(ValueError, OSError):  # a hard limit cannot be raised again
                resource.setrlimit(limit, (soft, hard))

    def _umask() -> int:
        mask = os.umask(0o077)
        os.umask(mask)
        return mask

    _TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)

    def _timers() -> list[bool]:
        return [any(signal.getitimer(timer)) for timer in _TIMERS]

    def _restore_timers(state: list[bool]) -> None:
        for timer, runs in zip(_TIMERS, state, strict=True):
            if not runs:  # a timer that the code stopped cannot be restarted
                signal.setitimer(timer, 0)

    _SYSTEM += [
        Setting("the limits of the process", _limits, _restore_limits),
        Setting("the mask of new files", _umask, os.umask),
        Setting("the timers of the process", _timers, _restore_timers),
        Setting(
            "the blocked signals",
            lambda: signal.pthread_sigmask(signal.SIG_BLOCK, ()),
            lambda mask: signal.pthread_sigmask(signal.SIG_SETMASK, mask),
        ),
        Setting(
            "the priority of the process",
            lambda: os.getpriority(os.PRIO_PROCESS, 0),
            lambda value: os.setpriority(os.PRIO_PROCESS, 0, value),
        ),
        Setting("the flags of dlopen", sys.getdlopenflags, sys.setdlopenflags),
        # Rights that a process gave up cannot be restored.
        Setting("the rights of the process", lambda: _status(_RIGHTS), lambda before: None),
        Setting("its group or session", lambda: (os.getpgrp(), os.getsid(0)), lambda before: None),
    ]
    _LIGHT += [
        # Python does not know the handlers that C code installs, but the system does.
        Setting("the signals it minds", _handled_signals, lambda before: None),
    ]
if hasattr(os, "sched_setaffinity"):
    _SYSTEM.append(
        Setting(
            "the processors that it runs on",
            lambda: os.sched_getaffinity(0),
            lambda processors: os.sched_setaffinity(0, processors),
        )
    )
