"""The base of every description: all mistakes of a mapping at once, in plain words.

pydantic alone stops at a model's fields and skips the checks across fields while one field is wrong. Here
each model looks at the whole mapping as it was given first (unknown keys, keys not built yet, what does not
go together), then lets pydantic read the fields, and raises everything together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, ModelWrapValidatorHandler, ValidationError, ValidationInfo, model_validator
from pydantic_core import InitErrorDetails

from .mistakes import Mistake, detail, did_you_mean, shown, wrong


class Description(BaseModel):
    """A frozen description. A key whose value is null counts as not written."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    NOT_BUILT: ClassVar[Mapping[str, str]] = {}
    """Keys of the design that are refused by name: key → what to do instead (may be empty)."""

    LOADER_ONLY: ClassVar[frozenset[str]] = frozenset()
    """Fields that no file may write: the loader fills them in."""

    @classmethod
    def prepare(cls, given: dict[str, Any]) -> dict[str, Any]:
        """The mapping with what follows from it filled in. Must not fail on any input."""
        return given

    @classmethod
    def mistakes(cls, given: Mapping[str, Any]) -> Iterator[Mistake]:
        """What does not go together; keys and values in ``given`` may be wrong in themselves."""
        return iter(())

    def unsaid(self) -> frozenset[str]:
        """Fields that a description kept for later leaves out, because they do not go with what it says."""
        return frozenset()

    @classmethod
    def keys(cls, *, written: bool) -> list[str]:
        """The keys that are accepted, as they are written."""
        names = {name: field.alias or name for name, field in cls.model_fields.items()}
        return [alias for name, alias in names.items() if not (written and name in cls.LOADER_ONLY)]

    @model_validator(mode="wrap")
    @classmethod
    def _all_at_once(cls, value: Any, handler: ModelWrapValidatorHandler[Self], info: ValidationInfo) -> Self:
        if isinstance(value, cls):
            return handler(value)
        written = bool(info.context and info.context.get("written"))
        known = cls.keys(written=written)
        if not isinstance(value, Mapping):
            raise wrong(f"a mapping was expected, not {shown(value)}; its keys: {', '.join(known)}")
        given = {k: v for k, v in value.items() if v is not None or k not in known}
        found: list[Mistake] = []
        for key in (k for k in given if k not in known):
            found.append(Mistake((key,), cls._about_key(key, known), at_key=True))
        found += cls.mistakes(given)
        given = {k: v for k, v in given.items() if k in known}
        details = [detail("key" if m.at_key else "value", m.message, m.loc) for m in found]
        try:
            result = handler(cls.prepare(given))
        except ValidationError as error:
            for line in error.errors(include_url=False, include_input=False):
                details.append(_reworded(cls, line))
        if details:
            raise ValidationError.from_exception_data(cls.__name__, details)
        return result

    @classmethod
    def _about_key(cls, key: str, known: list[str]) -> str:
        if key in cls.NOT_BUILT:
            instead = cls.NOT_BUILT[key]
            return f"{key!r} is not built yet" + (f"; {instead}" if instead else "")
        return f"unknown key {key!r}{did_you_mean(key, known)}; accepted: {', '.join(known)}"


def _reworded(cls: type[Description], line: Any) -> InitErrorDetails:
    """One of pydantic's errors in our words; ours pass as they are."""
    kind, loc, message = line["type"], line["loc"], line["msg"]
    if kind in {"value", "key", "lacks"}:
        return detail(kind, message, loc, line.get("ctx"))
    if kind == "missing":
        return detail("lacks", f"{str(loc[-1])!r} is missing", loc)
    return detail("value", message[:1].lower() + message[1:], loc)
