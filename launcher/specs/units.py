"""Text with a unit → an exact number, and back.

Bytes and bytes a second are integers; durations are whole seconds. Every parser takes the text as it
was typed and raises ``ValueError`` with words for the person who typed it.

Two kinds of time, told apart by the key they stand under:

- ``time`` and ``time_max`` take **Slurm's forms** (``minutes``, ``M:S``, ``H:M:S``, ``D-H``, ``D-H:M``,
  ``D-H:M:S``; a bare ``30`` is thirty *minutes*, as Slurm means it) and the suffix forms: :func:`slurm_time`.
- every other duration (``checkpoint.every``, ``stop_grace``) takes the suffix forms alone (``90s``, ``30min``,
  ``2h``, ``1d``, ``1h30min``); a bare number there would be a guess and is refused: :func:`duration`.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Final

_NUMBER = r"(\d+(?:\.\d+)?)"
_AMOUNT = re.compile(_NUMBER + r"\s?([A-Za-z][A-Za-z/]*)?", re.ASCII)

_DECIMAL: Final = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
_BINARY: Final = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50}
BYTE_UNITS: Final = {f"{p}B": n for p, n in {**_DECIMAL, **_BINARY}.items()}
_BIT_RATES: Final = {f"{p}{s}": n for p, n in _DECIMAL.items() for s in ("bps", "b/s", "bit/s")}
_BYTE_RATES: Final = {f"{u}/s": n for u, n in BYTE_UNITS.items()}
_SECONDS: Final = {"s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}

_BYTES_ACCEPTED: Final = "accepted: 32GB (10⁹ bytes), 32GiB (2³⁰ bytes), 512MiB, 25MB, or a plain number of bytes"
_RATE_ACCEPTED: Final = "accepted: 800Gbps (bits), 300GB/s or 300GiB/s (bytes)"
_DURATION_ACCEPTED: Final = "accepted: 90s, 30min, 2h, 1d, 1h30min"
_SLURM_ACCEPTED: Final = (
    "accepted: H:M:S, M:S, D-H, D-H:M, D-H:M:S or minutes as in Slurm (a bare 30 is 30 minutes), or 90s, 30min, 2h"
)


def _split(text: str, accepted: str) -> tuple[Fraction, str]:
    match = _AMOUNT.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not an amount with a unit; {accepted}")
    return Fraction(match[1]), match[2] or ""


def _whole(amount: Fraction, text: str, what: str) -> int:
    if amount.denominator != 1:
        raise ValueError(f"{text!r} is not a whole number of {what}")
    return int(amount)


def parse_bytes(text: str) -> int:
    """``32GB`` → 32·10⁹, ``32GiB`` → 32·2³⁰, ``123B`` or ``123`` → 123."""
    number, unit = _split(text, _BYTES_ACCEPTED)
    if unit in BYTE_UNITS or unit == "":
        return _whole(number * BYTE_UNITS.get(unit or "B", 1), text, "bytes")
    raise ValueError(f"{_unit_complaint(text, unit, 'bytes')}; {_BYTES_ACCEPTED}")


def _unit_complaint(text: str, unit: str, what: str) -> str:
    bare = unit.removesuffix("/s")
    if re.fullmatch(r"[kKMGTP]?b(it)?s?(ps)?", bare):
        return f"{text!r} is in bits" + ("" if what == "bytes" else " without 'a second'")
    letter = bare[:1].upper()
    if letter in _DECIMAL and bare.lower() in {letter.lower(), f"{letter.lower()}b", f"{letter.lower()}ib"}:
        stem = text.strip()[: -len(unit)].strip()
        end = "/s" if what == "bytes a second" else ""
        return f"{text!r} does not say which unit; did you mean {stem}{letter}B{end} or {stem}{letter}iB{end}"
    return f"{text!r}: {unit!r} is not a unit of {what}"


def parse_rate(text: str) -> int:
    """Bytes a second: ``800Gbps`` → 10¹¹, ``300GB/s`` → 3·10¹¹."""
    number, unit = _split(text, _RATE_ACCEPTED)
    if unit in _BIT_RATES:
        return _whole(number * _BIT_RATES[unit] / 8, text, "bytes a second")
    if unit in _BYTE_RATES:
        return _whole(number * _BYTE_RATES[unit], text, "bytes a second")
    if unit == "":
        raise ValueError(f"{text!r} has no unit; {_RATE_ACCEPTED}")
    raise ValueError(f"{_unit_complaint(text, unit, 'bytes a second')}; {_RATE_ACCEPTED}")


def parse_flops(text: str) -> int:
    """FLOP/s: ``312T`` → 312·10¹²; ``TFLOPS`` and ``TFLOP/s`` are accepted too."""
    accepted = "accepted: 312T, 15.7T, 1P (FLOP/s)"
    number, unit = _split(text, accepted)
    prefix = re.sub(r"(?i)flops?(/s)?$", "", unit)
    if prefix not in _DECIMAL:
        raise ValueError(f"{text!r}: {unit!r} is not a unit of FLOP/s; {accepted}")
    return _whole(number * _DECIMAL[prefix], text, "FLOP/s")


def duration(text: str) -> int:
    """Seconds of ``90s``, ``30min``, ``2h``, ``1d``, ``1h30min``; a bare number is refused."""
    stripped = text.strip()
    parts = re.findall(_NUMBER + r"\s?([a-z]+)\s?", stripped)
    if re.fullmatch(r"\d+(\.\d+)?", stripped):
        raise ValueError(f"{text!r} has no unit; {_DURATION_ACCEPTED}")
    if not parts or not re.fullmatch(rf"(?:{_NUMBER}\s?[a-z]+\s?)+", stripped):
        raise ValueError(f"{text!r} is not a duration; {_DURATION_ACCEPTED}")
    total, last = Fraction(0), None
    for number, unit in parts:
        size = _SECONDS.get(unit)
        if size is None:
            raise ValueError(f"{text!r}: {unit!r} is not a unit of time; {_DURATION_ACCEPTED}")
        if last is not None and size >= last:
            raise ValueError(f"{text!r}: units must go from long to short; {_DURATION_ACCEPTED}")
        total, last = total + Fraction(number) * size, size
    return _whole(total, text, "seconds")


_SLURM = re.compile(
    r"(?:(?P<d>\d+)-(?P<dh>\d+)(?::(?P<dm>\d+)(?::(?P<ds>\d+))?)?"
    r"|(?P<h>\d+):(?P<hm>\d+):(?P<hs>\d+)"
    r"|(?P<m>\d+)(?::(?P<ms>\d+))?)",
    re.ASCII,
)


def slurm_time(text: str) -> int:
    """Seconds of a Slurm time (``30`` is 30 minutes, ``1:30`` is 90 s, ``1-0`` a day) or of a suffix form."""
    stripped = text.strip()
    if re.search(r"[a-z]", stripped):
        try:
            return duration(stripped)
        except ValueError as problem:
            said = str(problem).replace("a duration", "a time").replace(_DURATION_ACCEPTED, _SLURM_ACCEPTED)
            raise ValueError(said) from None
    match = _SLURM.fullmatch(stripped)
    if match is None:
        raise ValueError(f"{text!r} is not a time; {_SLURM_ACCEPTED}")
    days, hours, minutes, seconds = (
        sum(int(match[name] or 0) for name in names)
        for names in (("d",), ("dh", "h"), ("dm", "hm", "m"), ("ds", "hs", "ms"))
    )
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def port_range(text: str) -> tuple[int, int]:
    """``20000-29999``, both ends included."""
    match = re.fullmatch(r"(\d{1,5})-(\d{1,5})", text.strip(), re.ASCII)
    if match is None:
        raise ValueError(f"{text!r} is not a range of ports; accepted: 20000-29999")
    first, last = int(match[1]), int(match[2])
    if not 1024 <= first <= last <= 65535:
        raise ValueError(f"{text!r}: ports go upward from 1024 to 65535")
    return first, last


# --- back to text ---------------------------------------------------------------------------------


def format_slurm_time(seconds: int) -> str:
    """Slurm's ``D-HH:MM:SS``; without days ``HH:MM:SS``. :func:`slurm_time` reads it back exactly."""
    if seconds < 0:
        raise ValueError(f"a time cannot be negative: {seconds} s")
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    clock = f"{hour:02d}:{minute:02d}:{second:02d}"
    return f"{days}-{clock}" if days else clock


