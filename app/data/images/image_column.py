"""A table's column of images: files of some format, stored in the table or named by path, read one by one."""

import io
import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from app.data.cache import using_cache
from app.data.tables.columns import check_columns, held, is_text, row_name
from app.errors import UserError
from app.sampling.hashing import key_of

if TYPE_CHECKING:
    from datasets import Dataset
    from PIL.Image import Image

PATHS_AT_ONCE = 512
# The tag in which a camera notes how it was held; with these values, height and width change places.
ORIENTATION, TURNED = 0x0112, (5, 6, 7, 8)


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
        self._reader = datasets.Image()

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
        """Return an image, turned as its camera says.

        Raises:
            UserError: it is missing or cannot be read; the message names the file.
        """
        file = self._files[row][self.name]
        what = f"--data.image {self.name}: {row_name(self.table, row)}"
        if file is None or (file["bytes"] is None and file["path"] is None):
            raise UserError(f"{what} has no image; leave such rows out of the data")
        what += f" ({file['path']})" if file["path"] else ""
        try:
            image = self._reader.decode_example(file)
        except Exception as error:  # the readers of the many formats raise errors of any type
            reason = " ".join(str(error).split())
            found = "places" in self.table.column_names  # by a reader of boxes, and not named in the table
            relative = file["path"] and not os.path.isabs(file["path"]) and not found
            if isinstance(error, FileNotFoundError) and relative:
                reason += f" (paths in a table are relative to the current folder, {os.getcwd()})"
            raise UserError(f"{what} cannot be read: {reason}; repair it, or leave it out of the data") from error
        if image.mode[0] in "IF":  # PIL would cut values off at 255
            raise UserError(f"{what} has more than 8 bits a channel (mode {image.mode}): convert it to 8")
        return image.convert(self.mode)

    def size(self, row: int) -> tuple[int, int]:
        """Return width and height of an image, turned as its camera says, from its header alone.

        Raises:
            UserError: as `read`.
        """
        from PIL import Image

        file = self._files[row][self.name]
        try:
            with Image.open(io.BytesIO(file["bytes"]) if file["bytes"] is not None else file["path"]) as image:
                turned = image.getexif().get(ORIENTATION) in TURNED
                return (image.height, image.width) if turned else image.size
        except Exception:  # no local file, or none that can be read, which `read` explains
            return self.read(row).size


def _state_of(path: str) -> tuple:
    """Return the path, size and time of change of a file; the path alone if there is no such file."""
    try:
        status = os.stat(path)
    except OSError:
        return (path,)
    return os.path.abspath(path), status.st_size, status.st_mtime_ns
