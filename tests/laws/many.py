"""Run recipes several times in one process, because a launch costs seconds.

many.py FILE: FILE is a JSON list with, for each run, the recipe's file, its flags, and the file for the costs of a
silent step (empty: do not count). If that file's name ends in .refused, the run must be refused, and the reason is
written to it.
"""

import importlib.util
import json
import sys
from pathlib import Path

from app import UserError, parse


def load(path: str):
    """Import a recipe from its file."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def main(commands: list) -> None:
    """Run each recipe with its flags."""
    for path, flags, counted in commands:
        recipe = load(path)
        if counted and counted.endswith(".refused"):
            try:
                recipe.main(parse(recipe.Config, flags))
            except UserError as error:
                Path(counted).write_text(str(error))
        elif counted:
            from laws.counting import counting

            with counting(Path(counted)):
                recipe.main(parse(recipe.Config, flags))
        else:
            recipe.main(parse(recipe.Config, flags))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent))
    main(json.loads(Path(sys.argv[1]).read_text()))
