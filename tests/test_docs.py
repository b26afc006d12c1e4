"""Every fenced code block of the documentation does what the page says.

The blocks of one page run in order, in one folder that looks like the root of the repository.

``python`` blocks share one namespace. ``console`` and ``bash`` blocks run their lines that start
with ``$``, except those that install or run make, which are checked instead. What such a block
shows below its commands, and a ``text`` block, must be what was printed; ``...`` stands for
anything. ``toml``, ``json``, ``yaml`` and ``sh`` must parse; ``sh`` is for commands of programs
that are not installed here, such as docker. ``nginx`` and ``caddy`` are settings of these programs.
``<!-- test: expect-error -->`` before a block says that it fails; what it prints is compared all
the same. ``<!-- file: PATH -->`` before a block says that it is the content of a file, which is
written instead.

``python -m venv`` makes an environment with all that is installed here, and ``pip install`` of a
wheel that lies there installs it into that environment, without its requirements.

A page runs with the plugins that its ``pip install`` commands name, and without those of
``plugins`` and ``examples`` that it does not.

``python`` blocks and the command ``interposer`` run in forks of a process that has imported torch:
there are more than a hundred of them, and importing it takes seconds each time.
"""

from __future__ import annotations

import doctest
import functools
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import threading
import tomllib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]
from markdown_it import MarkdownIt
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from tests.forks import FORKED, forks

ROOT = Path(__file__).parents[1]
EXPECT_ERROR = "<!-- test: expect-error -->"
FILE = re.compile(r"<!-- file: (\S+) -->")
TIMEOUT_SECONDS = 300

# Runs the python blocks of one page: reads a block a line, answers with its output and failure.
# Compiled under the page's own name and lines, so that tracebacks and inspect find the source.
INTERPRETER = """
import contextlib, io, json, os, sys, traceback, types
main = sys.modules["__main__"] = types.ModuleType("__main__")
replies = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what is printed past sys.stdout is no reply
for request in sys.stdin:
    block = json.loads(request)
    output, failure = io.StringIO(), ""
    with contextlib.redirect_stdout(output):
        try:
            source = "\\n" * block["line"] + block["source"]
            exec(compile(source, block["page"], "exec"), main.__dict__)
        except BaseException:
            failure = traceback.format_exc()
    print(json.dumps([output.getvalue(), failure]), file=replies, flush=True)
"""


# What a console script does: it does not look for modules where it is called.
COMMAND = "import sys; del sys.path[0]; from interposer_tools import main; main()"


class BlockError(Exception):
    """A block failed."""


