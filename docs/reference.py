"""Generate docs/reference.md from the code: commands and flags, variables, routes, metrics (`make reference`).

``docstrings.py`` generates docs/python.md; this script runs it too.
"""

from __future__ import annotations

import ast
import inspect
import re
import runpy
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from datetime import timedelta
from pathlib import Path
from typing import Any

import click

from keepstep.manager import Manager
from keepstep_cli.asking import options
from keepstep_cli.main import main
from keepstep_lighthouse import settings as lighthouse_settings
from keepstep_lighthouse.api import routes as lighthouse_api
from keepstep_lighthouse.app import Lighthouse
from keepstep_mesh.config import variables
from keepstep_mesh.security.tokens import Access
from keepstep_mesh.serving.application import Route
from keepstep_mesh.serving.openapi import Shape
from keepstep_mesh.serving.service import all_routes
from keepstep_metrics import settings as metrics_settings
from keepstep_metrics.api import routes as metrics_api
from keepstep_metrics.app import Metrics
from keepstep_relay import settings as relay_settings
from keepstep_relay.api import admin as relay_api
from keepstep_relay.app import Relay

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reference.md"
HEAD = """\
# Reference

This page lists every command with its flags, every variable, every route, and every metric. `make reference` generates
it from the code, and a test compares the two. Change the code, not this page.

[Commands](#commands) | [Variables](#variables) | [Routes](#routes) | [Metrics](#metrics)

## Commands
`keepstep COMMAND --help` prints the same. A flag overrides a variable, which overrides the default. Times are seconds,
or `500ms`, `1.5s`, `2m`, `1h`, `30d`; sizes are bytes, or `512MiB`, `8GiB`. [The command](cli.md) describes the
behavior and exit codes of each command.
"""
SHARED = "Common flags of client commands"
VARIABLES = """\
## Variables
An empty variable counts as not set. If `KEEPSTEP_...` is not set, `TORCHFT_...` is read, except for `KEEPSTEP_TOKEN`,
`KEEPSTEP_TOKEN_FILE`, `KEEPSTEP_STEP_LOG`, `KEEPSTEP_NAME_FILE`, `KEEPSTEP_CHAOS`, `KEEPSTEP_RELAY`, and the
variables of [services without a flag](#services-without-a-flag).
"""
ROUTES = """\
## Routes
Bodies are JSON, except where the table says bytes. Errors are problem documents (RFC 9457) that say what to do. `GET
/openapi.json` of each service has every field of every answer. The column "role" has the token that a route requires;
"any" accepts every token, and an admin token is accepted everywhere. Without tokens, roles do not apply.
"""
METRICS = """\
## Metrics
`GET /metrics` of each service exports these metrics to Prometheus.
"""
SETTINGS = {"lighthouse": lighthouse_settings, "relay": relay_settings, "metrics": metrics_settings}
SERVICES_OF = {**{name: [name] for name in SETTINGS}, "up": list(SETTINGS)}
"""The services that a command runs."""
ROLES = {
    Access.OPEN: "none",
    Access.READ: "any",
    Access.WORKER: "worker",
    Access.SERVICE: "service",
    Access.ADMIN: "admin",
}
NOTE = re.compile(r"\s*\[(?:env: ([A-Z_, ]+))?(?:; )?(?:default: ([^]]*))?\]")
"""The end of a flag's help: its variables and default."""


class Asked(dict[str, str]):
    """An empty environment that records the names that a caller reads."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def get(self, name: str, default: Any = None) -> Any:
        self.names.append(name)
        return default


def table(head: str, rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table. ``head``: names of the columns, with bars between them."""
    lines = [" | ".join(cell.replace("|", "\\|") for cell in row) for row in rows]
    return "\n".join([f"| {head} |", "|---" * (head.count("|") + 1) + "|", *(f"| {line} |" for line in lines)]) + "\n"


# ---- commands


