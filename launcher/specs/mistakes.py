"""How a mistake in a description is said: words, place, and several of them at once."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, NoReturn

from pydantic import ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError

Loc = tuple[str | int, ...]


class Mistake(NamedTuple):
    """What is wrong at ``loc`` (below the model or value that says so). ``at_key``: the key itself is the mistake."""

    loc: Loc
    message: str
    at_key: bool = False


def shown(value: Any) -> str:
    """A value inside a message: short, on one line."""
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, (list, tuple)):
        return "a list"
    text = repr(str(value)) if isinstance(value, str) else repr(value)
    return text if len(text) <= 60 else text[:57] + "…'"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`` (did you mean 'x'?)``, or nothing."""
    folded = {name.lower().replace("-", "_"): name for name in known}
    typed = word.lower().replace("-", "_")
    # Letters in another order first: two letters swapped in a short word are not close by difflib's measure.
    close = [name for name in folded if sorted(name) == sorted(typed)]
    close = close or [name for name in folded if name.startswith(f"{typed}_")]  # slots: slots_per_node
    close = close or difflib.get_close_matches(typed, folded, n=1, cutoff=0.6)
    return f" (did you mean {folded[close[0]]!r}?)" if close else ""


def custom(kind: str, message: str, found: Mapping[str, Any] | None = None) -> PydanticCustomError:
    # pydantic fills {names} in from ``found``, which holds at most "offset".
    if found is None:
        return PydanticCustomError(kind, message)
    return PydanticCustomError(kind, message, dict(found))


def wrong(message: str, *, offset: int | None = None) -> PydanticCustomError:
    """The error of a value. ``offset``: characters from the value's beginning to the mistake."""
    return custom("value", message, None if offset is None else {"offset": offset})


def detail(kind: str, message: str, loc: Loc, found: Mapping[str, Any] | None = None) -> InitErrorDetails:
    return InitErrorDetails(type=custom(kind, message, found), loc=loc, input=None)


def raise_together(mistakes: Iterable[Mistake]) -> None:
    """Raises all of them as one ValidationError; nothing when there are none."""
    details = [detail("key" if m.at_key else "value", m.message, m.loc) for m in mistakes]
    if details:
        _raise(details)


def _raise(details: list[InitErrorDetails]) -> NoReturn:
    raise ValidationError.from_exception_data("description", details)
