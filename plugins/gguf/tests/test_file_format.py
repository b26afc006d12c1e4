"""Files that are damaged or hostile are refused with a sentence, whatever is wrong with them."""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tests.forks import forks

from interposer.errors import CheckpointError, UnsupportedModelError
from interposer_gguf._checkpoint import GGUFCheckpoint
from interposer_gguf._file_format import GGUFFile

HUGE = 2**63 - 1


def header(num_tensors: int = 0, num_entries: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_entries)


def text(content: bytes) -> bytes:
    return struct.pack("<Q", len(content)) + content


def tensor(
    name: bytes = b"x", shape: tuple[int, ...] = (32,), kind: int = 0, start: int = 0
) -> bytes:
    dims = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return text(name) + dims + struct.pack("<IQ", kind, start)


def array(kind: int, count: int, key: bytes = b"k") -> bytes:
    return text(key) + struct.pack("<IIQ", 9, kind, count)


def refused(tmp_path: Path, content: bytes) -> str:
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as raised:
        GGUFFile.open(path)
    assert str(raised.value).startswith(f"{path}: ")
    return str(raised.value)


def test_the_structure_agrees_with_the_gguf_library(small: Callable[..., Path]) -> None:
    path = small(**{"x.list": [1.5, -2.0], "x.name": "é", "x.flag": False, "x.words": ["a", ""]})
    file, reader = GGUFFile.open(path), gguf.GGUFReader(path)
    expected = {
        name: field.contents() for name, field in reader.fields.items() if "GGUF." not in name
    }
    assert {name: list_or_value(value) for name, value in file.metadata.items()} == expected
    assert sorted(file.tensors) == sorted(t.name for t in reader.tensors)
    for stored in reader.tensors:
        tensor = file.tensors[stored.name]
        assert (tensor.start, tensor.num_bytes) == (stored.data_offset, stored.n_bytes)
        assert tensor.shape == tuple(int(size) for size in reversed(stored.shape))
        values = file.read(tensor).numpy()
        np.testing.assert_array_equal(values.view(np.uint8), stored.data.view(np.uint8))


def list_or_value(value: Any) -> Any:
    return list(value) if isinstance(value, list) else value


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "ends within its first bytes"),
        (b"safe" + bytes(40), "is not a GGUF file"),
        (b"GGUF\x03\0", "ends within its version: 4 bytes are needed at 4, the file has 6"),
        (header(version=1), "is of version 1, supported are"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "is big-endian"),
        (header(num_tensors=HUGE), "says that it holds 9,223,372,036,854,775,807 tensors"),
        (header(num_entries=HUGE), "775,807 metadata entries, for which the 0 bytes that follow"),
        (header(0, 1) + struct.pack("<Q", HUGE) + bytes(5), "a metadata key has 9,223,372"),
        (header(0, 1) + struct.pack("<Q", 9) + bytes(5), "ends within a metadata key"),
        (header(0, 1) + text(b"\xff\xfe") + bytes(9), "a metadata key that is not UTF-8"),
        (header(0, 1) + text(b"k") + struct.pack("<II", 13, 0), "'k' of the type 13"),
        (header(0, 1) + array(9, 1) + bytes(20), "'k' of the type 9, which is not known"),
        (header(0, 1) + array(0, HUGE), "775,807 elements of 'k'"),
        (header(0, 1) + array(8, HUGE), "775,807 elements of 'k'"),
        (header(0, 1) + array(10, 4) + bytes(31), "4 elements of 'k'"),
        (header(0, 1) + array(0, 5_000_000) + bytes(5_000_000), "more than 4,194,304 elements"),
        (header(0, 2) + (text(b"k") + struct.pack("<IB", 0, 1)) * 3, "the metadata 'k' twice"),
        (header(1) + tensor(shape=()) + bytes(64), "'x' of 0 dimensions"),
        (header(1) + tensor(shape=(1,) * 5) + bytes(64), "'x' of 5 dimensions"),
        (header(1) + text(b"x") + struct.pack("<I", 2**32 - 1) + bytes(64), "295 dimensions"),
        (header(1) + tensor(shape=(32, 0)) + bytes(64), r"'x' of the shape (0, 32)"),
        (header(1) + tensor(shape=(2**62, 2**62)) + bytes(64), "ends within the tensor 'x'"),
        (header(1) + tensor(start=2**63) + bytes(256), "ends within the tensor 'x'"),
        (header(1) + tensor(start=4) + bytes(256), "at 4, which is no multiple of 32"),
        (header(1) + tensor(kind=8, shape=(33,)) + bytes(99), "blocks of 32, which do not divide"),
        (header(1) + tensor(kind=12) + bytes(200), "blocks of 256, which do not divide"),
        (
            header(1) + tensor(kind=17) + bytes(99),
            "'x' as IQ2_XS, which is not supported; supported are F32",
        ),
        (header(1) + tensor(kind=99) + bytes(99), "'x' as the unknown type 99"),
        (header(2) + tensor() * 2 + bytes(300), "holds the tensor 'x' twice"),
        (header(2) + tensor() + tensor(b"y") + bytes(300), "overlapping tensors 'x' and 'y'"),
        (
            header(2) + tensor() + tensor(b"y", start=96) + bytes(400),
            "overlapping tensors 'x' and 'y'",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{len(value)} bytes",
)
def test_corrupt_files_raise_with_the_reason(tmp_path: Path, content: bytes, reason: str) -> None:
    assert reason in refused(tmp_path, content)


@pytest.mark.parametrize("value", [0, 3, 2**31])
def test_an_alignment_must_be_a_power_of_two(tmp_path: Path, value: int) -> None:
    entry = text(b"general.alignment") + struct.pack("<II", 4, value)
    assert f"has the alignment {value}" in refused(tmp_path, header(0, 1) + entry)


