"""Run a recipe several times in one process: a launch costs seconds.

many.py RECIPE FILE, where FILE holds a JSON list with the flags of each time.
"""

import importlib.util
import json
import sys
from pathlib import Path

from app import parse


def load(path: str):
    """Import a recipe from its file."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    recipe = load(sys.argv[1])
    for flags in json.loads(Path(sys.argv[2]).read_text()):
        recipe.main(parse(recipe.Config, flags))
