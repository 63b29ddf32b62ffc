"""Mistakes that people make in a loop of their own, planted into a recipe's text."""

import re

# What each does to the text: a pattern that must be there, and what takes its place.
MISTAKES = {
    # The mean over a micro-batch, as it is: neither weighed by its share nor summed over ranks.
    "weight": (r"run\.backward\(([^,\n]+), micro[^)\n]*\)", r"run.accelerator.backward(\1)"),
    # Gradients of earlier steps stay and are added to.
    "zero_grad": (r"(\n *)(run\.step\((\w+)\))", r"\1\3.optimizer.zero_grad = lambda *_, **__: None\1\2"),
    # The last micro-batch once more, where gradients are synchronised again.
    "second backward": (
        r"(\n *)for micro in batch\.micros\([^)\n]*\):((?:\1    [^\n]*)+)",
        r"\g<0>\1for micro in [micro]:\2",
    ),
}


def plant(name: str, text: str) -> str:
    """Put a mistake into a recipe.

    Raises:
        AssertionError: the loop is written in another way than the pattern knows.
    """
    pattern, instead = MISTAKES[name]
    planted, count = re.subn(pattern, instead, text)
    assert count, f"no place for the mistake {name!r}: write the loop as in recipes/cls.py, or mend {__file__}"
    return planted