@dataclass(frozen=True)
class Flag:
    names: tuple[str, ...]
    value: str
    variables: tuple[str, ...]
    default: str
    meaning: str

    def row(self) -> list[str]:
        first, *others = self.names
        names = [f"{first} {self.value}".strip(), *others]
        return [
            *(", ".join(f"`{one}`" for one in group) for group in (names, self.variables)),
            self.default,
            self.meaning,
        ]


def flag_of(option: click.Option, service: str = "", looked_for: Collection[str] = ()) -> Flag:
    """Describe an option. ``looked_for``: variables that its command reads; those of ``service`` come first."""
    text = option.help or ""
    variables, default = ("".join(of) for of in zip(("", ""), *NOTE.findall(text), strict=True))
    name = str(option.name).upper()
    own = [one for one in (f"KEEPSTEP_{service.upper()}_{name}", f"KEEPSTEP_{name}") if one in looked_for][:1]
    if option.required:
        default = "required"
    elif option.show_default:
        default = f"{option.default:g}" if isinstance(option.default, float) else str(option.default)
    names = tuple(one for one in sorted(option.opts, key=len, reverse=True) if "_" not in one)
    found = tuple(variables.split(", ")) if variables else tuple(own)
    return Flag(names, value_of(option), found, default, NOTE.sub("", text))


def value_of(option: click.Option) -> str:
    """Return the placeholder of a flag's value."""
    kind = option.type
    if option.is_flag or option.metavar:
        return option.metavar or ""
    if isinstance(kind, click.Choice):
        return "|".join(kind.choices)
    if isinstance(kind, click.IntRange):
        return "N"
    return "FOLDER" if kind.name == "directory" else kind.name.upper()


def parts_of(name: str) -> dict[str, click.Command]:
    """Return a command, or the commands of a group, by the words to type."""
    found = main.all_commands()[name]
    if isinstance(found, click.Group):
        return {f"{name} {part}": command for part, command in found.commands.items()}
    return {name: found}


def own_options(command: click.Command) -> list[click.Option]:
    return [one for one in command.params if isinstance(one, click.Option) and not one.hidden]


def flags_of(name: str) -> list[Flag]:
    services, environ = SERVICES_OF.get(name, [""]), Asked()
    for service in filter(None, services):
        SETTINGS[service].read_settings({}, environ)
    found = {one.name: one for command in parts_of(name).values() for one in own_options(command)}
    return [flag_of(one, services[0], environ.names) for one in found.values()]


def commands() -> Iterator[str]:
    shared = [flag_of(one) for one in own_options(click.command()(options.client_options(lambda **_: None)))]
    for name in main.all_commands():
        yield f"### keepstep {name}"
        for typed, command in parts_of(name).items():
            usage = " ".join(command.collect_usage_pieces(click.Context(command)))
            yield f"`keepstep {typed} {usage}`: {command.get_short_help_str(limit=200)}\n"
        flags = flags_of(name)
        if own := [one for one in flags if one not in shared]:
            yield table("flag | variable | default | meaning", (one.row() for one in own))
        if both := [f"`{one.names[0]}`" for one in flags if one in shared]:
            yield f"[Common flags](#{SHARED.lower().replace(' ', '-')}): {', '.join(both)}.\n"
    yield f"### {SHARED}"
    yield table("flag | variable | default | meaning", (one.row() for one in shared))


# ---- variables


def default_of(name: str) -> str:
    """Return the default of the Manager's argument that a variable overrides."""
    argument = name.removeprefix("KEEPSTEP_").removesuffix("_SEC").lower()
    found = inspect.signature(Manager).parameters.get(argument)
    if found is None or found.default is None:
        return ""
    default = found.default.total_seconds() if isinstance(found.default, timedelta) else found.default
    return f" ({default:g})"


def meanings(of: Mapping[str, str]) -> str:
    return table("variable | meaning", ([f"`{name}`", meaning + default_of(name)] for name, meaning in of.items()))


