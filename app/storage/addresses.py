"""URLs of buckets, of data sets on the Hub and of files on web servers.

Most of app carries a folder as a `Path`: it joins, compares and shows it, and hands it to `storage.at`. A `Path` writes
two slashes as one, so `Path("s3://b/x")` is `s3:/b/x`; all else of the URL survives in it, through `/`, `.parent` and
`.name` too. So a URL is known here by its scheme and *one* slash or two, and storages show it with two. The price: a
local folder that is really called `s3:` can be given by its absolute path alone. (A class of its own below `Path` would
keep both slashes, but Python 3.12 compares paths by their text and 3.11 by their parts: of two equal places, one with a
slash less, only one of the two would say so.)
"""

import posixpath
import re
from pathlib import PurePath
from typing import NamedTuple
from urllib.parse import unquote

from app.errors import UserError

BUCKETS = ("s3", "gs", "az")
"""The schemes of what is written too."""
_URL = re.compile(r"(s3|gs|az|hf|https?):/{1,2}([^/]*)(.*)", re.DOTALL)


class Address(NamedTuple):
    """A URL in parts. Its key has neither a slash at its ends nor `..` in it."""

    scheme: str
    bucket: str
    """For http and https: the server; for hf: datasets."""
    key: str

    def __str__(self) -> str:
        return f"{self.root}/{self.key}".rstrip("/")

    @property
    def root(self) -> str:
        """The URL of the bucket."""
        return f"{self.scheme}://{self.bucket}"


def address(place: PurePath | str) -> Address | None:
    """Return the parts of a URL, also of one that a `Path` has taken a slash from; None for a local path.

    Raises:
        UserError: it has a password, a query or `..` in it, or names no bucket.
    """
    match = _URL.fullmatch(str(place))
    if match is None:
        return None
    scheme, bucket, rest = match.groups()
    if scheme.startswith("http"):
        rest = unquote(rest)
    # Neither is shown: what stands there is often secret.
    if "@" in bucket:
        raise UserError(f"a URL of {scheme} has a name or a password before its host: give them in the environment")
    if scheme.startswith("http") and re.search(r"[?#]", match[3]):
        raise UserError(f"a URL of {bucket} has a query or a fragment, from `?` or `#` on: give it without")
    if not bucket:
        raise UserError(f"{scheme}:// names no bucket: give {scheme}://BUCKET/FOLDER")
    key = posixpath.normpath(rest.strip("/") or ".")
    if ".." in rest.split("/"):
        raise UserError(f"{scheme}://{bucket}{rest} has `..` in it: give the folder that is meant")
    if scheme == "hf" and (bucket != "datasets" or "/" not in key):
        raise UserError(f"hf://{bucket}{rest}: of the Hub, data sets are read: give hf://datasets/ORG/NAME/FOLDER")
    return Address(scheme, bucket, "" if key == "." else key)
