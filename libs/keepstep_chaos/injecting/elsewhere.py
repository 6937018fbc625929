"""Targets that other machines, containers, or pods run: each fault is a command, made from a template. Pure.

The template of a fault is that for its role and kind, for its kind, for its role, or the general one, in this order.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from keepstep_chaos.vocabulary import KINDS, Fault, Role, Target

ORDERS = ("evict", "policy", "verify")
"""Kinds that the lighthouse carries out, wherever a group runs."""
INJECTABLE = tuple(name for name in KINDS if name not in (*ORDERS, "restart", "drain"))
"""Kinds of `keepstep inject`, which a process on the target's machine carries out."""
PLACEHOLDERS = ("command", "name", "number", "host", "port", "job", "role", "kind", "seconds")
ROLES = tuple(str(role) for role in Role if role is not Role.JOB)
FIELD = re.compile(r"\{(\w*)\}")


@dataclass(frozen=True, slots=True)
class Templates:
    """Words of commands, by role and kind; an empty role or kind is any."""

    by_role_and_kind: Mapping[tuple[str, str], tuple[str, ...]]

    def of(self, target: Target, kind: str) -> tuple[str, ...] | None:
        """Return the template for a fault; None: it has none."""
        role, known = str(target.role), self.by_role_and_kind
        for key in ((role, kind), ("", kind), (role, ""), ("", "")):
            words = known.get(key)
            if words is not None and (key[1] or kind in INJECTABLE):
                return words
        return None


def reaches(templates: Templates, target: Target, kind: str) -> bool:
    """Return whether a kind of fault of this target's role can hit it: as an order, or by a template."""
    if kind == "fill-disk" and target.role is Role.GROUP:  # it has no data directory
        return templates.by_role_and_kind.keys() & {("group", kind), ("", kind)} != set()
    return kind in ORDERS or templates.of(target, kind) is not None


def parse(texts: Sequence[str]) -> Templates:
    """Parse values of ``--exec``: ``TEMPLATE``, ``ROLE=TEMPLATE``, ``KIND=TEMPLATE``, or ``ROLE.KIND=TEMPLATE``.

    Raises:
        ValueError: a template is invalid.
    """
    found: dict[tuple[str, str], tuple[str, ...]] = {}
    for text in texts:
        key, template = _key(text)
        words = tuple(shlex.split(template))
        if not words:
            raise ValueError(f"invalid template {text!r}: expected a command")
        unknown = [name for word in words for name in FIELD.findall(word) if name not in PLACEHOLDERS]
        if unknown:
            raise ValueError(
                f"invalid template {text!r}: unknown placeholder {{{unknown[0]}}}; known placeholders: "
                f"{', '.join(PLACEHOLDERS)}"
            )
        if not key[1] and not any("{command}" in word for word in words):
            raise ValueError(
                f"invalid template {text!r}: {{command}} is missing; only a template of one kind needs none"
            )
        found[key] = words
    return Templates(found)


def _key(text: str) -> tuple[tuple[str, str], str]:
    before, equals, after = text.partition("=")
    role, dot, kind = before.partition(".")
    if equals and before in ROLES:
        return (before, ""), after
    if equals and before in KINDS:
        return ("", before), after
    if equals and dot and role in ROLES and kind in KINDS:
        return (role, kind), after
    return ("", ""), text


def command(words: Sequence[str], fault: Fault, job: str, address: str) -> list[str]:
    """Return the command for a fault.

    Args:
        words: of the template. A word ``{command}`` becomes the words of the `keepstep inject` command; inside of a
            longer word, it is quoted for a shell.
        fault: what to inject.
        job: of the groups.
        address: of the target, as a URL.
    """
    parts = urlsplit(address)
    host, port = parts.hostname or "", str(parts.port or "")
    at = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    inject = ["keepstep", "inject", fault.kind.name, "--at", at, "--seconds", f"{fault.seconds:.3f}"]
    number = re.search(r"\d+$", fault.target.name)
    values = {
        "command": shlex.join(inject),
        "name": fault.target.name,
        "number": number[0] if number else "",
        "host": host,
        "port": port,
        "job": job,
        "role": str(fault.target.role),
        "kind": fault.kind.name,
        "seconds": f"{fault.seconds:.3f}",
    }
    filled: list[str] = []
    for word in words:
        if word == "{command}":
            filled += inject
        else:
            filled.append(FIELD.sub(lambda field: values[field[1]], word))
    return filled
