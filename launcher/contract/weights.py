"""Files of weights: safetensors, in one file or in several with an index, as Hugging Face lays them out.

Headers alone are read here, so that a name, a shape or a byte range is known without loading anything; what
is written by us is laid out here too. Standard library only: the agent looks at a folder before a job
queues, the engine reads its ranges, the launcher writes exports.
"""

from __future__ import annotations

import json
import os
from math import prod
from pathlib import Path
from typing import Any, Dict, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple

from .errors import UsageError
from .partition import Parameter
from .plain import loads, open_file, read_file

TAGS = {
    "float64": "F64",
    "float32": "F32",
    "bfloat16": "BF16",
    "float16": "F16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
FLOATS = {name: TAGS[name] for name in ("float64", "float32", "bfloat16", "float16")}
TAG_BYTES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
METADATA = "__metadata__"
MOST_HEADER_BYTES = 100_000_000


class Stored(NamedTuple):
    """A tensor in a file: ``tag`` is safetensors' word for its dtype, bytes [``start``, ``stop``) of ``file``."""

    name: str
    tag: str
    shape: Tuple[int, ...]
    file: Path
    start: int
    stop: int

    @property
    def numel(self) -> int:
        return prod(self.shape)


def read_weights(path: Path) -> Dict[str, Stored]:
    """Every tensor of a file of safetensors, or of a folder of them, by name.

    Of a folder with an index that index counts; without one, all its ``*.safetensors``. Raises
    :class:`UsageError` saying which file is missing, short or no safetensors file.
    """
    found: Dict[str, Stored] = {}
    for file in _files_of(path):
        for name, stored in read_header(file)[0].items():
            if name in found:
                raise UsageError(f"weights {path}: {name} is both in {found[name].file.name} and in {file.name}")
            found[name] = stored
    return found


def _files_of(path: Path) -> List[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        hint = "a folder of *.safetensors, or one file: relative in the code that travels, absolute on the cluster"
        raise UsageError(f"weights {path}: there is no such file or folder", hint=hint)
    index = path / INDEX
    if index.is_file():
        try:
            named = loads(read_file(index))["weight_map"]
            names = sorted({str(name) for name in named.values()})
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(f"weights {index} cannot be read: {type(error).__name__}: {error}") from error
        if any(os.sep in name or name.startswith(".") for name in names):
            raise UsageError(f"weights {index} names files outside its folder")
        lacking = [name for name in names if not (path / name).is_file()]
        if lacking:
            raise UsageError(f"weights {path}: {', '.join(lacking[:3])} of {INDEX} is missing")
        return [path / name for name in names]
    files = sorted(path.glob("*.safetensors"))
    if not files:
        torch_files = sorted(p.name for p in path.iterdir() if p.suffix in (".bin", ".pt", ".pth"))
        told = f" (only {', '.join(torch_files[:3])})" if torch_files else ""
        raise UsageError(
            f"weights {path}: no *.safetensors there{told}",
            hint="zerun ckpt import FILE --to FOLDER makes them of a plain torch state dict",
        )
    return files


def read_header(file: Path) -> Tuple[Dict[str, Stored], Dict[str, str]]:
    """The tensors of one file, and its ``__metadata__``. Raises :class:`UsageError` for anything else."""
    try:
        with open_file(file) as opened:
            size = os.fstat(opened.fileno()).st_size
            length = int.from_bytes(opened.read(8), "little")
            if length > min(MOST_HEADER_BYTES, size - 8):
                raise ValueError("it has no header of safetensors")
            header = loads(opened.read(length))
        if not isinstance(header, dict):
            raise ValueError("its header is no mapping of names")
        metadata = {str(k): str(v) for k, v in dict(header.pop(METADATA, {})).items()}
        found = {str(n): _stored(str(n), about, file, 8 + length, size) for n, about in header.items()}
        _refuse_overlap(found)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"weights {file} cannot be read: {error}", hint="is it whole, and safetensors?") from error
    return found, metadata


def _stored(name: str, about: Mapping[str, Any], file: Path, base: int, size: int) -> Stored:
    tag, shape, (start, stop) = str(about["dtype"]), tuple(about["shape"]), about["data_offsets"]
    if any(type(n) is not int for n in (*shape, start, stop)):
        raise ValueError(f"{name}: its shape and offsets are no whole numbers")
    if tag not in TAG_BYTES:
        raise ValueError(f"{name} is of {tag}; known: {', '.join(TAG_BYTES)}")
    if start < 0 or min(shape, default=0) < 0 or stop - start != prod(shape) * TAG_BYTES[tag]:
        raise ValueError(f"{name}: bytes {start} to {stop} are not {list(shape)} of {tag}")
    if base + stop > size:
        raise ValueError(f"it ends at byte {size}, {name} at {base + stop}: it is not whole")
    return Stored(name, tag, shape, file, base + start, base + stop)


def _refuse_overlap(found: Mapping[str, Stored]) -> None:
    last: Optional[Stored] = None
    for stored in sorted(found.values(), key=lambda s: (s.start, s.stop)):
        if last is not None and stored.start < last.stop and stored.numel:
            raise ValueError(f"the bytes of {last.name} and {stored.name} overlap")
        last = stored if last is None or stored.stop > last.stop else last


class Misfit(NamedTuple):
    """A name that is ``missing`` there, ``unexpected``, of another ``shape``, of no float ``dtype``, or a ``buffer`` of
    another kind of number."""

    kind: str
    name: str
    ours: Tuple[int, ...] = ()
    theirs: Tuple[int, ...] = ()
    tag: str = ""

    def sentence(self) -> str:
        if self.kind == "dtype":
            return f"dtype       {self.name}: {self.tag} there, floating point in the model (quantized weights?)"
        if self.kind == "shape":
            return f"shape       {self.name}: {list(self.theirs)} there, {list(self.ours)} in the model"
        return f"{self.kind:<11} {self.name}{f': {self.tag}' if self.tag else ''}"


def misfits(
    parameters: Iterable[Parameter], buffers: Mapping[str, Tuple[int, ...]], stored: Mapping[str, Stored]
) -> List[Misfit]:
    """All names that keep ``stored`` from being the weights of a model. A tied parameter may be under any of its
    names; buffers (name → shape) may be missing."""
    missing = []
    shapes: Dict[str, Tuple[int, ...]] = {}  # in the model's order, which a reader knows
    floats: Set[str] = set()
    for parameter in parameters:
        names = (parameter.name, *parameter.tied)
        shapes.update({name: parameter.shape for name in names})
        floats.update(names if parameter.dtype in FLOATS else ())
        if not any(name in stored for name in names):
            missing.append(Misfit("missing", parameter.name))
    shapes.update(buffers)
    both = [name for name in shapes if name in stored]
    unlike = [Misfit("shape", n, shapes[n], stored[n].shape) for n in both if stored[n].shape != shapes[n]]
    whole = [n for n in both if n in floats and stored[n].tag not in FLOATS.values()]
    unlike += [Misfit("dtype", n, tag=stored[n].tag) for n in whole]
    return [*missing, *unlike, *(Misfit("unexpected", name) for name in sorted(stored) if name not in shapes)]


# --- laying files out -------------------------------------------------------------------------------------


class Tensor(NamedTuple):
    """What a file is to hold."""

    name: str
    tag: str
    shape: Tuple[int, ...]

    @property
    def bytes(self) -> int:
        return prod(self.shape) * TAG_BYTES[self.tag]


class File(NamedTuple):
    """A file laid out: its header, and where the bytes of each tensor begin."""

    name: str
    header: bytes
    tensors: Tuple[Tensor, ...]
    starts: Tuple[int, ...]
    size: int


def lay_out(
    tensors: Sequence[Tensor], most_bytes: int, tied: Optional[Mapping[str, str]] = None
) -> Tuple[List[File], Optional[bytes]]:
    """The files of at most ``most_bytes`` of tensors each (one that is larger has a file of its own), and the
    index that names them where there are several. ``tied`` (other name → name) goes into the metadata, as
    safetensors' own ``save_model`` does it."""
    groups: List[List[Tensor]] = [[]]
    filled = 0
    for tensor in tensors:
        if groups[-1] and filled + tensor.bytes > most_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(tensor)
        filled += tensor.bytes
    count = len(groups)
    names = [SINGLE] if count == 1 else [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    files = [_file(name, group, tied or {}) for name, group in zip(names, groups)]
    if count == 1:
        return files, None
    total = sum(t.bytes for t in tensors)
    places = {t.name: file.name for file in files for t in file.tensors}
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    return files, (json.dumps(index, indent=2) + "\n").encode()


def _file(name: str, tensors: Iterable[Tensor], tied: Mapping[str, str]) -> File:
    # As safetensors does: wide items first, so that each begins at a multiple of its size.
    ordered = tuple(sorted(tensors, key=lambda t: (-TAG_BYTES[t.tag], t.name)))
    here = {t.name for t in ordered}
    header: Dict[str, Any] = {METADATA: {**{k: v for k, v in tied.items() if v in here}, "format": "pt"}}
    offsets, at = [], 0
    for tensor in ordered:
        offsets.append(at)
        stop = at + tensor.bytes
        header[tensor.name] = {"dtype": tensor.tag, "shape": list(tensor.shape), "data_offsets": [at, stop]}
        at = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    data = len(text).to_bytes(8, "little") + text
    return File(name, data, ordered, tuple(len(data) + offset for offset in offsets), len(data) + at)
