"""The types of single values: text as it was typed becomes what its key means, or an error in plain words.

From a YAML file every scalar arrives as :class:`Text`. From a description kept in ``run.json`` (and from
Python) numbers and booleans arrive as themselves; both go through the same checks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, NoReturn, TypeVar

from pydantic import AfterValidator, BeforeValidator, PlainSerializer
from pydantic_core import PydanticCustomError

from ..contract.bounds import FRACTION, NOT_NEGATIVE, POSITIVE, Bounds
from . import nodelist, units
from .mistakes import did_you_mean, shown, wrong

T = TypeVar("T")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)


class Text(str):
    """A scalar exactly as it was typed. ``plain`` means that it stood without quotes."""

    plain: bool

    def __new__(cls, value: str, plain: bool = True) -> Text:
        made = super().__new__(cls, value)
        made.plain = plain
        return made


class FrozenDict(dict[str, Any]):
    """A dict that cannot change: what mappings inside a frozen description are."""

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise TypeError("a description is frozen; make a changed copy with model_copy(update=…)")

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))

    def __copy__(self) -> FrozenDict:
        return self

    def __deepcopy__(self, memo: object) -> FrozenDict:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return FrozenDict, (dict(self),)


def freeze(value: Any) -> Any:
    """Mappings and lists, however deep, as ones that cannot change."""
    if isinstance(value, Mapping):
        return FrozenDict({k: freeze(v) for k, v in value.items()})
    if isinstance(value, (list, tuple)):
        return tuple(freeze(v) for v in value)
    return value


def parsed_by(parse: Callable[[str], T]) -> Callable[[Any], Any]:
    """A validator that hands text to ``parse`` and lets through what is already whole."""

    def validate(value: Any) -> Any:
        if not isinstance(value, str):
            if isinstance(value, (bool, float, list, Mapping)):
                raise wrong(f"text was expected, not {shown(value)}")
            return value
        try:
            return parse(str(value))
        except ValueError as problem:
            raise wrong(str(problem)) from None

    return validate


# --- numbers --------------------------------------------------------------------------------------


def whole(value: Any) -> int:
    """An integer written in decimal; ``0123`` is 123, as in YAML 1.2."""
    if isinstance(value, int) and not isinstance(value, bool):
        return int(value)
    if isinstance(value, str) and re.fullmatch(r"[+-]?\d{1,18}", value, re.ASCII):
        return int(value)
    raise wrong(f"a whole number was expected, not {shown(value)}")


def number(value: Any) -> float:
    """A finite number; ``3e-4`` and ``.5`` are fine."""
    typed = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not typed and not (isinstance(value, str) and _NUMBER.fullmatch(value)):
        raise wrong(f"a number was expected, not {shown(value)}")
    found = float(value)
    if not math.isfinite(found):
        raise wrong(f"{shown(value)} is not finite")
    return found


def flag(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value in {"true", "True", "TRUE", "false", "False", "FALSE"}:
        return value.lower() == "true"
    also = {
        "yes": "true",
        "on": "true",
        "y": "true",
        "1": "true",
        "no": "false",
        "off": "false",
        "n": "false",
        "0": "false",
    }
    meant = also.get(str(value).lower())
    raise wrong(f"true or false was expected, not {shown(value)}" + (f" (write {meant})" if meant else ""))


def at_least(least: float, most: float = math.inf) -> AfterValidator:
    def check(value: Any) -> Any:
        if value < least or value > most:
            bounds = f"at least {_told(least)}" if most == math.inf else f"from {_told(least)} to {_told(most)}"
            raise wrong(f"{_told(value)} is out of range; accepted: {bounds}")
        return value

    return AfterValidator(check)


def _told(value: float) -> str:
    """A whole number with all its digits, as it was typed; others short."""
    return str(value) if isinstance(value, int) else f"{value:g}"


def within(bounds: Bounds) -> AfterValidator:
    """A number that is whole already, inside ``bounds``."""

    def check(value: float) -> float:
        problem = bounds.problem(value)
        if problem:
            raise wrong(problem)
        return value

    return AfterValidator(check)


Whole = Annotated[int, BeforeValidator(whole), at_least(0)]
Count = Annotated[int, BeforeValidator(whole), at_least(1)]
Slots = Annotated[int, BeforeValidator(whole), at_least(1, 65536)]  # of a node; lists are made of them
Port = Annotated[int, BeforeValidator(whole), at_least(1, 65535)]
Positive = Annotated[float, BeforeValidator(number), within(POSITIVE)]
NotNegative = Annotated[float, BeforeValidator(number), within(NOT_NEGATIVE)]
Fraction = Annotated[float, BeforeValidator(number), within(FRACTION)]
Flag = Annotated[bool, BeforeValidator(flag)]

Bytes = Annotated[int, BeforeValidator(parsed_by(units.parse_bytes)), at_least(0), PlainSerializer(lambda n: f"{n}B")]
Rate = Annotated[int, BeforeValidator(parsed_by(units.parse_rate)), at_least(1), PlainSerializer(lambda n: f"{n}B/s")]
Seconds = Annotated[int, BeforeValidator(parsed_by(units.duration)), at_least(1), PlainSerializer(lambda n: f"{n}s")]
SlurmTime = Annotated[
    int, BeforeValidator(parsed_by(units.slurm_time)), at_least(1), PlainSerializer(lambda n: f"{n}s")
]
Flops = Annotated[int, BeforeValidator(parsed_by(units.parse_flops)), at_least(1)]
PortRange = Annotated[
    tuple[int, int],
    BeforeValidator(parsed_by(units.port_range)),
    PlainSerializer(lambda ports: f"{ports[0]}-{ports[1]}"),
]


# --- text -----------------------------------------------------------------------------------------


def text(value: Any) -> str:
    """Any text, several lines included; only NUL can go nowhere."""
    if not isinstance(value, str):
        if value is None:
            raise wrong('a value is missing; write "" for empty text')
        raise wrong(f"text was expected, not {shown(value)}")
    if "\0" in value:
        raise wrong("text cannot hold a NUL character: no environment or argument can carry it")
    if any("\ud800" <= c <= "\udfff" for c in value):
        raise wrong(f"{shown(value)} is not text: it holds what is no UTF-8")
    return str(value)


def line(value: Any) -> str:
    """Text of one line, not empty: nothing that could begin a line of its own in a script."""
    found = text(value)
    bad = next((c for c in found if ord(c) < 32 or ord(c) == 127 or c in "\x85\u2028\u2029"), None)
    if bad is not None:
        raise wrong(f"{shown(found)} must stand on one line; it holds {bad!r}")
    if not found.strip():
        raise wrong("a value is missing: the text is empty")
    return found


def word(value: Any) -> str:
    """A line that does not begin with ``-``: a program would read it as an option."""
    found = line(value)
    if found.startswith("-"):
        raise wrong(f"{shown(found)} begins with '-' and would be read as an option")
    return found


def checked(problem: Callable[[str], str | None]) -> Callable[[Any], str]:
    """A one-line text for which ``problem`` finds nothing to complain about."""

    def validate(value: Any) -> str:
        found = line(value)
        complaint = problem(found)
        if complaint:
            raise wrong(complaint)
        return found

    return validate


def _user_problem(name: str) -> str | None:
    if re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._@+-]*\$?", name):
        return None
    return f"user name {name!r} is not safe; accepted: letters, digits, '.', '_', '@', '+', '-'"


def _factory_problem(name: str) -> str | None:
    part = r"[^\W\d]\w*(\.[^\W\d]\w*)*"
    if re.fullmatch(rf"{part}:{part}", name):
        return None
    return f"{name!r} does not name a function; accepted: module:function, for example mypkg.models:llama"


def _jump_problem(hops: str) -> str | None:
    for hop in hops.split(","):
        user, at, host = hop.rpartition("@")
        name, colon, port = host.partition(":")
        if at and _user_problem(user):
            return _user_problem(user)
        if colon and not re.fullmatch(r"\d{1,5}", port, re.ASCII):
            return f"jump host {hop!r}: {port!r} is not a port; accepted: [user@]host[:port], several with commas"
        if host_complaint := nodelist.host_problem(name):
            return host_complaint
    return None


def node_list(value: Any) -> str:
    found = line(value)
    try:
        names = nodelist.expand(found)
    except nodelist.NodeListError as problem:
        raise wrong(str(problem), offset=problem.column - 1) from None
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise wrong(f"node {name!r} is named twice")
        seen.add(name)
    return found


AnyText = Annotated[str, BeforeValidator(text)]
Line = Annotated[str, BeforeValidator(line)]
Word = Annotated[str, BeforeValidator(word)]
Host = Annotated[str, BeforeValidator(checked(nodelist.host_problem))]
Address = Annotated[str, BeforeValidator(checked(nodelist.address_problem))]
User = Annotated[str, BeforeValidator(checked(_user_problem))]
Jump = Annotated[str, BeforeValidator(checked(_jump_problem))]
FactoryName = Annotated[str, BeforeValidator(checked(_factory_problem))]
NodeList = Annotated[str, BeforeValidator(node_list)]


def choice(
    *accepted: str | int, not_built: Iterable[str] = (), same: Mapping[str, str] | None = None
) -> BeforeValidator:
    """One of a few words; ``not_built`` ones are named as such, ``same`` are other spellings."""
    by_text = {str(a): a for a in accepted}
    later = set(not_built)

    def validate(value: Any) -> str | int:
        found = str(value) if isinstance(value, (str, int)) and not isinstance(value, bool) else None
        found = (same or {}).get(found, found) if found is not None else None
        if found in by_text:
            return by_text[found]
        listed = ", ".join(by_text)
        if found in later or (isinstance(value, (list, tuple)) and "a list" in later):
            raise wrong(f"{shown(value)} is not built yet; accepted today: {listed}")
        raise wrong(f"{shown(value)} is not accepted; accepted: {listed}" + did_you_mean(found or "", by_text))

    return BeforeValidator(validate)


def listed(value: Any) -> Any:
    """A list; a lone value is an error rather than a list of its characters."""
    if not isinstance(value, (list, tuple)):
        raise wrong(f"a list was expected, not {shown(value)}; accepted: [a, b]")
    return tuple(value)


LIST = BeforeValidator(listed)


def mapped(value: Any) -> Any:
    if not isinstance(value, Mapping):
        raise wrong(f"a mapping was expected, not {shown(value)}; accepted: lines of 'key: value'")
    return dict(value)


MAPPING = BeforeValidator(mapped)
FREEZE = AfterValidator(freeze)


def core(value: Any) -> Any:
    """Values under no schema of ours (``options``): YAML 1.2's own reading of what stood without quotes."""
    if isinstance(value, Mapping):
        return {str(k): core(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [core(v) for v in value]
    if not isinstance(value, Text):
        return value
    if value.plain:
        if value in {"true", "True", "TRUE", "false", "False", "FALSE"}:
            return value.lower() == "true"
        if re.fullmatch(r"[+-]?\d{1,300}", value, re.ASCII):
            return int(value)
        if _NUMBER.fullmatch(value) and math.isfinite(float(value)):
            return float(value)
    return text(value)


Options = Annotated[dict[str, Any], BeforeValidator(lambda v: core(mapped(v))), FREEZE]


def whole_or_none(value: Any) -> int | None:
    """A whole number where there is one: for checks across fields, which say nothing about the field itself."""
    try:
        return whole(value)
    except PydanticCustomError:
        return None
