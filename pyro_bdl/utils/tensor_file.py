"""Trees of tensors, numbers and strings in one file that holds no code.

The file is a safetensors file. Its tensors are the tree's, numbered; its metadata hold the tree as
JSON, the kind of file and a checksum. Reading it never runs anything that is in it.
"""

import json
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from pyro_bdl.utils.files import atomic_write
from pyro_bdl.utils.validation import as_path

_VERSION = "1"
_PLAIN = (bool, int, float, str, type(None))


def save_tree(path: str | Path, tree: Any, *, kind: str) -> Path:
    """Write a tree atomically: a crash at any moment leaves the former file as it was.

    :param tree: dicts, lists and tuples of tensors, numpy arrays, numbers, strings and None.
    :param kind: what the file is, checked by ``load_tree``.
    :raises TypeError: for another object in the tree, with the place where it is.
    """
    path = as_path(path)
    tensors: list[Tensor] = []
    text = json.dumps(_encoded(tree, tensors, "the state"))
    stored = {str(n): t.detach().cpu().contiguous().clone() for n, t in enumerate(tensors)}
    header = {"version": _VERSION, "kind": kind, "tree": text, "checksum": _checksum(text, stored)}
    with atomic_write(path) as part:
        save_file(stored, str(part), header)
    return path


def load_tree(path: str | Path, *, kind: str) -> Any:
    """Read a tree that ``save_tree`` wrote; its tensors are on the CPU.

    :raises FileNotFoundError: if there is no such file.
    :raises ValueError: for a file of another kind, or a damaged one.
    """
    path = as_path(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no file '{path}'")
    try:
        with safe_open(str(path), framework="pt") as file:
            header = file.metadata() or {}
            stored = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        if header.get("version") != _VERSION or header.get("kind") != kind:
            raise ValueError(
                f"it is {header.get('kind', 'another file')}, version {header.get('version', '?')}"
            )
        if header["checksum"] != _checksum(header["tree"], stored):
            raise ValueError("its checksum is wrong")
        return _decoded(json.loads(header["tree"]), stored)
    except Exception as error:  # any error: the file may be anything
        raise ValueError(
            f"'{path}' is no {kind} that this version wrote, or is damaged "
            f"({type(error).__name__}: {error})"
        ) from error


def kind_of_file(path: str | Path) -> str | None:
    """The kind that ``save_tree`` was given; None for another file."""
    path = as_path(path)
    try:
        with safe_open(str(path), framework="pt") as file:
            return (file.metadata() or {}).get("kind")
    except Exception:  # any error: the file may be anything
        return None


def _checksum(text: str, tensors: Mapping[str, Tensor]) -> str:
    total = zlib.crc32(text.encode())
    for name in sorted(tensors):
        flat: Any = tensors[name].reshape(-1)
        total = zlib.crc32(flat.view(torch.uint8).numpy() if len(flat) else b"", total)
    return str(total)


def _encoded(value: Any, tensors: list[Tensor], where: str) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, Tensor):
        tensors.append(value)
        return {"tensor": str(len(tensors) - 1)}
    if isinstance(value, np.ndarray):
        tensors.append(torch.from_numpy(np.ascontiguousarray(value)))
        return {"array": str(len(tensors) - 1)}
    if isinstance(value, Mapping):
        pairs = [
            [_encoded(key, tensors, where), _encoded(item, tensors, f"{where}[{key!r}]")]
            for key, item in value.items()
        ]
        return {"dict": pairs}
    if isinstance(value, list | tuple):
        items = [_encoded(item, tensors, f"{where}[{n}]") for n, item in enumerate(value)]
        return {"tuple" if isinstance(value, tuple) else "list": items}
    raise TypeError(
        f"{where} is a {type(value).__name__}, and a file without code holds tensors, arrays, "
        "numbers, strings, lists, tuples and dicts only"
    )


def _decoded(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, _PLAIN):
        return value
    ((tag, content),) = value.items()
    return _READERS[tag](content, tensors)


def _items(content: list, tensors: Mapping[str, Tensor]) -> list:
    return [_decoded(item, tensors) for item in content]


_READERS: dict[str, Callable[[Any, Mapping[str, Tensor]], Any]] = {
    "tensor": lambda name, tensors: tensors[name],
    "array": lambda name, tensors: tensors[name].numpy(),
    "list": _items,
    "tuple": lambda content, tensors: tuple(_items(content, tensors)),
    "dict": lambda content, tensors: {
        _decoded(key, tensors): _decoded(item, tensors) for key, item in content
    },
}
