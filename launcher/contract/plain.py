"""Frozen dataclasses to and from plain JSON values: the only serialisation that crosses a machine.

A description of what is read stands in the dataclass itself, so a wrong or unknown key is an error
that names its place (``nodes[2].slots``) rather than a surprise later.
"""

from __future__ import annotations

import dataclasses
import errno
import functools
import io
import json
import os
import re
import stat
from pathlib import Path
from typing import Any, Dict, List, Mapping, Sequence, Tuple, Type, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")

_NUMBER = re.compile(r"\s*[-+]?[\d.]+([eE][-+]?\d+)?\s*\Z")


class PlainError(ValueError):
    """A JSON value that does not have the shape its dataclass describes. ``hint``: what would be accepted."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


def to_plain(value: Any) -> Any:
    """``value`` as dicts, lists, strings, numbers, booleans and None."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(k): to_plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(v) for v in value]
    if isinstance(value, (str, int, float, bool)) or value is None:
        return value
    raise TypeError(f"{type(value).__name__} has no plain form")


def from_plain(cls: Type[T], value: Any, where: str = "") -> T:
    """The dataclass ``cls`` that ``value`` (from :func:`to_plain`) describes. A tuple stands for a list, and a
    dataclass that is one already for its mapping; of several dataclasses the keys choose, or ``kind``.

    Raises :class:`PlainError` naming the place for an unknown key, a missing one, or a wrong type.
    """
    result: T = _read(cls, value, where or cls.__name__)
    return result


@functools.lru_cache(maxsize=None)
def _hints(cls: type) -> Dict[str, Any]:
    return get_type_hints(cls)


def _read(kind: Any, value: Any, where: str) -> Any:
    if kind is Any:
        return value
    origin, args = get_origin(kind), get_args(kind)
    if origin is Union:
        return _read_union(args, value, where)
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise PlainError(f"{where}: a list was expected, not {value!r}")
        if len(args) == 2 and args[1] is Ellipsis:
            return tuple(_read(args[0], v, f"{where}[{i}]") for i, v in enumerate(value))
        if len(args) != len(value):
            raise PlainError(f"{where}: {len(args)} values were expected, not {len(value)}")
        return tuple(_read(a, v, f"{where}[{i}]") for i, (a, v) in enumerate(zip(args, value)))
    if origin is dict:
        if not isinstance(value, Mapping):
            raise PlainError(f"{where}: a mapping was expected, not {value!r}")
        return {k: _read(args[1], v, f"{where}.{k}") for k, v in value.items()}
    if dataclasses.is_dataclass(kind):
        return _read_dataclass(kind, value, where)
    if isinstance(kind, type):
        return _read_atom(kind, value, where)
    raise TypeError(f"{where}: {kind!r} has no plain form")


def _read_atom(kind: type, value: Any, where: str) -> Any:
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            raise PlainError(f"{where}: a float was expected, the number is too large") from None
    if isinstance(value, kind) and (kind is bool or not isinstance(value, bool)):
        return value
    hint = "that is text: give the number (YAML 1.1 takes 3e-4 for text, 3.0e-4 for a number)"
    number = kind in (float, int) and isinstance(value, str) and _NUMBER.match(value)
    raise PlainError(f"{where}: {kind.__name__} was expected, not {value!r}", hint if number else "")


def _read_union(args: Tuple[Any, ...], value: Any, where: str) -> Any:
    """The member that ``value`` is meant to be, by what it is and which keys it has; so what is wrong with it is told
    of that member alone."""
    if value is None and type(None) in args:
        return None
    kinds = [kind for kind in args if kind is not type(None)]
    classes = [kind for kind in kinds if dataclasses.is_dataclass(kind)]
    if classes and isinstance(value, Mapping):
        return _read_dataclass(*_member(classes, value, where), where)
    for kind in kinds:
        if get_origin(kind) is tuple and isinstance(value, (list, tuple)):
            return _read(kind, value, where)
    problems = []
    for kind in kinds:
        try:
            return _read(kind, value, where)
        except PlainError as problem:
            problems.append(problem)
    if len(problems) == 1:
        left_out = ", or it is left out" if problems[0].hint and type(None) in args else ""
        raise PlainError(str(problems[0]), problems[0].hint + left_out)
    hints = [problem.hint for problem in problems if problem.hint]
    raise PlainError("; ".join(dict.fromkeys(map(str, problems))), "; ".join(dict.fromkeys(hints)))


