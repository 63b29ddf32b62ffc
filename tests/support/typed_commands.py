"""The command lines that stand in the documents."""

import re
import shlex

from support.launching import ROOT

TOP = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
DOCUMENTS = [*TOP, *sorted((ROOT / "docs").glob("*.md"))]


def commands() -> list[tuple[str, list[str]]]:
    """List every command line of every block for a shell, with its document."""
    found = []
    for document in DOCUMENTS:
        for block in re.findall(r"```bash\n(.*?)```", document.read_text(), re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                if words:
                    found.append((document.name, words))
    return found


COMMANDS = commands()


def named(words: list[str]) -> str:
    """Name a test by the command that it types."""
    return " ".join(words)[:60]


RECIPES = [(d, w) for d, w in COMMANDS if any(word.startswith("recipes/") for word in w) and "app" not in w]
APP = [(d, w[w.index("app") + 1 :]) for d, w in COMMANDS if w[:3] == ["python", "-m", "app"] and len(w) > 3]
