"""Find prose that an outsider stumbles over, in documents, docstrings, comments and messages.

Usage: ``python docs/prose.py [PATH ...]``; without a path, all of ``DEFAULT``.

CONTRIBUTING.md, "How prose reads here", has the rule: subject, verb, object, and the field's word. This check finds the
patterns that a machine can find. It prints ``file:line: what was found: what to write instead`` and exits with 1.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DEFAULT = (
    "libs",
    "services",
    "docs",
    "examples",
    "benchmarks",
    "deploy",
    "findings",
    "tests",
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
)
SUFFIXES = (".py", ".md", ".js", ".html", ".sh", ".yml", ".toml")
IGNORED = ("/vendor/", "/node_modules/", "docs/reference.md", "docs/python.md", "docs/prose.py", "test_prose.py")
LINE, CELL, CELL_SENTENCES = 120, 110, 2
"""Limits of documents, in characters and sentences. Code blocks and the addresses of links do not count."""

EXCEPTIONS = frozenset(
    {
        ("tests/unit/keepstep_mesh/security/test_audit.py", "nobody"),  # the caller without a role in the audit log
        ("tests/unit/project/test_docs.py", "What it"),  # a heading of the README
    }
)
"""(path, what was found) of prose that is right as it is; at most ten."""

BE = "(?:is|are|was|were|be|been|being)"
PATTERNS = {
    r"\b(?:Who|Whoever|Whom|Whatever|Whichever|Of which|That which)(?! am I)\s+[a-z`]+(?![^.]*\?)": (
        "begin with the subject: 'A client that sends no request ...', not 'Who asks nothing ...'"
    ),
    r"\bWhat(?!'s)\s+[a-z`{]+(?![^.]*\?)": (
        "begin with a noun phrase or an imperative: 'Settings that ...', 'Return the ...', not 'What ...'"
    ),
    r"\bwhoever\b": "name the subject: 'the group that', 'a client that'",
    r"\bOne\s+(?:that|which|who|whose)\b": "name the thing: 'A variable that is empty', not 'One that is empty'",
    r"\b[Tt]here\s+(?:is|are|was|were|will be|has been|have been)\b(?!\.)": (
        "name the subject and give it a verb: 'No lighthouse answered', not 'there is no lighthouse that answers'"
    ),
    rf"\b{BE}\s+(?:said|told)\b(?! apart)": "name who logs, sends, reports or names it, or use that verb",
    rf"\b{BE}\s+(?:not\s+)?taken\b(?! (?:over|from|by|into|down|up|off|as|together|back))": (
        "use the field's verb: accepted, used, read, listened on"
    ),
    r"\b[Nn]obody\b": "name the subject: 'no group', 'no client', 'no process'",
    r"\b[Ss]omebody(?: else)?\b": "name the subject: 'another process', 'a client'",
    r"\black(?:s|ed|ing)?\b": "write 'is missing', 'does not have'",
    r"\bmend(?:s|ed|ing)?\b": "write 'repair' or 'fix'",
    r"\baloud\b": "write 'at level warning', 'in the log'",
    r"\banew\b": "write 'again'",
    r"\bmeanwhile\b": "write 'in the meantime', or say while what",
    r"\b(?:so long,|trying on\b)": "write 'retrying', 'for N s'",
    r"\bat most [\w{}.,:]+(?: \w+)? (?:is|are) taken\b": "write '(limit N)'",
    r"\b(?:but for|save for|lest|heed(?:s|ed)?|vouch(?:es|ed)?|gainsay|thereof|hitherto|of else)\b": (
        "use a plain word: except, so that ... not, check, of it, until now"
    ),
    r"\bhas come\b|\bhave come\b": "write 'arrived', 'connected', 'joined'",
    r"\b(?:all the same|none the less)\b": "write 'anyway', or leave it out",
    r"\b(?:says|say|said|tells|tell|told) of\b": "write 'reports', 'sends about', 'names'",
    r"\b(?:is|are) to be\s+[a-z]+ed\b": "use the imperative or 'must be'",
}
FINDERS = [(re.compile(pattern, re.MULTILINE), instead) for pattern, instead in PATTERNS.items()]
ANY = re.compile("|".join(f"(?:{pattern})" for pattern in PATTERNS), re.MULTILINE)
COMMENT = re.compile(r"(?:^|\s{2,})(?:#|//)(?:!| ?)(.*)")

Block = tuple[int, str]
"""A piece of prose that reads on over line ends: the number of its first line, its text."""


def strings_of(tree: ast.AST) -> Iterator[Block]:
    """Yield docstrings and messages; a formatted value in an f-string reads as ``{}``."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.JoinedStr):
            parts = (str(one.value) if isinstance(one, ast.Constant) else "{}" for one in node.values)
            yield node.lineno, "".join(parts)
            waiting += (one for one in node.values if isinstance(one, ast.FormattedValue))
        elif isinstance(node, ast.Constant):
            if isinstance(node.value, str) and " " in node.value:
                yield node.lineno, node.value
        else:
            waiting += ast.iter_child_nodes(node)


