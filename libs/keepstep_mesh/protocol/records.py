"""Functions that are generated from the dataclass of a record, so that a field is declared once, in its class. Pure.

* ``maker`` and ``copier`` make records, which are frozen dataclasses with slots, in a fifth of the time that
  ``__init__`` takes, which sets each field by a call. In a message of 20 fields these calls take longer than everything
  else that a message costs.
* ``Format`` makes decoders: it has those of the simple types, with its limits and its error. Those of records, lists,
  and optional values follow from them. A record is a list of its fields in order, or a map by their names.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

Decoder = Callable[[Any, str], Any]
"""Check a value that a peer sent, and return it as the field holds it. The second argument is its name in errors."""


def maker(cls: Callable[P, T]) -> Callable[P, T]:
    """Return a function that makes a ``cls`` from the arguments that ``cls`` takes.

    It fills a ``Draft``, an object with the same slots that is not frozen, which then becomes a ``cls``.

    Args:
        cls: a dataclass with slots, without ``__post_init__`` and default factories.

    Raises:
        TypeError: ``cls`` is something else.
    """
    draft = _draft(cls)
    known: dict[str, Any] = {"Draft": draft, "cls": cls}
    arguments = []
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]
    for field in fields:
        has_default = field.default is not dataclasses.MISSING
        known[f"default_{field.name}"] = field.default
        arguments.append(f"{field.name}=default_{field.name}" if has_default else field.name)
    make: Callable[P, T] = _function(arguments, [(field.name, field.name) for field in fields], known)
    return make


def copier(cls: Callable[P, T], source: type, *changed: str) -> Callable[..., T]:
    """Return a function that makes a ``cls`` from a record of ``source`` and from the values of some fields, by name.

    Fields of equal names are copied, so that a new field needs to be declared only in both classes. Fields that
    ``source`` does not have keep their defaults.

    Args:
        cls: as for ``maker``.
        source: a dataclass.
        changed: names of the fields whose values are arguments, after the record.

    Raises:
        TypeError: a field has no value.
    """
    known: dict[str, Any] = {"Draft": _draft(cls), "cls": cls}
    copied = {field.name for field in dataclasses.fields(source)}
    values = []
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        if field.name in changed:
            values.append((field.name, field.name))
        elif field.name in copied:
            values.append((field.name, f"record_.{field.name}"))
        elif field.default is not dataclasses.MISSING:
            known[f"default_{field.name}"] = field.default
            values.append((field.name, f"default_{field.name}"))
        else:
            raise TypeError(f"{source.__name__} has no field {field.name!r} of {cls!r}; pass its value as an argument")
    copy: Callable[..., T] = _function(["record_", *changed], values, known)
    return copy


def _draft(cls: Callable[..., Any]) -> type:
    """Return a class that is not frozen, whose instances can become a ``cls``: with its bases, and its own slots."""
    fields = dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ()
    factories = any(field.default_factory is not dataclasses.MISSING for field in fields)
    if not dataclasses.is_dataclass(cls) or hasattr(cls, "__post_init__") or factories:
        raise TypeError(f"no maker for {cls!r}; pass a dataclass without __post_init__ and without default factories")
    own = [field.name for field in fields if field.name in vars(cls).get("__slots__", ())]
    unfrozen = {"__init__": object.__init__, "__setattr__": object.__setattr__, "__delattr__": object.__delattr__}
    draft = type("Draft", cls.__bases__, {"__slots__": own, **unfrozen})
    draft().__class__ = cls  # TypeError: it has other slots
    return draft


def _function(arguments: list[str], values: list[tuple[str, str]], known: dict[str, Any]) -> Any:
    """Return a function that fills a draft with ``values``: names of fields, and expressions."""
    filled = [f" made.{name} = {value}" for name, value in values]
    return _compiled(arguments, [" made = Draft()", *filled, " made.__class__ = cls", " return made"], known)


def _compiled(arguments: list[str], lines: list[str], known: dict[str, Any]) -> Any:
    """Return a function of these lines. ``known``: its globals. The lines are built from classes of ours, at import."""
    exec("\n".join((f"def made_here({', '.join(arguments)}):", *lines)), known)  # noqa: S102 - no text of a peer
    return known["made_here"]


class Format:
    """How records of one kind are read.

    Args:
        error: the exception for a bad value; its message is a sentence with the name of the field.
        simple: decoder of each simple type. A type ``Annotated[X, decoder]`` brings its own.
        odd: condition, with the value as ``{x}``, under which a value of a simple type needs its decoder. Other values
            are taken as they are, without a call. Without a condition all values go to the decoder.
        most_items: limit of a list.
    """

    def __init__(
        self,
        error: type[Exception],
        simple: Mapping[Any, Decoder],
        odd: Mapping[Any, str] | None = None,
        most_items: int = 65536,
    ) -> None:
        self._error = error
        self._simple = simple
        self._odd = odd or {}
        self._most_items = most_items

    def decoder(self, hint: Any, name: str) -> Decoder:
        """Return the decoder of a type. Raises ``TypeError``, with the name, for a type that no message can have."""
        if hint in self._simple:
            return self._simple[hint]
        origin, arguments = typing.get_origin(hint), typing.get_args(hint)
        if origin is Annotated:
            own: Decoder = arguments[1]
            return own
        if origin in (types.UnionType, typing.Union):
            return self._union(list(arguments), name)
        if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
            return self._sequence(arguments[0], name)
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            return self.of_list(hint, hint.__name__)
        raise TypeError(f"{name}: {hint!r} cannot be decoded; only tuple[X, ...] and records of simple types can")

    def of_list(self, cls: type, name: str, *, least: int | None = None, exact: bool = False) -> Decoder:
        """Return the decoder of a list of the fields of ``cls``.

        Args:
            cls: a dataclass.
            name: of the record, in errors about its fields; empty: they have their own names.
            least: number of fields that the list must have; None: those without a default.
            exact: the list must have all fields and no others. Else further ones, of a newer peer, are ignored.
        """
        hints, fields = typing.get_type_hints(cls, include_extras=True), dataclasses.fields(cls)
        places = [f"{name}.{f.name}" if name else f.name for f in fields]
        decoders = [(self.decoder(hints[f.name], where), where) for f, where in zip(fields, places, strict=True)]
        most = len(fields)
        required = most if exact else len(_required(cls)) if least is None else least

        def decode(value: Any, path: str) -> Any:
            if type(value) is not list:
                raise self._error(f"{path} must be a list of fields, not {type(value).__name__}")
            if len(value) < required or (exact and len(value) > most):
                least = "" if exact else "at least "
                raise self._error(f"{path} has {len(value)} fields; expected {least}{required}")
            if len(value) > most:
                value = value[:most]
            return cls(*[one(raw, where) for (one, where), raw in zip(decoders, value, strict=False)])

        return self._in_line(cls, [hints[f.name] for f in fields], decoders, decode)

    def of_map(self, cls: type) -> Decoder:
        """Return the decoder of a map of the fields of ``cls`` by name. It ignores fields that it does not know."""
        hints = typing.get_type_hints(cls, include_extras=True)
        decoders = [(f.name, self.decoder(hints[f.name], f.name)) for f in dataclasses.fields(cls)]
        required = _required(cls)

        def decode(plain: Any, _path: str) -> Any:
            found = {name: decode_field(plain[name], name) for name, decode_field in decoders if name in plain}
            if len(found) < len(decoders):
                for name in required:
                    if name not in found:
                        raise self._error(f"{name} is missing")
            return cls(**found)

        return decode

    def _union(self, choices: list[Any], name: str) -> Decoder:
        optional = type(None) in choices
        rest = [self.decoder(choice, name) for choice in choices if choice is not type(None)]
        if optional and len(rest) == 1:
            only = rest[0]
            return lambda value, path: None if value is None else only(value, path)

        def decode(value: Any, path: str) -> Any:
            if value is None and optional:
                return None
            for decoder in rest[:-1]:
                try:
                    return decoder(value, path)
                except self._error:
                    continue
            return rest[-1](value, path)

        return decode

    def _sequence(self, item: Any, name: str) -> Decoder:
        decode_item, most = self.decoder(item, name), self._most_items

        def decode(value: Any, path: str) -> Any:
            if type(value) is not list:
                raise self._error(f"{path} must be a list, not {type(value).__name__}")
            if len(value) > most:
                raise self._error(f"{path} too long: {len(value)} items (limit {most})")
            return tuple([decode_item(one, path) for one in value])

        return decode

    def _in_line(self, cls: type, hints: list[Any], decoders: list[tuple[Decoder, str]], decode: Decoder) -> Decoder:
        """Generate a ``decode`` with the conditions of ``odd`` in line, as ``dataclasses`` generates methods: twice as
        fast. Empty lists are common. Odd values and fields of other types go to their decoder; records of another
        length to ``decode``.
        """
        names = [f"f{number}" for number in range(len(hints))]
        lines = [f" if type(value) is not list or len(value) != {len(names)}:", "  return decode(value, path)"]
        lines.append(f" [{', '.join(names)}] = value")
        known: dict[str, Any] = {"make": maker(cls), "decode": decode}
        for name, hint, (decoder, where) in zip(names, hints, decoders, strict=True):
            choices = typing.get_args(hint) if typing.get_origin(hint) is types.UnionType else (hint,)
            wrong = [self._odd.get(one, "True") for one in choices if one is not type(None)]
            wrong += ["{x} is not None"] * (type(None) in choices)
            if typing.get_origin(hint) is tuple:
                lines += [f" if {name} == []:", f"  {name} = ()", " else:"]
            else:
                lines.append(f" if {' and '.join(f'({one})' for one in wrong).format(x=name)}:")
            lines.append(f"  {name} = d_{name}({name}, {where!r})")
            known[f"d_{name}"] = decoder
        lines.append(f" return make({', '.join(names)})")
        fast: Decoder = _compiled(["value", "path"], lines, known)
        return fast


def _required(cls: type) -> list[str]:
    """Return the names of the fields without a default."""
    missing = dataclasses.MISSING
    return [f.name for f in dataclasses.fields(cls) if f.default is missing and f.default_factory is missing]
