"""Where the image is that a file of boxes names: tools write paths of the machine, or the site, where they ran."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import unquote, urlsplit

from app.data.boxes.files import is_image


class ImageFiles:
    """The images in some folders, found by the names that files of boxes give them."""

    def __init__(self, folders: Sequence[Path]):
        """Look in these folders, the first one first."""
        self.folders = list(dict.fromkeys(folders))
        self._places: dict[Path, str] = {}  # what named each image that was found
        self._dropped: tuple[str, ...] | None = None  # folders that stand before each name, and are not here
        self._stems: dict[Path, dict[str, list[Path]]] = {}

    def find(self, name: str, place: str) -> Path:
        """Return the image that `place` calls `name`: as it is, or without the folders that all names begin with.

        Raises:
            ValueError: it is in none of the folders.
        """
        for dropped, path in _readings(name):
            may_be = self._dropped in (None, dropped) or not dropped
            if may_be and (image := self._at(path)) is not None:
                self._dropped = dropped or self._dropped
                return image
        looked = ", ".join(map(str, self.folders))
        namesake = next((file for _, path in _readings(name) if (file := self._at(path)) is not None), None)
        where = f"; {namesake} has its name, but images before it have other folders to leave out" if namesake else ""
        raise ValueError(f"{place}, {name}, is in none of {looked}: put it into one of them{where}")

    def named(self, name: str) -> Path | None:
        """Return the image of this name, which may lack its extension."""
        plain = name.replace("\\", "/").rpartition("/")[2]
        return (self._at(Path(plain)) if plain else None) or (self.of_stem(plain) if not is_image(plain) else None)

    def of_stem(self, stem: str) -> Path | None:
        """Return the image whose name before the extension is this one.

        Raises:
            ValueError: there are several.
        """
        for folder in self.folders:
            if folder not in self._stems:
                self._stems[folder] = _by_stem(folder)
            if images := self._stems[folder].get(stem):
                image, *others = images
                if others:
                    raise ValueError(f"{image} and {others[0].name} share one name, and so one file of boxes: rename")
                return image
        return None

    def once(self, image: Path, place: str) -> Path:
        """Return an image, which only one place may be for: each of two would lack the other one's boxes.

        Raises:
            ValueError: another place is for this image.
        """
        first = self._places.setdefault(image, place)
        if first != place:
            raise ValueError(f"{first} and {place} are both for {image}: join their boxes, or give each its own image")
        return image

    def _at(self, path: Path) -> Path | None:
        """Look for a path; the folder that has it is moved to the front, for the next one."""
        for index, folder in enumerate(self.folders):
            if (folder / path).is_file():
                self.folders.insert(0, self.folders.pop(index))
                return folder / path
        return None


def _readings(name: str) -> Iterator[tuple[tuple[str, ...], Path]]:
    """Yield a name as a path, and then without more and more of its leading folders; and what was left out."""
    yield (), Path(name)
    path = unquote(urlsplit(name).path) if "://" in name else name.replace("\\", "/")
    parts = [part for part in path.split("/") if part not in ("", ".", "..") and not part.endswith(":")]
    for index in range(len(parts)):
        yield tuple(parts[:index]), Path(*parts[index:])


def _by_stem(folder: Path) -> dict[str, list[Path]]:
    images_by_stem: dict[str, list[Path]] = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if is_image(path.name) and path.is_file():
            images_by_stem.setdefault(path.stem, []).append(path)
    return images_by_stem
