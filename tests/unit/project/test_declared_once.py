"""A field of a message is declared in one class. Classes that repeat many fields are listed; the list only shrinks."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
MESSAGES = ("group_messages", "membership", "messages", "policy", "telemetry_records")
MANY = 8
"""Equal names in two classes may be chance; so many are a second declaration."""
TWICE = {
    frozenset(("Transfer", "Healing")),  # as the metrics service keeps and shows it
    frozenset(("TransferView", "Healing")),
}
"""Known pairs. ``protocol.records.copier`` copies between them by name."""


def product() -> Iterator[Path]:
    for folder in ("libs", "services"):
        yield from sorted((ROOT / folder).rglob("*.py"))


def fields_of(node: ast.ClassDef) -> dict[str, str]:
    """Return the annotation and the default of each field, as text, by name."""
    found = {}
    for one in node.body:
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
            kind = ast.unparse(one.annotation)
            if not kind.startswith("ClassVar"):
                found[one.target.id] = f"{kind} = {ast.unparse(one.value) if one.value else 'required'}"
    return found


def classes(path: Path) -> Iterator[tuple[str, dict[str, str]]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ClassDef) and (fields := fields_of(node)):
            yield node.name, fields


MESSAGE_CLASSES = {
    name: fields
    for module in MESSAGES
    for name, fields in classes(ROOT / "libs/keepstep_mesh/protocol" / f"{module}.py")
}


def test_no_class_declares_the_fields_of_a_message_again() -> None:
    found = {
        frozenset((name, message))
        for path in product()
        for name, fields in classes(path)
        for message, its in MESSAGE_CLASSES.items()
        if name != message and len(fields.keys() & its.keys()) >= MANY
    }
    assert found == TWICE, "declare a field once, and take it off this list if it is"


def test_only_the_generator_of_records_makes_code() -> None:
    making = [
        str(path.relative_to(ROOT))
        for path in product()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "exec"
    ]
    assert making == ["libs/keepstep_mesh/protocol/records.py"]
