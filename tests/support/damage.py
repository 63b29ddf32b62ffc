"""What may become of a file: by a crash, a disk, or a hand."""

from pathlib import Path

# How a file may be found after a crash, by a change of its contents.
DAMAGE = {
    "missing": lambda path: path.unlink(),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-3]),
    "emptied": lambda path: path.write_bytes(b""),
    "zeroed": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "flipped": lambda path: path.write_bytes(flip(path.read_bytes(), 0)),
    "flipped inside": lambda path: path.write_bytes(flip(path.read_bytes(), path.stat().st_size // 2)),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
}


def flip(data: bytes, place: int, bit: int = 0) -> bytes:
    return data[:place] + bytes([data[place] ^ 1 << bit]) + data[place + 1 :] if data else b"\1"


def contents(folder: Path) -> dict[Path, bytes]:
    """Read all files of a folder but its lock."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != "lock"}
