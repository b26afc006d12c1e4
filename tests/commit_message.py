"""Check a commit message against the rule of CONTRIBUTING.md.

    python tests/commit_message.py FILE

prints the faults of the message in ``FILE`` and fails if there are any. pre-commit runs it as a
``commit-msg`` hook.
"""

from __future__ import annotations

import re
import sys
from difflib import get_close_matches
from pathlib import Path

MAX_SUBJECT_CHARACTERS = 72

# A list, because no ending tells an imperative from a noun. Add the verb that you miss.
VERBS = Path(__file__).with_name("commit_verbs.txt").read_text(encoding="utf-8").split()
SUBJECT = re.compile(r"[a-z0-9_-]+(?:, [a-z0-9_-]+)*: (?P<word>[^\s,:]+)")
# What git appends below this line with ``commit --verbose`` is no part of the message.
SCISSORS = re.compile(r"^# -+ >8 -+$.*", re.MULTILINE | re.DOTALL)


def faults(text: str) -> list[str]:
    """Return each fault of a commit message with a remedy."""
    lines = [line for line in SCISSORS.sub("", text).splitlines() if not line.startswith("#")]
    subject, *rest = "\n".join(lines).strip().split("\n")
    found = []
    if len(subject) > MAX_SUBJECT_CHARACTERS:
        excess = len(subject) - MAX_SUBJECT_CHARACTERS
        found.append(f"The subject is {excess} characters too long. Try: move detail to the body")
    match = SUBJECT.match(subject)
    if match is None:
        found.append(f"The subject is {subject!r}. Try: 'area: Verb the thing'")
    elif match["word"] not in VERBS:
        near = get_close_matches(match["word"].capitalize(), VERBS, n=3)
        verbs = ", ".join(near or ("Add", "Fix", "Rename"))
        found.append(
            f"The subject begins with {match['word']!r}, which is no known imperative. "
            f"Try: {verbs}, or add the verb to tests/commit_verbs.txt"
        )
    if rest and rest[0].strip():
        found.append("The second line is not blank. Try: a blank line below the subject")
    if not any(line.strip() for line in rest):
        found.append("The message has no body. Try: say why, below a blank line")
    return found


def main() -> None:
    """Print the faults of the message in the file that git passes."""
    found = faults(Path(sys.argv[1]).read_text(encoding="utf-8"))
    if found:
        sys.exit("\n".join(found))


if __name__ == "__main__":
    main()
