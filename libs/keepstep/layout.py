"""What all groups of a job must have in common: their parameters, one line each, and where two lists of them part."""

from __future__ import annotations

import hashlib


def layout_digest(lines: list[str]) -> str:
    """What groups compare to see that their parameters fit; empty for no lines."""
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=16).hexdigest() if lines else ""


def first_difference(ours: list[str], theirs: list[str], peer: str) -> str:
    """Where two layouts part, in a sentence."""
    for number, (mine, other) in enumerate(zip(ours, theirs, strict=False)):
        if mine != other:
            return f"first difference, entry {number}: here {mine!r}, in {peer} {other!r}"
    if len(ours) != len(theirs):
        longer, where = (ours, "here") if len(ours) > len(theirs) else (theirs, f"in {peer}")
        return f"first difference: only {where}: {longer[min(len(ours), len(theirs))]!r}"
    return "rank 0's parameters are alike; those of another rank differ"