def format_duration(seconds: int) -> str:
    """``90061`` → ``1d1h1min1s``; :func:`duration` reads it back exactly."""
    if seconds < 0:
        raise ValueError(f"a duration cannot be negative: {seconds} s")
    words, rest = [], int(seconds)
    for unit in ("d", "h", "min", "s"):
        count, rest = divmod(rest, _SECONDS[unit])
        if count:
            words.append(f"{count}{unit}")
    return "".join(words) or "0s"


def _human(amount: float, base: int, units: tuple[str, ...]) -> str:
    place = 0
    while amount >= base - 0.5 and place < len(units) - 1:
        amount, place = amount / base, place + 1
    if place == 0:
        return f"{amount:.0f} {units[0]}"
    digits = 2 if amount < 9.995 else 1 if amount < 99.95 else 0
    return f"{amount:.{digits}f} {units[place]}"


def format_bytes(num_bytes: int, *, binary: bool = True) -> str:
    """For people, rounded to three digits: ``31.7 GiB``, or with ``binary=False`` ``34.1 GB``."""
    if num_bytes < 0:
        return "-" + format_bytes(-num_bytes, binary=binary)
    if binary:
        return _human(num_bytes, 1024, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"))
    return _human(num_bytes, 1000, ("B", "kB", "MB", "GB", "TB", "PB"))


def format_rate(bytes_per_s: float) -> str:
    """For people: ``100 GB/s``."""
    return _human(bytes_per_s, 1000, ("B/s", "kB/s", "MB/s", "GB/s", "TB/s", "PB/s"))


def slurm_clock(seconds: int) -> str:
    """``D-HH:MM:SS`` with the days left out where there are none."""
    days, rest = divmod(seconds, 86_400)
    clock = f"{rest // 3600:02d}:{rest // 60 % 60:02d}:{rest % 60:02d}"
    return f"{days}-{clock}" if days else clock