class PageError(Exception):
    """The page is wrong in a way that no expected failure excuses."""


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str
    source: str
    expects_error: bool
    file: str = ""

    @property
    def id(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def read_blocks(page: Path) -> list[Block]:
    tokens = MarkdownIt().parse(page.read_text(encoding="utf-8"))
    blocks = []
    for before, token in pairwise([tokens[0], *tokens] if tokens else []):
        if token.type in {"fence", "code_block"}:
            mark = before.content.strip() if before.type == "html_block" else ""
            file = found[1] if (found := FILE.fullmatch(mark)) else ""
            line = token.map[0] + 1 if token.map else 0
            language, source = token.info.strip(), token.content
            blocks.append(Block(page, line, language, source, mark == EXPECT_ERROR, file))
    return blocks


def find_pages() -> list[Path]:
    folders = ("[!.]*", "core/*", "models/*", "platforms/*", "plugins/*", "examples/*")
    patterns = ("*.md", "docs/**/*.md", *(f"{folder}/README.md" for folder in folders))
    return sorted({page for pattern in patterns for page in ROOT.glob(pattern)})


PAGES = find_pages()


class Sandbox:
    """A folder with links to everything in the repository, where one page's blocks run."""

    def __init__(self, folder: Path, disabled_plugins: Iterable[str] = ()) -> None:
        self.folder = folder
        self.printed = ""
        self.background: list[subprocess.Popen[bytes]] = []
        for entry in ROOT.iterdir():
            if not entry.name.startswith("."):
                (folder / entry.name).symlink_to(entry)
        programs = folder / ".programs"
        programs.mkdir()
        (programs / "interposer").write_text(
            f'#!/bin/sh\nexec {shlex.join(forks().command("-c", COMMAND))} "$@"\n'
        )
        (programs / "interposer").chmod(0o755)
        folders = str(programs), str(Path(sys.executable).parent), os.environ["PATH"]
        path = os.pathsep.join(folders)
        environment = {**os.environ, "PATH": path, "XDG_CONFIG_HOME": str(folder)}
        # Measurements of a page are its own; verdicts on what is installed serve all of them.
        verdicts = Path(environment.pop("INTERPOSER_CACHE_DIR"), "verdicts")
        verdicts.mkdir(parents=True, exist_ok=True)
        cache = folder / ".cache"
        (cache / "interposer").mkdir(parents=True)
        (cache / "interposer" / "verdicts").symlink_to(verdicts)
        self.environment = {
            **environment,
            "XDG_CACHE_HOME": str(cache),
            "INTERPOSER_DISABLE": ",".join(disabled_plugins),
        }
        self.interpreter: subprocess.Popen[str] | None = None

    def run(self, block: Block) -> None:
        runners: dict[str, Callable[[Block], None]] = {
            "python": self.run_python,
            "console": self.run_console,
            "bash": self.run_console,
            "text": lambda block: self.compare(block.source),
            "toml": lambda block: parse(tomllib.loads, block),
            "json": lambda block: parse(json.loads, block),
            "yaml": lambda block: parse(yaml.safe_load, block),
            "sh": check_syntax,
            "nginx": lambda _: None,
            "caddy": lambda _: None,
        }
        if block.language not in runners:
            known = ", ".join(runners)
            raise PageError(f"language {block.language!r} is none of {known}")
        if block.file:
            self.write(block)
        else:
            runners[block.language](block)

    def write(self, block: Block) -> None:
        path = self.folder / block.file
        inside = path.resolve().is_relative_to(self.folder.resolve())
        if not inside or path.is_symlink():
            raise PageError(f"{block.file} lies outside of the folder of the page")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(block.source, encoding="utf-8")

    def run_python(self, block: Block) -> None:
        if self.interpreter is None:
            self.interpreter = subprocess.Popen(
                forks().command("-c", INTERPRETER),
                cwd=self.folder,
                env=self.environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        assert self.interpreter.stdin is not None
        assert self.interpreter.stdout is not None
        request = {"page": str(block.page), "line": block.line, "source": block.source}
        print(json.dumps(request), file=self.interpreter.stdin, flush=True)
        watch = threading.Timer(TIMEOUT_SECONDS, self.interpreter.kill)
        watch.start()
        reply = self.interpreter.stdout.readline()
        watch.cancel()
        if not reply:
            self.close()
            raise BlockError(f"the interpreter died or took more than {TIMEOUT_SECONDS} s")
        output, failure = json.loads(reply)
        self.printed = output + failure
        if failure:
            raise BlockError(failure)

    def run_console(self, block: Block) -> None:
        commands, shown = split_console(block.source)
        if not commands:
            raise PageError("no line starts with '$ '")
        for command in [command for command in commands if command.endswith(" &")]:
            self.start(command.removesuffix(" &"))
            commands.remove(command)
        script = [stand_in(part) for command in commands for part in command.split(" && ")]
        done = subprocess.run(
            ["timeout", str(TIMEOUT_SECONDS), "bash", "-eo", "pipefail", "-c", "\n".join(script)],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.printed = done.stdout
        if shown and all(script):
            self.compare(shown)
        if done.returncode:
            raise BlockError(f"exit status {done.returncode}:\n{done.stdout}")

    def start(self, command: str) -> None:
        """Run a command until the page ends."""
        process = subprocess.Popen(
            ["bash", "-c", f"exec {command}"],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self.background.append(process)

    def compare(self, shown: str) -> None:
        """Check that ``shown`` is what the block before it printed."""
        flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
        if not doctest.OutputChecker().check_output(shown, self.printed, flags):
            raise PageError(f"shown:\n{shown}\nprinted:\n{self.printed}")

    def close(self) -> None:
        for process in self.background:
            process.terminate()
            process.wait(60)
        self.background.clear()
        if self.interpreter is not None:
            self.interpreter.kill()
            self.interpreter.communicate()
            self.interpreter = None


def parse(loads: Callable[[str], object], block: Block) -> None:
    try:
        loads(block.source)
    except (ValueError, yaml.YAMLError) as error:
        raise BlockError(str(error)) from error


def check_syntax(block: Block) -> None:
    done = subprocess.run(
        ["bash", "-n"], input=block.source, stderr=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        raise BlockError(done.stderr)


def split_console(source: str) -> tuple[list[str], str]:
    """Return the commands of a console block and the output that it shows."""
    commands: list[str] = []
    shown: list[str] = []
    goes_on = False
    for line in source.splitlines():
        if goes_on:
            commands[-1] += "\n" + line
        elif line.startswith("$ "):
            commands.append(line[2:])
        else:
            shown.append(line)
            continue
        goes_on = line.endswith("\\")
    return commands, "\n".join(shown)


def stand_in(command: str) -> str:
    """Return the command to run for ``command``: itself, unless it makes or installs something.

    Raises: BlockError: the command names what does not exist.
    """
    try:
        words = shlex.split(command.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise PageError(f"{command}: {error}") from error
    match [word for word in words if not re.match(r"\w+=(?!=)", word)]:
        case ["make", *targets]:
            known = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
            unknown = [word for word in targets if not word.startswith("-") and word not in known]
        case [python, "-m", "pip", "install", *rest] if wheels(rest):
            options = ["--quiet", "--no-deps", "--no-index", "--disable-pip-version-check"]
            own = [sys.executable, "-m", "pip", "--python", python, "install", *options]
            unknown = list(unknown_requirements(set(rest) - set(wheels(rest))))
            if not unknown:
                return " ".join([shlex.join(own), *wheels(rest)])
        case ["pip", "install", *rest] | [_, "-m", "pip", "install", *rest]:
            unknown = list(unknown_requirements(rest))
        case ["git", "clone", address]:
            return f"ln -s . {Path(address).stem}"
        case [_, "-m", "venv", folder]:
            return shlex.join([sys.executable, str(FORKED / "environment.py"), folder])
        case _:
            return command
    if unknown:
        raise BlockError(f"{command}: unknown: {', '.join(unknown)}")
    return ""


def wheels(words: Iterable[str]) -> list[str]:
    """Return the wheels after ``pip install``; a name may have wildcards."""
    return [word for word in words if word.endswith(".whl")]


def unknown_requirements(words: Iterable[str]) -> Iterator[str]:
    """Yield the files and distributions after ``pip install`` that do not exist."""
    files = {"-c", "--constraint", "-r", "--requirement"}
    for before, word in pairwise(["", *words]):
        if word.startswith("-") or before in {"--index-url", "--find-links"}:
            continue
        if before in files or word.startswith("."):
            path = ROOT / word.partition("[")[0]  # without extras
            found = (path / "pyproject.toml").is_file() or path.is_file()
        elif before == "--group":
            groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
            found = word in groups
        else:
            found = canonicalize_name(Requirement(word).name) in known_distributions()
        if not found:
            yield word


@functools.cache
def optional_plugins() -> frozenset[str]:
    """Return the names of plugins that no platform brings."""
    files = [*ROOT.glob("plugins/*/pyproject.toml"), *ROOT.glob("examples/*/pyproject.toml")]
    projects = [tomllib.loads(file.read_text())["project"] for file in files]
    return frozenset(
        name
        for project in projects
        for name in project["entry-points"].get("interposer.plugins", ())
    )


def installed_plugins(page: Path) -> Iterator[str]:
    """Yield the optional plugins that the ``pip install`` commands of a page name."""
    commands = re.findall(r"pip install(?:\\\n|[^`\n])*", page.read_text(encoding="utf-8"))
    for plugin in optional_plugins():
        if any(re.search(rf"(interposer-|/){plugin}\b", command) for command in commands):
            yield plugin


@functools.cache
def known_distributions() -> frozenset[str]:
    patterns = ("*/pyproject.toml", "*/*/pyproject.toml")
    ours = [file for pattern in patterns for file in ROOT.glob(pattern)]
    names = [tomllib.loads(file.read_text())["project"]["name"] for file in ours]
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    names += [Requirement(line).name for line in lines if line and not line.startswith("#")]
    return frozenset(map(canonicalize_name, names))


@functools.cache
def run_page(page: Path) -> dict[Block, str]:
    """Run all blocks of a page, once in a process, and return what is wrong with each, or ''."""
    failures: dict[Block, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        blocks = read_blocks(page)
        sandbox = Sandbox(Path(folder), sorted(optional_plugins() - set(installed_plugins(page))))
        for block in blocks:
            try:
                sandbox.run(block)
                failures[block] = "an error is expected" if block.expects_error else ""
            except BlockError as error:
                failures[block] = "" if block.expects_error else str(error)
            except PageError as error:
                failures[block] = str(error)
        sandbox.close()
    return failures


# The pages that a newcomer opens first run at each landing. `make test-all` runs every page: the
# others show in a process what tests of the same functions promise without one.
LANDING_PAGES = ("README.md", "docs/run-a-model.md", "docs/selection.md")


def is_landing(page: Path) -> bool:
    return page.relative_to(ROOT).as_posix() in LANDING_PAGES


@pytest.mark.process
@pytest.mark.timeout(4 * TIMEOUT_SECONDS)
@pytest.mark.parametrize(
    "block",
    [
        # One worker runs a page.
        pytest.param(
            block,
            id=block.id,
            marks=[
                pytest.mark.xdist_group(str(page)),
                *([] if is_landing(page) else [pytest.mark.slow]),
            ],
        )
        for page in PAGES
        for block in read_blocks(page)
    ],
)
def test_block(block: Block) -> None:
    failure = run_page(block.page)[block]
    assert not failure, f"{block.id} {failure}"


def test_pages_are_found() -> None:
    landing = [page for page in PAGES if is_landing(page)]
    assert len(landing) == len(LANDING_PAGES)
    assert all(map(read_blocks, landing))


# A page and what is to be said about it.
FAILING = {
    "```python\n1 / 0\n```": 'page.md", line 2',
    "```python\nimport os\nos._exit(0)\n```": "the interpreter died",
    "```console\n$ false\n```": "exit status 1",
    "```bash\n$ false\n$ true\n```": "exit status 1",
    "```bash\ntrue\n```": "no line starts with",
    "```bash\n$ echo 'a\n```": "No closing quotation",
    "```console\n$ echo a\nb\n```": "printed:\na",
    "```python\nprint(1)\n```\n\n```text\n2\n```": "printed:\n1",
    "```console\n$ make nonsense\n```": "unknown: nonsense",
    "```console\n$ pip install interposer-nonsense\n```": "unknown: interposer-nonsense",
    "```console\n$ pip install -e ./nonsense\n```": "unknown: ./nonsense",
    "```console\n$ python -m pip install --group x\n```": "unknown: x",
    "```console\n$ make test && false\n```": "exit status 1",
    "```toml\na = \n```": "Invalid value",
    "```json\n{'a': 1}\n```": "Expecting property name",
    "```yaml\na: [\n```": "while parsing",
    "```sh\nif true; then\n```": "syntax error",
    "```console\n$ pip install './nonsense[cli]'\n```": "unknown: ./nonsense[cli]",
    "```rust\n```": "language 'rust' is none of",
    "```\n```": "language '' is none of",
    "text\n\n    indented\n": "language '' is none of",
    "- item\n\n  ```python\n  1 / 0\n  ```": "ZeroDivisionError",
    f"{EXPECT_ERROR}\n```python\n```": "an error is expected",
    f"{EXPECT_ERROR}\n```rust\n```": "language 'rust' is none of",
    f"{EXPECT_ERROR}\n```console\n$ echo a; false\nb\n```": "printed:\na",
    "<!-- file: docs/a.py -->\n```python\n```": "docs/a.py lies outside",
    "<!-- file: ../a.py -->\n```python\n```": "../a.py lies outside",
    "```console\n$ python -m pip install a.whl nonsense\n```": "unknown: nonsense",
}

PASSING = [
    "```python\na = 1\n```\n\n```python\nassert a\n```",
    "```python\nimport typing\nclass A:\n    b: 'A'\ntyping.get_type_hints(A)\n```",
    "```python\nimport os\nos.system('echo past sys.stdout')\n```",
    "```python\nimport inspect\ndef f(): ...\nassert inspect.getsource(f)\n```",
    f"{EXPECT_ERROR}\n```python\n1 / 0\n```\n\n```text\nTraceback...by zero\n```",
    f"{EXPECT_ERROR}\n```console\n$ echo a; false\na\n```",
    "```python\nprint('a b c')\n```\n\n```text\na ... c\n```",
    "```console\n$ test -f Makefile && cd tests\n$ test -f test_docs.py\n```",
    "```console\n$ git clone URL/interposer.git\n$ cd interposer\n$ make PYTHON=python3 test\n```",
    "```console\n$ python3 -m venv .venv\n$ source .venv/bin/activate\n```",
    "```console\n$ echo a \\\n  b\na b\n```",
    "```console\n$ pip install -c constraints.txt -e ./core 'torch>=2' --group dev\n```",
    "```console\n$ pip install ./core \\\n    --find-links dist './platforms/cpu[cli]'\n```",
    "```sh\ndocker build .\n```",
    '```toml\na = 1\n```\n\n```json\n{"a": 1}\n```\n\n```yaml\na: 1\n```',
    "<!-- file: new/a.py -->\n```python\nprint(1)\n```\n\n```console\n$ python new/a.py\n1\n```",
    "```console\n$ sleep 600 &\n$ echo a\na\n```",
    "```console\n$ python -m venv new\n$ new/bin/python -c 'import torch'\n```",
]


def failures(text: str, folder: Path) -> str:
    page = folder / "page.md"
    page.write_text(text)
    return "".join(run_page(page).values())


@pytest.mark.slow
@pytest.mark.parametrize(("text", "failure"), FAILING.items())
def test_failing_block_is_noticed(text: str, failure: str, tmp_path: Path) -> None:
    assert failure in failures(text, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("text", PASSING)
def test_true_block_passes(text: str, tmp_path: Path) -> None:
    assert failures(text, tmp_path) == ""
