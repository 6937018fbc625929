"""The settings that all groups of a job must have in common, as text: one line ``name value`` each. Pure."""

from __future__ import annotations

from collections.abc import Mapping

SCRIPT = "script"
"""Setting that names the class with which a script trains; unknown: ``Manager``. Other classes have other settings, so
that it is the first difference."""
MAX_SHOWN = 100
"""Characters of a name or value in a sentence."""


def settings_text(settings: Mapping[str, object]) -> str:
    """Return the text that groups compare. It does not depend on the order of ``settings``."""
    return "\n".join(f"{name} {value}" for name, value in sorted(settings.items()))


def with_settings(text: str, settings: Mapping[str, object]) -> str:
    """Return ``text`` with further settings, which replace those of the same name."""
    return settings_text({**_parsed(text), **settings})


def differ(one: str, other: str) -> bool:
    """Return whether two groups must not train together. Empty settings are unknown, and fit all."""
    return one != other and "" not in {one, other}


def difference(one: str, where: str, other: str, elsewhere: str) -> str:
    """Name the first setting in which two texts differ: ``setting init_sync: True in r0, False in r1``."""
    ours, theirs = ({SCRIPT: "Manager", **_parsed(text)} for text in (one, other))
    for name in sorted(ours.keys() | theirs.keys(), key=lambda name: (name != SCRIPT, name)):
        here, there = ours.get(name, "unknown"), theirs.get(name, "unknown")
        if here != there:
            return f"setting {name[:MAX_SHOWN]}: {here[:MAX_SHOWN]} in {where}, {there[:MAX_SHOWN]} in {elsewhere}"
    return f"the settings of {where} and {elsewhere} are written differently; run one version of keepstep"


def _parsed(text: str) -> dict[str, str]:
    pairs = (line.partition(" ") for line in text.splitlines())
    return {name: value for name, _, value in pairs}
