"""The documents at the top of the repository as pages of the site, and links between both that lead somewhere."""

import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
}
LINK = re.compile(r"(\]\()([^)#\s]+)")


def on_files(files, config):
    """Add the pages, and each file outside docs/ that a page shows."""
    for name, page in PAGES.items():
        files.append(File.generated(config, page, content=_with_links_of_site((ROOT / name).read_text(), name)))
    shown = {place for path in ROOT.glob("docs/*.md") for place in map(_asset, LINK.findall(path.read_text())) if place}
    for place in sorted(shown | {"LICENSE"}):
        files.append(File.generated(config, place, abs_src_path=str(ROOT / place)))
    return files


def on_page_markdown(markdown, page, config, files):
    """Lead links out of docs/ to the pages and files of the site."""
    return _with_links_of_site(markdown, f"docs/{page.file.src_path}")


def _asset(link: tuple[str, str]) -> str:
    """Return the path of a file that a page of docs/ links to and that is no page; empty for others."""
    place = link[1].removeprefix("../")
    return place if place != link[1] and place not in PAGES and (ROOT / place).is_file() else ""


def _with_links_of_site(markdown: str, name: str) -> str:
    def led(match: re.Match) -> str:
        place = match[2].removeprefix("../") if name.startswith("docs/") else match[2]
        return match[1] + PAGES.get(place, place.removeprefix("docs/"))

    return LINK.sub(led, markdown)
