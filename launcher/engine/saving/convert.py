"""The verb ``convert``: what needs torch to be written or read, in a process of its own beside the launcher.

``{kind: dcp, source, target}`` writes consolidated safetensors again as a torch.distributed.checkpoint;
``{kind: import, source, target, most_bytes}`` writes a plain torch state dict as safetensors. A state dict is
only ever read with ``weights_only=True``: nothing in it is run.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...contract.errors import NoSpace, UsageError
from ...contract.weights import INDEX, METADATA, TAGS, Stored, lay_out, read_weights
from ...contract.weights import Tensor as Laid
from .shardfile import as_bytes, dtype_of, tag_of

_WRAPPERS = ("state_dict", "model_state_dict", "model", "module")


def main() -> int:
    """One JSON object on stdin, one on stdout."""
    request = json.loads(sys.stdin.buffer.read())
    source, target = Path(request["source"]), Path(request["target"])
    if request["kind"] == "dcp":
        answer = to_dcp(source, target)
    else:
        answer = from_torch(source, target, int(request["most_bytes"]))
    sys.stdout.write(json.dumps(answer) + "\n")
    return 0


def to_dcp(source: Path, target: Path) -> dict[str, Any]:
    """``target``: a checkpoint that ``torch.distributed.checkpoint.load`` reads at any world size. The tensors
    are mapped from ``source``, not loaded: one at a time is in memory."""
    from torch.distributed.checkpoint.state_dict_saver import save

    maps: dict[Path, Tensor] = {}
    tensors = {name: mapped(stored, maps) for name, stored in read_weights(source).items()}
    save(tensors, checkpoint_id=str(target), no_dist=True)
    files = sorted(p.name for p in target.iterdir())
    return {"files": files, "bytes": sum((target / f).stat().st_size for f in files), "tensors": len(tensors)}


def mapped(stored: Stored, maps: dict[Path, Tensor]) -> Tensor:
    """The tensor over its file's bytes. ``maps`` keeps one mapping a file."""
    dtype = dtype_of(stored.tag)
    if stored.stop == stored.start:
        return torch.empty(stored.shape, dtype=dtype)
    if stored.file not in maps:
        maps[stored.file] = torch.from_file(str(stored.file), size=stored.file.stat().st_size, dtype=torch.uint8)
    data = maps[stored.file][stored.start : stored.stop]
    if stored.start % dtype.itemsize:
        data = data.clone()  # written elsewhere, without alignment
    return data.view(dtype).view(stored.shape)


def from_torch(source: Path, target: Path, most_bytes: int) -> dict[str, Any]:
    """Writes every tensor of the state dict in the file ``source`` into the folder ``target``, tied ones once."""
    named, prefix = _tensors_of(_load(source), source)
    tied: dict[str, str] = {}
    kept: dict[str, Tensor] = {}
    places: dict[tuple[object, ...], str] = {}
    for name, tensor in named.items():
        if tag_of(tensor.dtype) is None:
            raise UsageError(f"{source}: {name} is of {tensor.dtype}; known: {', '.join(TAGS)}")
        if tensor.layout != torch.strided or tensor.is_meta:
            what = "has no bytes (device meta)" if tensor.is_meta else f"is of the layout {tensor.layout}"
            raise UsageError(f"{source}: {name} {what}; only dense tensors are weights", hint="save them dense, on cpu")
        # With its strides: a square matrix and its transpose lie in the same bytes.
        seen = (tuple(tensor.shape), tensor.stride(), tensor.dtype)
        place = (tensor.untyped_storage().data_ptr(), int(tensor.storage_offset()), *seen)
        if tensor.numel() and place in places:
            tied[name] = places[place]
            continue
        places[place] = name
        kept[name] = tensor
    laid = [Laid(name, str(tag_of(t.dtype)), tuple(t.shape)) for name, t in kept.items()]
    files, index = lay_out(laid, most_bytes, tied)
    total, free = sum(f.size for f in files), shutil.disk_usage(target).free
    if total > free:  # views may be larger than the file that they came in
        raise NoSpace(f"{target.parent}: {source} comes to {total} bytes, {free} are free")
    for file in files:
        with open(target / file.name, "xb") as out:
            out.write(file.header)
            for entry in file.tensors:
                out.write(as_bytes(kept[entry.name].detach().contiguous()))
            out.flush()
            os.fsync(out.fileno())
    if index is not None:
        (target / INDEX).write_bytes(index)
    return {
        "files": [f.name for f in files],
        "bytes": total,
        "tensors": len(kept),
        "prefix": prefix,
    }


def _load(source: Path) -> Any:
    try:
        try:
            return torch.load(source, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:  # a file of before torch 1.6 cannot be mapped
            return torch.load(source, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise UsageError(f"{source} is not there") from error
    except Exception as error:  # unpickling raises what it likes; nothing of the file was run
        said = _said(error)
        raise UsageError(
            f"{source} cannot be read as plain tensors: {said}",
            hint="save model.state_dict() alone; classes of your own are not loaded, since that would run code",
        ) from error


def _said(error: Exception) -> str:
    """What is wrong, in a line, without torch's advice to run what the file holds."""
    text = str(error).strip()
    if "Weights only load failed" in text:
        told = re.search(r"Unsupported[^\n]*|GLOBAL [\w.]+|UnpicklingError: [^\n]*", text)
        return f"it holds more than tensors, or is damaged{f' ({told.group()})' if told else ''}"
    return text.splitlines()[0].partition(" In PyTorch 2.6")[0] if text else type(error).__name__


def _tensors_of(loaded: Any, source: Path) -> tuple[dict[str, Tensor], str]:
    found = loaded
    for _ in range(2):
        if isinstance(found, Mapping) and not any(isinstance(v, Tensor) for v in found.values()):
            found = next((found[key] for key in _WRAPPERS if key in found), found)
    if not isinstance(found, Mapping):
        raise UsageError(f"{source} holds a {type(loaded).__name__}, not a state dict (names to tensors)")
    odd = [str(name) for name, value in found.items() if not isinstance(value, Tensor)]
    if odd or not found:
        told = f"{odd[0]} is a {type(found[odd[0]]).__name__}" if odd and odd[0] in found else "it has no tensors"
        raise UsageError(f"{source} is no state dict: {told}", hint="save model.state_dict() alone")
    named = {str(name): value for name, value in found.items()}
    unfit = [name for name in named if name == METADATA or name != name.encode(errors="replace").decode()]
    if len(named) < len(found) or unfit:
        what = f"{unfit[0]!r} is no name" if unfit else "names are equal as text"
        raise UsageError(f"{source} is no state dict: {what}", hint="names are those of modules")
    for prefix in ("module.", "_orig_mod."):  # DistributedDataParallel, torch.compile
        if all(name.startswith(prefix) for name in named):
            return {name.removeprefix(prefix): value for name, value in named.items()}, prefix
    return named, ""
