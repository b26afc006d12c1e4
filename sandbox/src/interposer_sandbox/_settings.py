"""The settings of a process that foreign code has no reason to change, and how to restore them."""

from __future__ import annotations

import ctypes
import gc
import locale
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from operator import attrgetter
from typing import Any, NamedTuple

if sys.platform != "win32":
    import resource

    _LIMITS = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]

_TINY = sys.float_info.min


class Setting(NamedTuple):
    """One setting: its name after the word "changes", and the functions that get and set it."""

    name: str
    get: Callable[[], Any]
    put: Callable[[Any], object]


def settings(light: bool) -> Iterator[Setting]:
    """Yield the settings of this process that can be compared now.

    Those of libraries that were not imported yet are left out. Of code that is not ``light``
    the root logger is its own affair.
    """
    yield from _INTERPRETER
    yield from _SYSTEM
    if light:
        yield _ROOT_LOGGER
    loaded = sys.modules
    if (found := loaded.get("random")) is not None:
        yield Setting("the state of random", found.getstate, found.setstate)
    if (found := loaded.get("numpy.random")) is not None and hasattr(found, "get_state"):
        yield _numpy(found)
    if (found := loaded.get("socket")) is not None:
        yield Setting(
            "the default timeout of sockets", found.getdefaulttimeout, found.setdefaulttimeout
        )
    if (found := loaded.get("multiprocessing")) is not None:
        yield _start_method(found)
    torch = loaded.get("torch")
    if hasattr(torch, "set_float32_matmul_precision"):  # else another thread may be importing it
        for name, get, put in _TORCH:
            yield Setting(f"torch's {name}", attrgetter(get)(torch), attrgetter(put)(torch))
        yield _generator(torch)


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
        return ctypes.string_at(tensor.data_ptr(), tensor.numel())

    def put(state: bytes) -> None:
        # The default dtype and device may be among what was changed.
        torch.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))

    return Setting("the state of torch's generator", state, put)


def _numpy(module: Any) -> Setting:
    def state() -> tuple[Any, ...]:
        kind, words, *rest = module.get_state()
        return kind, words.tobytes(), *rest

    def put(state: tuple[Any, ...]) -> None:
        kind, words, *rest = state
        module.set_state((kind, memoryview(words).cast("I"), *rest))

    return Setting("the state of numpy.random", state, put)


def _start_method(module: Any) -> Setting:
    return Setting(
        "the start method of multiprocessing",
        lambda: module.get_start_method(allow_none=True),
        lambda method: module.set_start_method(method, force=True),
    )


def _collector() -> tuple[bool, tuple[int, ...]]:
    return gc.isenabled(), gc.get_threshold()


def _put_collector(state: tuple[bool, tuple[int, ...]]) -> None:
    (gc.enable if state[0] else gc.disable)()
    gc.set_threshold(*state[1])


def _arithmetic() -> tuple[bool, ...]:
    """Return whether there are numbers below the least normal one, and how sums are rounded.

    A library that is built with -ffast-math may switch the former off for the thread that loads it.
    """
    return _TINY / 2 > 0, 1 + _TINY == 1, 1 - _TINY == 1, -1 - _TINY == -1


def _put_arithmetic(_state: object) -> None:
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_flush_denormal(False)


def _put_locale(state: str) -> None:
    with suppress(locale.Error):
        locale.setlocale(locale.LC_ALL, state)


def _logger() -> tuple[object, ...]:
    root = logging.root
    return root.level, root.manager.disable, tuple(root.handlers)


def _put_logger(state: tuple[Any, ...]) -> None:
    root = logging.root
    root.level, root.manager.disable, root.handlers[:] = state


_ROOT_LOGGER = Setting("the root logger", _logger, _put_logger)
_INTERPRETER = [
    Setting("the profile function", sys.getprofile, sys.setprofile),
    Setting("the trace function", sys.gettrace, sys.settrace),
    Setting("the profile function of threads", threading.getprofile, threading.setprofile),
    Setting("the trace function of threads", threading.gettrace, threading.settrace),
    Setting("the stack size of threads", threading.stack_size, threading.stack_size),
    Setting("the recursion limit", sys.getrecursionlimit, sys.setrecursionlimit),
    Setting("the switch interval", sys.getswitchinterval, sys.setswitchinterval),
    Setting("the limit of digits", sys.get_int_max_str_digits, sys.set_int_max_str_digits),
    Setting("the garbage collector", _collector, _put_collector),
    Setting("the locale", lambda: locale.setlocale(locale.LC_ALL), _put_locale),
    Setting("the arithmetic of floats", _arithmetic, _put_arithmetic),
]
_SYSTEM: list[Setting] = []
if sys.platform != "win32":

    def _limits() -> list[tuple[int, int]]:
        return [resource.getrlimit(limit) for limit in _LIMITS]

    def _put_limits(state: list[tuple[int, int]]) -> None:
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

    def _put_timers(state: list[bool]) -> None:
        for timer, runs in zip(_TIMERS, state, strict=True):
            if not runs:  # one that was stopped cannot be started again
                signal.setitimer(timer, 0)

    _SYSTEM += [
        Setting("the limits of the process", _limits, _put_limits),
        Setting("the mask of new files", _umask, os.umask),
        Setting("the timers of the process", _timers, _put_timers),
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
    ]
if hasattr(os, "sched_setaffinity"):
    _SYSTEM.append(
        Setting(
            "the processors that it runs on",
            lambda: os.sched_getaffinity(0),
            lambda processors: os.sched_setaffinity(0, processors),
        )
    )
