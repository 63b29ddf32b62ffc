"""Hashes of contents: the same in every process and on every machine."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
import xxhash


def key_of(*parts: object) -> str:
    """Hash the text of all parts to 32 hexadecimal digits, a key for a cache; ("a", "b") differs from ("ab",)."""
    hasher = xxhash.xxh3_128()
    for part in parts:
        data = str(part).encode("utf-8", "surrogatepass")
        hasher.update(f"{len(data)}:".encode() + data)
    return hasher.hexdigest()


def hash_of_bytes(pieces: Iterable[np.ndarray | bytes], bits: int = 128) -> str:
    """Hash the bytes of all pieces, joined: the hash does not depend on how they are cut into pieces.

    Args:
        bits: of the hash, 64 or 128, which give 16 or 32 hexadecimal digits.
    """
    hasher = {64: xxhash.xxh3_64, 128: xxhash.xxh3_128}[bits]()
    for piece in pieces:
        if isinstance(piece, bytes):
            hasher.update(piece)
        else:
            hasher.update(np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data)
    return hasher.hexdigest()


def hash_of(value: Any) -> str:
    """Hash tensors, arrays, images, numbers and text by their bits, and collections of them; other objects by type."""
    hasher = xxhash.xxh3_64()
    _feed(hasher, value)
    return hasher.hexdigest()


def _feed(hasher: xxhash.xxh3_64, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1)
        _feed_bytes(hasher, f"tensor {value.dtype} {tuple(value.shape)}", flat.view(torch.uint8).numpy().data)
    elif isinstance(value, np.ndarray | np.generic) and value.dtype != object:
        _feed_bytes(hasher, f"array {value.dtype} {value.shape}", value.tobytes())
    elif hasattr(value, "mode") and hasattr(value, "tobytes"):  # a PIL image
        _feed_bytes(hasher, f"image {value.mode} {value.size}", value.tobytes())
    elif isinstance(value, str):
        _feed_bytes(hasher, "str", value.encode("utf-8", "surrogatepass"))
    elif isinstance(value, bytes | bytearray | memoryview):
        _feed_bytes(hasher, "bytes", bytes(value))
    elif value is None or isinstance(value, bool | int | float | complex):
        _feed_bytes(hasher, type(value).__name__, repr(value).encode())
    elif isinstance(value, Mapping):
        _feed_all(hasher, "dict", [part for item in value.items() for part in item])
    elif isinstance(value, list | tuple | np.ndarray):
        _feed_all(hasher, "list", list(value))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        _feed_all(hasher, type(value).__name__, [getattr(value, field.name) for field in dataclasses.fields(value)])
    else:
        _feed_bytes(hasher, "object", type(value).__qualname__.encode())


def _feed_all(hasher: xxhash.xxh3_64, kind: str, items: list) -> None:
    _feed_bytes(hasher, kind, str(len(items)).encode())
    for item in items:
        _feed(hasher, item)


def _feed_bytes(hasher: xxhash.xxh3_64, kind: str, data: bytes | memoryview) -> None:
    hasher.update(f"{kind} {len(data)}:".encode())
    hasher.update(data)
