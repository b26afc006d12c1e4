"""Queries of a device driver by a program that runs in a child process.

Initialising a driver can crash or hang a process, and often makes forks of the process useless for
the device. A platform therefore queries the driver in a child process and reads the answer as JSON.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["DriverError", "DriverInquiry", "DriverLostError"]


class DriverError(Exception):
    """The driver could not be loaded, or one of its calls failed.

    Attributes:
        call: name of the function that failed; empty if the driver could not be called.
        code: error code of the driver; 0 if the driver could not be called.
    """

    def __init__(self, text: str, call: str = "", code: int = 0) -> None:
        self.call = call
        self.code = code
        super().__init__(f"{call}: {text}" if call else text)


class DriverLostError(DriverError):
    """The child process that queries the driver crashed or hung."""


@dataclass(frozen=True, slots=True)
class DriverInquiry:
    """A program that queries one driver.

    The last line that the program prints is a JSON object. The object has a key ``devices`` if the
    query succeeded, and otherwise the keys ``call``, ``code`` and ``text`` of the failure. The
    program may import the standard library only.

    Attributes:
        driver: display name of the driver, for error texts.
        program: path of the program.
        timeout_advice: sentence that tells the user how to examine a driver that hangs.
        explanations: by error code, a text for codes that the driver does not explain itself.
    """

    driver: str
    program: Path
    timeout_advice: str
    explanations: Mapping[int, str] = field(default_factory=dict)

    def run(self, *arguments: str, limit_seconds: float = 60.0) -> dict[str, Any]:
        """Run the program with the environment of this process, and return its JSON object.

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
