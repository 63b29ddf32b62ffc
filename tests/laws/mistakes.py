"""Mistakes that people make in their own loops, planted into a recipe's text."""

import re

# For each mistake: a pattern that the text must have, and its replacement.
MISTAKES = {
    # The plain mean over a micro-batch: neither weighted by its share nor summed over ranks.
    "weight": (r"run\.backward\(([^,\n]+), micro[^)\n]*\)", r"run.accelerator.backward(\1)"),
    # Gradients of earlier steps are not cleared.
    "zero_grad": (r"(\n *)(run\.step\((\w+)\))", r"\1\3.optimizer.zero_grad = lambda *_, **__: None\1\2"),
    # A second pass over the last micro-batch, which synchronises again.
    "second backward": (
        r"(\n *)for micro in batch\.micros\([^)\n]*\):((?:\1    [^\n]*)+)",
        r"\g<0>\1for micro in [micro]:\2",
    ),
}


def plant(name: str, text: str) -> str:
    """Put a mistake into a recipe.

    Raises:
        AssertionError: the pattern does not match the recipe's loop.
    """
    pattern, instead = MISTAKES[name]
    planted, count = re.subn(pattern, instead, text)
    assert count, f"no place for the mistake {name!r}: write the loop as in recipes/cls.py, or mend {__file__}"
    return planted