def _member(classes: Sequence[Any], value: Mapping[Any, Any], where: str) -> Tuple[Any, Mapping[Any, Any]]:
    """One of ``classes`` and its mapping: the one that ``kind`` names, or else the one that lacks the fewest of the
    keys, then of those it needs; of equals the first."""
    if "kind" in value and len(classes) > 1 and not any("kind" in _fields(cls) for cls in classes):
        by_name = {cls.__name__.lower(): cls for cls in classes}
        kind = str(value["kind"])
        if kind.lower() not in by_name:
            raise PlainError(f"{where}.kind: {kind!r} is not known", f"accepted are {_listed(list(by_name))}")
        return by_name[kind.lower()], {k: v for k, v in value.items() if k != "kind"}
    return min(classes, key=lambda cls: (len(set(value) - set(_fields(cls))), len(_missing(cls, value)))), value


def _fields(cls: Any) -> Dict[str, Any]:
    return {f.name: f for f in dataclasses.fields(cls)}


def _missing(cls: Any, value: Mapping[Any, Any]) -> List[str]:
    return [
        name
        for name, f in _fields(cls).items()
        if name not in value and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]


def _listed(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _nearest(key: str, names: Sequence[str]) -> str:
    """``did you mean …? `` where one of the names is near; an abbreviation is."""
    import difflib

    near = [name for name in names if name.startswith(key)] or difflib.get_close_matches(key, names, 1)
    return f"did you mean {near[0]!r}? " if key and near else ""


def _read_dataclass(cls: Any, value: Any, where: str) -> Any:
    if isinstance(value, cls):
        return value
    names = list(_fields(cls))
    accepted = f"the keys of {cls.__name__} are {_listed(names)}"
    if not isinstance(value, Mapping):
        raise PlainError(f"{where}: a mapping was expected, not {value!r}", accepted)
    unknown = sorted(set(value) - set(names), key=str)
    if unknown:
        raise PlainError(f"{where}: unknown key {unknown[0]!r}", _nearest(str(unknown[0]), names) + accepted)
    missing = _missing(cls, value)
    if missing:
        raise PlainError(f"{where}: {missing[0]!r} is missing", accepted)
    hints = _hints(cls)
    return cls(**{name: _read(hints[name], v, f"{where}.{name}") for name, v in value.items()})


def loads(data: Union[str, bytes]) -> Any:
    """The JSON value in ``data``. Whatever is damaged about it is a ValueError, brackets without end included."""
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("it is nested too deeply to be ours") from None


def open_file(path: Union[str, Path]) -> io.BufferedReader:
    """The plain file at ``path``. Anything else is an OSError: a FIFO in its place would be waited for without end."""
    handle = os.open(str(path), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "is no plain file", str(path))
    return os.fdopen(handle, "rb")


def read_file(path: Union[str, Path]) -> bytes:
    """All bytes of the plain file at ``path``; OSError as :func:`open_file`."""
    with open_file(path) as file:
        return file.read()


def dumps(value: Any) -> bytes:
    """JSON in UTF-8 with a final newline; equal values give equal bytes."""
    plain = to_plain(value)
    try:
        return (json.dumps(plain, ensure_ascii=False, indent=1, allow_nan=False) + "\n").encode("utf-8")
    except UnicodeEncodeError:  # a file's name that is no UTF-8: its bytes as escapes, which are read back the same
        return (json.dumps(plain, indent=1, allow_nan=False) + "\n").encode("ascii")


def write_atomically(path: Union[str, Path], data: bytes, *, durable: bool = False, mode: int = 0o644) -> None:
    """Writes ``data`` beside ``path`` and renames: a reader meets the old file or the new, never a part.

    ``durable`` also syncs the bytes and the folder, so that the file survives a power cut.
    """
    path = Path(path)
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    handle = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    if durable:
        sync_folder(path.parent)


def sync_folder(folder: Union[str, Path]) -> None:
    """Makes renames inside ``folder`` survive a power cut."""
    handle = os.open(str(folder), os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
