"""Find prose that an outsider stumbles over, in documents, docstrings, comments and messages (`make lint`).

CONTRIBUTING.md, "How prose reads here", has the rule: subject, verb, object, and the field's word.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("libs", "services", "docs", "examples", "benchmarks", "deploy", ".")
PATTERNS = {
    r"\b(Who|Whoever|Whom|Of which|That which) (?!am\b)[a-z]+": "begin with the subject, not with a relative clause",
    r"\b(is|are|was) no (news|name|store|[a-z]+ of)\b": "say what does not exist, with a verb",
    r"\black(s|ed|ing)?\b": 'write "missing"',
    r"\bmend(s|ed|ing)?\b": 'write "repair" or "fix"',
    r"\b(aloud|anew|meanwhile)\b": "use a plain word: in the log, again, in the meantime",
    r"\b(so long,|trying on)\b": "use a plain word",
    r"\bat most [A-Za-z0-9]+ (is|are) taken\b": 'write "limit: N"',
    r"\bis said (once|now)\b": "say who logs or sends what",
    r"\bnobody (can|is told)\b": "say what does not happen, with a subject",
}
IGNORED = ("vendor/", "docs/reference.md")


def prose_of_python(text: str) -> Iterator[tuple[int, str]]:
    """Strings that hold a space, and comments: (line, text)."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            for offset, line in enumerate(node.value.split("\n")):
                yield node.lineno + offset, line
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def prose_of_markdown(text: str) -> Iterator[tuple[int, str]]:
    """Lines outside of code blocks."""
    in_code = False
    for number, line in enumerate(text.split("\n"), 1):
        if line.lstrip().startswith("```"):
            in_code = not in_code
        elif not in_code:
            yield number, line


def findings(path: Path, text: str) -> Iterator[tuple[int, str, str]]:
    """(line, what was found, what to write instead)."""
    if path.suffix == ".py":
        lines = prose_of_python(text)
    elif path.suffix == ".md":
        lines = prose_of_markdown(text)
    else:
        lines = iter(enumerate(text.split("\n"), 1))
    for number, line in lines:
        for pattern, instead in PATTERNS.items():
            for found in re.finditer(pattern, line):
                yield number, found[0], instead


def files() -> Iterator[Path]:
    for folder in FOLDERS:
        glob = "*" if folder == "." else "**/*"
        for path in sorted((ROOT / folder).glob(glob)):
            name = str(path.relative_to(ROOT))
            if path.suffix in (".py", ".md", ".js", ".html") and not any(one in name for one in IGNORED):
                yield path


def main() -> int:
    count = 0
    for path in files():
        if path == Path(__file__).resolve() or path.name == "CHANGELOG.md":
            continue
        for number, found, instead in findings(path, path.read_text()):
            count += 1
            print(f"{path.relative_to(ROOT)}:{number}: {found!r}: {instead}")
    if count:
        print(f"{count} places: CONTRIBUTING.md, 'How prose reads here', has the rule")
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
