"""Measure how long a model takes to start, and what memory it takes, beside llama.cpp.

    python benchmarks/models_starting.py MODEL_DIR [--quantization none int8 w4a8] [--gguf FILE ...]

Each row is a process of its own. ``read`` keeps nothing, ``first`` packs into a file, ``mapped``
finds it there. ``load`` is the wall time of loading, after a plan that imported what it needs;
``anonymous`` the most anonymous bytes until then, those of Python and torch included, and ``rise``
by how much they rose meanwhile; ``peak`` the most of all memory, a short answer included, and
``full`` with a prompt that fills the cache as well; ``own`` what this process has of it while
another one has the same model, shared pages divided by two. A file of llama.cpp is loaded in the
environment below ``~/.cache/interposer-benchmarks/llama_cpp``. Both sides count whole processes,
with Python and mapped files, and have no vocabulary: the files of ``cpu_models.py`` for llama.cpp
hold none, so that ours is left out, and told in a row of its own.

``floor`` of a first load is what reading the checkpoint and writing the packed file would take at
the speed of copying memory that is there, with as many threads, in the same process just before;
``to pages`` at that of copying into new pages of a file, as packed weights have to.

At last ``interposer run`` of the model that is shipped, to its first token, beside what importing
torch takes: wall and processor time, the least of several.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SHIPPED = ROOT / "examples" / "models" / "stdlib-lm"
PEER = Path.home() / ".cache" / "interposer-benchmarks" / "llama_cpp" / "bin" / "python"
LOAD_PEER = """
import json, sys, time
from llama_cpp import Llama
start = time.perf_counter()
model = Llama(sys.argv[1], n_ctx=int(sys.argv[2]), n_threads=int(sys.argv[3]), verbose=False)
seconds = time.perf_counter() - start
model.eval([1, 2, 3, 4])
fields = dict(line.split(":", 1) for line in open("/proc/self/status"))
peak = int(fields["VmHWM"].split()[0]) * 1024
model.reset()
model.eval([at % 1000 for at in range(int(sys.argv[2]) - 8)])
fields = dict(line.split(":", 1) for line in open("/proc/self/status"))
full = int(fields["VmHWM"].split()[0]) * 1024
print(json.dumps({"load_s": seconds, "peak": peak, "full": full}))
"""
ROUNDS = 3
COPIED_BYTES = 256 << 20


def bytes_of(file: str, name: str) -> int:
    """Return a number of bytes that the system tells of this process."""
    found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self", file).read_text(), re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def load_here(model: str, quantization: str, packed: str, tokens: int, floor: bool) -> None:
    """Load a model, print what that took, and stay until a line comes."""
    import torch

    import interposer_engine
    from interposer import Config

    config = Config.model_validate({"packed": packed})
    settings: dict[str, Any] = {} if quantization == "none" else {"quantization": quantization}
    interposer_engine.plan(model, config=config, **settings)
    floors = floors_of(model) if floor else dict
    Path("/proc/self/clear_refs").write_text("5")  # the peak is to be the model's
    before = peak = bytes_of("status", "RssAnon")
    ended = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not ended.wait(0.001):
            peak = max(peak, bytes_of("status", "RssAnon"))

    watching = threading.Thread(target=watch)
    watching.start()
    start, used = time.perf_counter(), time.process_time()
    lm = interposer_engine.load(
        model, config=config, cache_tokens=tokens, max_sequences=1, **settings
    )
    seconds, processor = time.perf_counter() - start, time.process_time() - used
    ended.set()
    watching.join()
    lm.generate([[1, 2, 3, 4]], max_new_tokens=4)
    peak_all = bytes_of("status", "VmHWM")
    lm.generate([[at % 1000 for at in range(tokens - 8)]], max_new_tokens=4)
    for thread in threading.enumerate():
        if thread.name == "interposer-packed":
            thread.join()
    facts = {
        "load_s": seconds,
        "processor_s": processor,
        "anonymous": peak,
        "rise": peak - before,
        "peak": peak_all,
        "full": bytes_of("status", "VmHWM"),
        **floors(),
        "threads": torch.get_num_threads(),
    }
    print(json.dumps(facts), flush=True)
    sys.stdin.readline()
    print(json.dumps({"own": bytes_of("smaps_rollup", "Pss")}), flush=True)
    sys.stdin.readline()


def floors_of(model: str) -> Callable[[], dict[str, float]]:
    """Return a function that tells, after a first load, what copying its bytes would have taken.

    What is copied here goes before the load begins.
    """
    import torch

    folder = Path(os.environ["INTERPOSER_CACHE_DIR"], "packed")
    held = {path.name for path in folder.glob("*")}
    here = torch.empty(COPIED_BYTES, dtype=torch.uint8).fill_(1)
    there = torch.empty_like(here).fill_(2)
    memory = min(seconds_of(lambda: there.copy_(here)) for _ in range(5))
    with tempfile.TemporaryFile(dir=folder.parent) as file:
        os.posix_fallocate(file.fileno(), 0, COPIED_BYTES)
        with mmap.mmap(file.fileno(), COPIED_BYTES) as pages:
            pages.madvise(mmap.MADV_HUGEPAGE)
            fresh = seconds_of(partial(torch.frombuffer(pages, dtype=torch.uint8).copy_, here))

    def told() -> dict[str, float]:
        read = sum(path.stat().st_size for path in Path(model).glob("*.safetensors"))
        (written,) = (path for path in folder.glob("*.safetensors") if path.name not in held)
        num_bytes = read + written.stat().st_size
        share = num_bytes / (2 * COPIED_BYTES)
        return {"floor_s": share * memory, "to_pages_s": share * fresh}

    return told


def seconds_of(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def vocabulary_here(model: str) -> None:
    """Print what reading the tokenizer takes."""
    from interposer_engine import TextTokenizer

    before = bytes_of("status", "RssAnon")
    seconds = seconds_of(lambda: TextTokenizer(Path(model)).read())
    print(json.dumps({"read_s": seconds, "rise": bytes_of("status", "RssAnon") - before}))


def without_vocabulary(model: Path, folder: Path) -> Path:
    """Return a folder with links to the files of a model that are no tokenizer."""
    folder.mkdir(parents=True)
    for path in model.iterdir():
        if path.is_file() and not path.name.startswith(("tokenizer", "vocab", "merges")):
            (folder / path.name).symlink_to(path.resolve())
    return folder


def started(arguments: list[str], cache: str) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, *arguments]
    environment = {**os.environ, "INTERPOSER_CACHE_DIR": cache}
    return subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def measured(arguments: list[str], cache: str) -> dict[str, Any]:
    """Return the measurements of a process, and its own memory while another has the same model."""
    pair = [started(arguments, cache)]
    facts: dict[str, Any] = json.loads(read_line(pair[0]))
    pair.append(started(arguments, cache))
    read_line(pair[1])
    answers = [json.loads(ask(process)) for process in pair]
    for process in pair:
        process.communicate("\n")
    return {**facts, **answers[0]}


def ask(process: subprocess.Popen[str]) -> str:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()
    return read_line(process)


def read_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise SystemExit(f"A process ended with {process.wait()} before it told anything.")
    return line


def peer(file: str, tokens: int, threads: int) -> dict[str, Any]:
    """Return the load time and the peaks of memory of llama.cpp for a file."""
    command = [str(PEER), "-c", LOAD_PEER, file, str(tokens), str(threads)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    facts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return facts


def start(command: list[str], cache: str) -> tuple[float, float]:
    """Return wall and processor seconds of a command, the least of several."""
    environment = {**os.environ, "INTERPOSER_CACHE_DIR": cache}
    found = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        child = subprocess.Popen(
            command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        _, status, used = os.wait4(child.pid, 0)
        if status:
            raise SystemExit(f"{command} ended with {os.waitstatus_to_exitcode(status)}")
        child.returncode = 0
        found.append((time.perf_counter() - began, used.ru_utime + used.ru_stime))
    return min(wall for wall, _ in found), min(used for _, used in found)


def show(name: str, facts: dict[str, Any]) -> None:
    parts = [
        f"{key} {value / 2**20:.0f} MiB" if isinstance(value, int) else f"{key} {value:.2f}"
        for key, value in facts.items()
        if key != "threads"
    ]
    print(f"{name:24}", ", ".join(parts), flush=True)


def main() -> None:
    """Print a row for each way to load, and for each file of llama.cpp."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--quantization", nargs="+", default=["none"])
    parser.add_argument("--gguf", nargs="*", default=[], help="the same model for llama.cpp")
    parser.add_argument("--tokens", type=int, default=2048, help="of the cache")
    parser.add_argument("--cache", type=Path, help="keeps what was examined for the next run")
    parser.add_argument("--packed", help=argparse.SUPPRESS)
    parser.add_argument("--floor", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.packed == "vocabulary":
        vocabulary_here(asked.model)
        return
    if asked.packed:
        load_here(asked.model, asked.quantization[0], asked.packed, asked.tokens, asked.floor)
        return
    with tempfile.TemporaryDirectory() as temporary:
        cache = str(asked.cache or temporary)
        for name in ("packed", "model"):
            shutil.rmtree(Path(cache, name), ignore_errors=True)
        begin = [sys.executable, "-m", "interposer_tools", "run", str(SHIPPED)]
        run = [*begin, "--prompt", "def f", "--max-new-tokens", "1"]
        start(run, cache)  # examines what is installed
        model = without_vocabulary(Path(asked.model), Path(cache, "model"))
        for quantization in asked.quantization:
            for name, packed in (("read", "off"), ("first", "on"), ("mapped", "on")):
                options = ["--quantization", quantization, "--tokens", str(asked.tokens)]
                arguments = [str(model), *options, "--packed", packed]
                if name == "first":
                    child = started([*arguments, "--floor"], cache)
                    facts = json.loads(read_line(child))
                    child.communicate("\n\n")
                else:
                    facts = measured(arguments, cache)
                show(f"{quantization} {name}", facts)
        if (Path(asked.model) / "tokenizer.json").exists():
            child = started([asked.model, "--packed", "vocabulary"], cache)
            show("vocabulary", json.loads(read_line(child)))
            child.communicate()
        for file in asked.gguf:
            show(Path(file).name, peer(file, asked.tokens, facts["threads"]))
        ours, torch = start(run, cache), start([sys.executable, "-c", "import torch"], cache)
    print(
        f"interposer run to its first token {ours[0]:.2f} s, processor {ours[1]:.2f} s; "
        f"import torch {torch[0]:.2f} s, processor {torch[1]:.2f} s: "
        f"x{ours[0] / torch[0]:.2f}, processor x{ours[1] / torch[1]:.2f}"
    )


if __name__ == "__main__":
    main()