def all_variables() -> Iterator[str]:
    yield "### Trainers and client commands"
    yield meanings(variables.OF_CLIENTS)
    yield "### Trainers"
    yield "A variable overrides the argument of the `Manager`, except for the port.\n"
    yield meanings(variables.OF_TRAINERS)
    yield "### Trainers, set by launchers"
    yield "These apply where no argument of the `Manager` sets the value.\n"
    yield meanings(variables.OF_LAUNCHERS)
    yield "### Services, without a flag"
    yield meanings(variables.OF_SERVICES)
    yield "### Variables of flags"
    yield (
        "Nearly every flag of a service is a variable too: `--join-timeout` of `keepstep lighthouse` is "
        "`KEEPSTEP_LIGHTHOUSE_JOIN_TIMEOUT`. The tables of [commands](#commands) name each.\n"
    )


# ---- routes


def takes(shape: Shape, method: str) -> str:
    """Return query parameters and body of a route."""
    found = [f"`?{name}=`: {meaning}" for name, meaning in shape.query.items()]
    if shape.takes_bytes:
        found.append("bytes")
    if shape.body is not None and (of_body := fields(shape.body)):
        left_out = (None, MISSING)  # a PATCH leaves fields that it does not name unchanged
        values = [(one.name, None if method == "PATCH" else one.default) for one in of_body]
        said = [f"`{name}`" + ("" if value in left_out else f" ({value})") for name, value in values]
        found.append(f"JSON: {', '.join(said)}")
    return "; ".join(found)


def routes_of(routes: Iterable[Route], shapes: Mapping[str, Shape]) -> str:
    rows = []
    for one in routes:
        asked = f"{one.method} {one.path}"
        rows.append([f"`{asked}`", ROLES[one.access], one.summary, takes(shapes.get(asked, Shape(None)), one.method)])
    return table("route | role | | takes", rows)


def all_apis() -> Iterator[str]:
    for service, shapes in (
        (Lighthouse(lighthouse_settings.LighthouseSettings()), lighthouse_api.SHAPES),
        (Relay(relay_settings.RelaySettings()), relay_api.SHAPES),
        (Metrics(metrics_settings.MetricsSettings()), metrics_api.SHAPES),
    ):
        described = service.service()
        yield f"### Routes of the {described.name}{' service' * (described.name == 'metrics')}"
        yield routes_of(all_routes(described), shapes)


# ---- metrics


def families(source: str) -> Iterator[list[str]]:
    """Yield a row for each metric family that ``source`` creates."""
    made = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    for call in sorted(made, key=lambda node: node.lineno):
        kind = re.fullmatch(r"(Counter|Gauge|Histogram)MetricFamily", ast.unparse(call.func))
        if kind is None:
            continue
        name, meaning = (ast.literal_eval(one) for one in call.args[:2])
        found = next((ast.literal_eval(one.value) for one in call.keywords if one.arg == "labels"), [])
        labels = f"{{{','.join(found)}}}" if found else ""
        suffixes = {"Counter": ["_total"], "Histogram": ["_bucket", "_sum", "_count"]}.get(kind[1], [""])
        yield [", ".join(f"`{name}{suffix}{labels}`" for suffix in suffixes), kind[1].lower(), meaning]


def all_metrics() -> Iterator[str]:
    for service in SETTINGS:
        yield f"### Metrics of the {service}{' service' * (service == 'metrics')}"
        yield table("metric | type | ", families((ROOT / f"services/keepstep_{service}/api/prometheus.py").read_text()))
    yield "### Metrics of every service"
    yield "On Linux also the `process_*` metrics of the Prometheus client, such as `process_resident_memory_bytes`.\n"
    yield table("metric | type | ", families((ROOT / "libs/keepstep_mesh/serving/process_metrics.py").read_text()))


def reference() -> str:
    parts = (HEAD, *commands(), VARIABLES, *all_variables(), ROUTES, *all_apis(), METRICS, *all_metrics())
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(reference())
    runpy.run_path(str(PAGE.with_name("docstrings.py")), run_name="__main__")
    runpy.run_path(str(PAGE.with_name("parity.py")), run_name="__main__")
