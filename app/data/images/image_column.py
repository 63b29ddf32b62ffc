"""A table's column of images: files of some format, stored in the table or named by path, read one by one."""

import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from app.data.cache import using_cache
from app.data.images import pictures
from app.data.reading import reading
from app.data.tables.columns import check_columns, held, is_text, row_name
from app.errors import UserError
from app.sampling.hashing import key_of

if TYPE_CHECKING:
    from datasets import Dataset
    from PIL.Image import Image

PATHS_AT_ONCE = 512


class ImageColumn:
    """The images of a table."""

    def __init__(self, table: "Dataset", name: str, mode: str = "RGB"):
        """Open a column.

        Args:
            mode: the mode of PIL that images are converted to.
        """
        import datasets
        import pyarrow.types as types

        check_columns(table, [name], "image")
        kind = table.data.schema.field(name).type
        struct = types.is_struct(kind) and {field.name for field in kind} & {"bytes", "path"}
        if not (struct or is_text(kind) or types.is_binary(kind) or types.is_large_binary(kind)):
            have = ", ".join(table.column_names)
            raise UserError(f"--data.image {name} of {held(table, name)}, no images; its columns are {have}")
        self.table, self.name, self.mode = table, name, mode
        with using_cache():
            self._files = table.select_columns([name]).cast_column(name, datasets.Image(decode=False))

    def __len__(self) -> int:
        return len(self.table)

    def identity(self) -> str:
        """Hash what decides the images: the table, and the size and time of the files whose paths it holds.

        A file that is not on this machine's file system, such as one on the web, counts by its path alone.
        """
        import pyarrow.compute as pc

        parts = self._files.flatten()
        elsewhere = pc.is_null(parts.data.column(f"{self.name}.bytes"))
        if parts._indices is not None:  # this is a selection of its table
            elsewhere = elsewhere.take(parts._indices.column(0))
        column = parts.select_columns([f"{self.name}.path"]).with_format("arrow")[:].column(0)
        paths = column.filter(elsewhere).drop_null().to_pylist()
        some = (paths[start : start + PATHS_AT_ONCE] for start in range(0, len(paths), PATHS_AT_ONCE))
        with ThreadPoolExecutor() as pool:  # a network's disk answers many at a time
            states = pool.map(lambda block: [_state_of(path) for path in block], some)
            return key_of(self.table._fingerprint, *states)

    def read(self, row: int) -> "Image":
        """Return an image, turned as its camera says, and on white where it is transparent.

        Raises:
            UserError: it is missing or cannot be read; the message names the file.
        """
        source, name, advice = self._source(row)
        image = pictures.read_picture(source, f"--data.image {self.name}:", name, advice)
        if image.mode[0] in "IF":  # PIL would cut values off at 255
            raise UserError(
                f"--data.image {self.name}: {name} has more than 8 bits a channel (mode {image.mode}): convert it to 8"
            )
        return image.convert(self.mode)

    def path(self, row: int) -> str:
        """Return the name of an image's file as the table has it; empty if it has none."""
        row_files = self._files[row]
        return str((row_files.get("file") or (row_files[self.name] or {}).get("path")) or "")

    def size(self, row: int) -> tuple[int, int]:
        """Return width and height of an image, turned as its camera says, from its header alone.

        Raises:
            UserError: as `read`.
        """
        source, name, advice = self._source(row)
        return pictures.size_of(source, f"--data.image {self.name}:", name, advice)

    def turn(self, row: int) -> str:
        """Say how an image is turned when it is read, in a clause for messages; nothing if it is not."""
        return pictures.turn_of(self._source(row)[0])

    def _source(self, row: int) -> tuple[pictures.Source, str, str]:
        """Return the file of a row or what stands in it, its name for errors, and what can be done about them."""
        file = self._files[row][self.name]
        name, advice = row_name(self.table, row), "repair it, or leave it out of the data"
        if file is None or (file["bytes"] is None and file["path"] is None):
            raise UserError(f"--data.image {self.name}: {name} has no image; leave such rows out of the data")
        path = file["path"]
        name += f" ({path})" if path else ""
        if file["bytes"] is not None:
            return file["bytes"], name, advice
        if _is_elsewhere(path):
            return self._fetched(path, name, advice), name, advice
        from_reader = "places" in self.table.column_names  # by a reader of boxes, and not named in the table
        if not os.path.isabs(path) and not from_reader and not os.path.exists(path):
            advice = f"paths in a table are relative to the current folder, {os.getcwd()}; {advice}"
        return path, name, advice

    def _fetched(self, address: str, name: str, advice: str) -> bytes:
        """Fetch an image from the web or the Hub, as datasets does, with the user's token where one is needed."""
        from datasets.utils.file_utils import xopen

        with reading(f"--data.image {self.name}:", name, Exception, advice=advice), xopen(address, "rb") as stream:
            return stream.read()


def _is_elsewhere(path: str) -> bool:
    """Tell whether a path is an address, or of a file inside an archive."""
    return "://" in path


def _state_of(path: str) -> tuple:
    """Return the path, size and time of change of a file; the path alone if there is no such file."""
    try:
        status = os.stat(path)
    except OSError:
        return (path,)
    return os.path.abspath(path), status.st_size, status.st_mtime_ns
