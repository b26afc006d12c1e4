"""Queries of a device driver by a program that runs in a child process.

Initialising a driver can crash or hang a process, and often makes forks of the process useless for
the device. A platform therefore queries the driver in a child process and reads the answer as JSON.

This module is also the program that makes such a query through the driver's C library::

    python -I -S driver_inquiry.py QUERY LIBRARY...

loads the first LIBRARY that is found and prints the result of the function ``query`` in the file
QUERY. ``-I`` and ``-S`` leave site-packages out, so this module and QUERY import the standard
library only.
"""

from __future__ import annotations

import ctypes
import json
import runpy
import subprocess
import sys
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

__all__ = ["QUERY_PROGRAM", "DriverError", "DriverInquiry", "DriverLibrary", "DriverLostError"]

QUERY_PROGRAM = Path(__file__)
"""Program for ``DriverInquiry`` whose arguments are a query file and names of a C library."""

_Output = TypeVar("_Output")


class DriverError(Exception):
    """The driver could not be loaded, or one of its calls failed.

    Attributes:
        call: name of the function that failed; empty if the driver could not be called.
        code: error code of the driver; 0 if the driver could not be called.
        text: the failure, without the name of the function.
    """

    def __init__(self, text: str, call: str = "", code: int = 0) -> None:
        self.call = call
        self.code = code
        self.text = text
        super().__init__(f"{call}: {text}" if call else text)


class DriverLostError(DriverError):
    """The child process that queries the driver crashed or hung."""


class DriverLibrary:
    """A driver's C library, whose functions return 0 or an error code."""

    def __init__(self, names: Iterable[str], error_text: Callable[[ctypes.CDLL, int], str]) -> None:
        """Load the driver's C library.

        Args:
            names: names or paths of the library; the first that loads is used.
            error_text: describes an error code of the library.
        Raises: DriverError: no library loads.
        """
        self._library = _load_library(names)
        self._error_text = error_text

    def call(self, name: str, *arguments: object, ignored: Container[int] = ()) -> None:
        """Call a function of the library; an error code that is not ignored raises DriverError.

        Args:
            ignored: error codes that are no failure.
        Raises: DriverError: the library lacks the function, or the function returns an error.
        """
        try:
            function = getattr(self._library, name)
        except AttributeError:
            raise DriverError("this driver does not have it", name) from None
        function.restype = ctypes.c_uint32
        code = function(*arguments)
        if code and code not in ignored:
            raise DriverError(self._error_text(self._library, code), name, code)

    def read(
        self, output: _Output, name: str, *arguments: object, ignored: Container[int] = ()
    ) -> _Output:
        """Call a function of the library that fills ``output``, and return ``output``.

        Args:
            output: number, structure or array of ctypes.
            arguments: ``...`` stands for the pointer to ``output``.
            ignored: error codes that are no failure; the function has written nothing then.
        Raises: DriverError: the library lacks the function, or the function returns an error.
        """
        pointer = ctypes.byref(output)  # type: ignore[arg-type]  # any object of ctypes
        passed = (pointer if argument is ... else argument for argument in arguments)
        self.call(name, *passed, ignored=ignored)
        return output


@dataclass(frozen=True, slots=True)
class DriverInquiry:
    """A child-process program that queries one device driver.

    The last line that the program prints is a JSON object. The object has a key ``devices`` if the
    query succeeded, and otherwise the keys ``call``, ``code`` and ``text`` of the failure. The
    program may import the standard library only.

    Attributes:
        driver: display name of the driver, for error texts.
        program: path of the program, such as ``QUERY_PROGRAM``.
        timeout_advice: sentence that tells the user how to examine a driver that hangs.
        explanations: by error code, a text for codes that the driver does not explain itself.
    """

    driver: str
    program: Path
    timeout_advice: str
    explanations: Mapping[int, str] = field(default_factory=dict)

    def run(self, *arguments: str, limit_seconds: float = 60.0) -> dict[str, Any]:
        """Run the query program with this process's environment, and return its JSON object.

        Raises:
            DriverError: the driver cannot be loaded, or returns an error.
            DriverLostError: the driver crashes, or does not answer within ``limit_seconds``.
        """
        # -I and -S keep the user's Python settings and site-packages out of the child:
        # site-packages are slow to import, and an import could fail or initialise the driver.
        command = [sys.executable, "-I", "-S", str(self.program), *arguments]
        try:
            process = subprocess.run(
                command, capture_output=True, text=True, timeout=limit_seconds, check=False
            )
        except subprocess.TimeoutExpired:
            raise DriverLostError(
                f"{self.driver} gave no answer in {limit_seconds:g} s. {self.timeout_advice}"
            ) from None
        try:
            # The driver's libraries may print as well, so only the last line is the answer.
            answer: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
        except (ValueError, IndexError):
            last_line = process.stderr.strip().splitlines()[-1:] or ["it printed nothing"]
            raise DriverLostError(
                f"the process that asks {self.driver} ended with {process.returncode}: "
                f"{last_line[0]}"
            ) from None
        if "devices" not in answer:
            explanation = self.explanations.get(answer["code"])
            text = f"{answer['text']}; {explanation}" if explanation else answer["text"]
            raise DriverError(text, answer["call"], answer["code"])
        return answer


def _load_library(names: Iterable[str]) -> ctypes.CDLL:
    failures = []
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError as error:
            failures.append(str(error))
    raise DriverError("; ".join(failures))


def _query(file: str, libraries: Iterable[str]) -> dict[str, Any]:
    functions = runpy.run_path(file)
    try:
        answer: dict[str, Any] = functions["query"](
            DriverLibrary(libraries, functions["error_text"])
        )
    except DriverError as error:
        return {"call": error.call, "code": error.code, "text": error.text}
    return answer


if __name__ == "__main__":
    sys.stdout.write(json.dumps(_query(sys.argv[1], sys.argv[2:])) + "\n")