def comments_of(text: str) -> Iterator[Block]:
    """Yield comments; those on lines of their own that follow each other are one block."""
    first, lines = 0, list[str]()
    for number, line in enumerate(text.split("\n"), 1):
        found = COMMENT.search(line) if "#" in line or "//" in line else None
        if found and lines and not line[: found.start()].strip() and number == first + len(lines):
            lines.append(found[1])
            continue
        if lines:
            yield first, "\n".join(lines)
        first, lines = number, [found[1]] if found else []
    if lines:
        yield first, "\n".join(lines)


def paragraphs_of(text: str) -> Iterator[Block]:
    """Yield paragraphs, list items and table rows of Markdown; no code blocks, no headings."""
    in_code, first, lines = False, 0, list[str]()
    for number, line in enumerate([*text.split("\n"), ""], 1):
        fence = line.lstrip().startswith("```")
        starts = not line.strip() or fence or in_code or re.match(r"\s*(?:#|[-*|] |\||\d+\. )", line)
        if starts and lines:
            yield first, "\n".join(lines)
            lines = []
        if fence:
            in_code = not in_code
        elif not in_code and line.strip() and not line.startswith("#"):
            first = first if lines else number
            lines.append(line)


def without_code(text: str) -> str:
    """Blank inline code and the addresses of links, which are no prose."""
    text = re.sub(r"``[^`\n]+``|`[^`\n]+`", lambda found: "`" * len(found[0]), text)
    return re.sub(r"\]\([^)\n]*\)", "]", text)


def shape_of(text: str) -> Iterator[tuple[int, str, str]]:
    """Find long lines and long table cells of a document."""
    for first, block in paragraphs_of(text):
        for number, line in enumerate(block.split("\n"), first):
            shown = re.sub(r"\]\([^)]*\)|https?://\S+|<[^>]+>", "", line)
            if not line.lstrip().startswith("|"):
                if len(shown) > LINE:
                    yield number, f"{len(shown)} characters", f"break lines of prose at {LINE} characters"
                continue
            for cell in re.split(r"(?<!\\)\|", shown.strip().strip("|")):
                sentences = len(re.findall(r"[.!?](?= [A-Z`]|\s*$)", cell.strip() + "."))
                if sentences > CELL_SENTENCES or len(cell.strip()) > CELL:
                    what = f"table cell of {sentences} sentences, {len(cell.strip())} characters"
                    yield number, what, f"at most {CELL_SENTENCES} sentences and {CELL} characters; or write a section"


def blocks_of(path: Path, text: str) -> Iterator[Block]:
    if path.suffix == ".py":
        for number, block in (*strings_of(ast.parse(text)), *comments_of(text)):
            yield number, without_code(block)
    elif path.suffix == ".md":
        yield from ((number, without_code(block)) for number, block in paragraphs_of(text))
    elif path.suffix in (".js", ".html"):
        yield from enumerate(text.split("\n"), 1)
    else:
        yield from comments_of(text)


def findings(path: Path, text: str) -> Iterator[tuple[int, str, str]]:
    """Yield (line, what was found, what to write instead)."""
    if path.suffix == ".md":
        yield from shape_of(text)
    for first, block in blocks_of(path, text):
        if not ANY.search(block):
            continue
        for finder, instead in FINDERS:
            for found in finder.finditer(block):
                yield first + block.count("\n", 0, found.start()), " ".join(found[0].split()), instead


def files(wanted: list[str]) -> Iterator[Path]:
    for name in wanted:
        top = (ROOT / name).resolve()
        for path in sorted(top.rglob("*")) if top.is_dir() else [top]:
            if path.suffix in SUFFIXES and not any(one in str(path) for one in IGNORED):
                yield path


def main(wanted: list[str]) -> int:
    count = 0
    for path in files(wanted or list(DEFAULT)):
        name = str(path.relative_to(ROOT))
        for number, found, instead in sorted(findings(path, path.read_text())):
            if (name, found) not in EXCEPTIONS:
                count += 1
                print(f"{name}:{number}: {found!r}: {instead}")
    if count:
        print(f"{count} places: CONTRIBUTING.md, 'How prose reads here', has the rule")
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