def test_an_explicit_alignment_is_used(tmp_path: Path) -> None:
    path = tmp_path / "aligned.gguf"
    entry = text(b"general.alignment") + struct.pack("<II", 4, 8)
    start = header(1, 1) + entry + tensor(shape=(2,))
    path.write_bytes(start + bytes(-len(start) % 8) + struct.pack("<2f", 1.5, -2))
    file = GGUFFile.open(path)
    assert torch.equal(file.read(file.tensors["x"]), torch.tensor([1.5, -2.0]))


def test_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be read"):
        GGUFFile.open(tmp_path)


def test_a_file_that_shrinks_raises(small: Callable[..., Path]) -> None:
    path = small()
    checkpoint = GGUFCheckpoint.open(path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"within the tensor 'blk\.0\.ffn_down"):
        list(checkpoint.stream())


@pytest.mark.slow
def test_every_truncation_is_refused(small: Callable[..., Path], tmp_path: Path) -> None:
    content = small().read_bytes()
    reader = gguf.GGUFReader(tmp_path / "small.gguf")
    path = tmp_path / "cut.gguf"
    for size in [*range(0, reader.data_offset, 3), reader.data_offset, len(content) - 1]:
        path.write_bytes(content[:size])
        with pytest.raises(CheckpointError):
            GGUFFile.open(path)


def test_an_unsupported_type_raises_unsupported_model_error(tmp_path: Path) -> None:
    path = tmp_path / "iq.gguf"
    path.write_bytes(header(1) + tensor(kind=23) + bytes(99))
    with pytest.raises(UnsupportedModelError, match="IQ4_XS"):
        GGUFFile.open(path)


# Reads mutations of a file to their end, in memory that is limited, and prints what came of it.
FUZZ = """
import faulthandler, json, random, resource, signal, struct, sys
from collections import Counter
from pathlib import Path
import torch
from interposer.errors import InterposerError
from interposer_models.families import DecoderFamily
from interposer_engine import plan
from interposer_engine import TextTokenizer
from interposer_gguf._checkpoint import GGUFCheckpoint

original, count, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
content, rng = original.read_bytes(), random.Random(seed)
structure, planned = int(sys.argv[4]), sys.argv[5] == "True"
path = original.with_name("mutated.gguf")
extremes = [0, 1, 2**7, 2**8 - 1, 2**15, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63,
            2**64 - 1]

def mutated():
    data = bytearray(content)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        place = rng.randrange(structure if rng.random() < 0.9 else len(data))
        match rng.randrange(7):
            case 0:
                data[place] ^= 1 << rng.randrange(8)
            case 1:
                data[place] = rng.randrange(256)
            case 2:
                data[place:place + 8] = struct.pack("<Q", rng.choice(extremes))
            case 3:
                data[place:place + 4] = struct.pack("<I", rng.choice(extremes) & 2**32 - 1)
            case 4:
                del data[place:place + rng.randrange(1, 64)]
            case 5:
                data[place:place] = bytes(rng.randrange(256) for _ in range(rng.randrange(1, 64)))
            case 6:
                other = rng.randrange(len(data))
                data[place:place + 16] = data[other:other + 16]
        if len(data) < structure:
            break
    return bytes(data)

def read():
    checkpoint = GGUFCheckpoint.open(path)
    for _, tensor in checkpoint.stream():
        tensor.sum()
    TextTokenizer.of_json(checkpoint.tokenizer(), path).encode("abc ab")
    DecoderFamily.parse(checkpoint.config, path)
    if planned:
        plan(path, dtype="float32")

def counted_read():
    # Reads the file; afterwards ``num_calls`` is the number of calls that it took.
    global num_calls
    num_calls = 0

    def count_call(frame, event, argument):
        global num_calls
        num_calls += event in ("call", "c_call")

    sys.setprofile(count_call)
    try:
        read()
    finally:
        sys.setprofile(None)

path.write_bytes(content)
read()  # imports and builds what later reads have
counted_read()
calls_of_valid_file = most_calls = num_calls
limit = resource.getrlimit(resource.RLIMIT_AS)
size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + 2**30, limit[1]))
found = Counter()
# Ends a read that never returns. By the processor's time, so that a busy machine does not matter.
faulthandler.register(signal.SIGPROF, chain=True)
for index in range(count):
    path.write_bytes(mutated())
    signal.setitimer(signal.ITIMER_PROF, 60)
    try:
        counted_read()
        found["read"] += 1
    except InterposerError as error:
        found[type(error).__name__] += 1
    except BaseException as error:
        path.rename(path.with_name(f"failed-{index}.gguf"))
        raise SystemExit(f"mutation {index} raised {error!r:.500}") from error
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    most_calls = max(most_calls, num_calls)
print(json.dumps({"found": found, "calls": [calls_of_valid_file, most_calls]}))
"""


@pytest.mark.process
@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc and a limit of address space")
@pytest.mark.parametrize(
    ("count", "planned"), [(200, False), pytest.param(2000, True, marks=pytest.mark.slow)]
)
def test_mutations_are_read_or_refused(
    small: Callable[..., Path], count: int, planned: bool
) -> None:
    path = small()
    structure = gguf.GGUFReader(path).data_offset
    arguments = [str(value) for value in (path, count, count, structure, planned)]
    done = forks().run("-c", FUZZ, *arguments, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert sum(report["found"].values()) == count
    assert report["found"]["CheckpointError"] > count / 4
    assert report["found"]["read"] > 0
    calls_of_valid_file, most_calls = report["calls"]
    assert most_calls < 10 * calls_of_valid_file
