"""Commands of `python -m app`: a module each, found by its file's name.

A command's module has a docstring, whose first line is the summary; a dataclass `Options`, read as a recipe's config
is; and `main(options) -> int`, which returns the exit status: 0 for good, 1 where something bad was found. What cannot
be asked so is a UserError, and ends with 2. A `main(options, flags)` also gets the words that are not among its
options, for a recipe. torch and the like are imported in functions: --help answers at once.
"""
