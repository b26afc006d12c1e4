"""A driver is queried in a child process, whose crash or hang is reported and not taken over."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from interposer_ops.devices.driver_inquiry import (
    QUERY_PROGRAM,
    DriverError,
    DriverInquiry,
    DriverLibrary,
    DriverLostError,
)

pytestmark = pytest.mark.process


def inquiry(folder: Path, program: str) -> DriverInquiry:
    path = folder / "program.py"
    path.write_text(program, encoding="utf-8")
    return DriverInquiry("Acme's driver", path, "Restart the machine", {7: "the card is loose"})


def failure(call: str, code: int, text: str) -> str:
    answer = {"call": call, "code": code, "text": text}
    return f"import json\nprint(json.dumps({answer!r}))"


def test_the_last_line_is_the_answer(tmp_path: Path) -> None:
    program = """
import json, sys
print("a library says hello")
print(json.dumps({"devices": sys.argv[1:]}))
"""
    assert inquiry(tmp_path, program).run("a", "b") == {"devices": ["a", "b"]}


def test_the_program_sees_the_standard_library_only(tmp_path: Path) -> None:
    program = """
import json
from importlib.util import find_spec
print(json.dumps({"devices": [name for name in ("torch", "json") if find_spec(name)]}))
"""
    assert inquiry(tmp_path, program).run() == {"devices": ["json"]}


@pytest.mark.parametrize(
    ("call", "code", "text", "message"),
    [
        ("init", 7, "no device", "init: no device; the card is loose"),
        ("init", 8, "no memory", "init: no memory"),
        ("", 0, "libacme.so: cannot open", "libacme.so: cannot open"),
    ],
)
def test_a_failed_call_is_raised_with_its_explanation(
    tmp_path: Path, call: str, code: int, text: str, message: str
) -> None:
    with pytest.raises(DriverError) as raised:
        inquiry(tmp_path, failure(call, code, text)).run()
    error = raised.value
    assert not isinstance(error, DriverLostError)
    assert (str(error), error.call, error.code) == (message, call, code)


@pytest.mark.parametrize(
    ("program", "end"),
    [
        ("import os; os.abort()", "-6: it printed nothing"),
        ("import sys; sys.exit('out of order')", "1: out of order"),
        ("", "0: it printed nothing"),
    ],
)
def test_a_driver_that_crashes_is_lost(tmp_path: Path, program: str, end: str) -> None:
    with pytest.raises(DriverLostError) as raised:
        inquiry(tmp_path, program).run()
    assert str(raised.value) == f"the process that asks Acme's driver ended with {end}"


def test_a_driver_that_hangs_is_lost(tmp_path: Path) -> None:
    with pytest.raises(DriverLostError) as raised:
        inquiry(tmp_path, "import time; time.sleep(600)").run(limit_seconds=0.5)
    assert str(raised.value) == "Acme's driver gave no answer in 0.5 s. Restart the machine"


QUERY = """
import ctypes
from ctypes import c_void_p

def query(library):
    library.call("atoi", b"7", ignored={7})
    end = library.read(c_void_p(), "strtol", b"0 apples", ..., 10)
    library.call("atoi", CALLED)
    return {"devices": [ctypes.string_at(end.value).decode()]}

def error_text(library, code):
    return f"error {code}"
"""


@pytest.mark.parametrize(
    ("libraries", "called", "outcome"),
    [
        (["libc.so.6"], "b'0'", None),
        (["libabsent.so", "libc.so.6"], "b'0'", None),
        (["libc.so.6"], "b'7'", "atoi: error 7; the card is loose"),
        (["libc.so.6"], "b'8'", "atoi: error 8"),
        (["libabsent.so"], "b'0'", "libabsent.so: cannot open shared object file"),
    ],
)
@pytest.mark.skipif(sys.platform != "linux", reason="needs the C library of Linux")
def test_a_query_calls_the_functions_of_a_library(
    tmp_path: Path, libraries: list[str], called: str, outcome: str | None
) -> None:
    query = tmp_path / "query.py"
    query.write_text(QUERY.replace("CALLED", called), encoding="utf-8")
    acme = DriverInquiry("Acme's driver", QUERY_PROGRAM, "", {7: "the card is loose"})
    if outcome is None:
        assert acme.run(str(query), *libraries) == {"devices": [" apples"]}
    else:
        with pytest.raises(DriverError) as raised:
            acme.run(str(query), *libraries)
        assert str(raised.value).startswith(outcome)


@pytest.mark.skipif(sys.platform != "linux", reason="needs the C library of Linux")
def test_a_function_that_a_library_lacks_is_an_error() -> None:
    library = DriverLibrary(["libc.so.6"], lambda _, code: str(code))
    with pytest.raises(DriverError, match="find_the_card: this driver does not have it"):
        library.call("find_the_card")
