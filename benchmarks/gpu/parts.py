"""The parts of `python -m benchmarks.gpu`, most valuable first."""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass

LIMIT = 480
"""The default time limit of a part, in seconds."""
TESTS = ("-m", "pytest", "-vv", "-rs", "-p", "no:cacheprovider", "--color=no")


@dataclass(frozen=True)
class Part:
    """One part: a command, and the question that it answers."""

    name: str
    about: str
    command: tuple[str, ...]
    """Words after `python`. The lines that it prints as JSON objects are its results."""
    minutes: float
    """Minutes on one H200: an estimate, until it has run on one."""
    small: tuple[str, ...] = ()
    """Words that replace those after the module, for small shapes."""
    leaves: str = ""
    """The flag for a JSON file that it writes at its end."""

    def words(self, small: bool) -> list[str]:
        """Return the words after `python`."""
        return [*self.command[:2], *self.small] if small and self.small else [*self.command]

    def lacks(self) -> str:
        """Return a module of the project that it needs and that is missing; empty if none is."""
        kind, module = self.command[:2]
        return "" if kind != "-m" or importlib.util.find_spec(module) else f"there is no module {module} here"


def _laws(recipe: str, minutes: float) -> Part:
    about = f"{recipe}: twice the same, stopped and resumed, to the CPU and back; exact mode to the bit"
    tests = f"{recipe} or kernels" if recipe == "cls" else recipe  # tests of no recipe go with the first part
    return Part(f"laws-{recipe}", about, (*TESTS, "tests/laws/test_cuda.py", "-k", tests), minutes)


def _sharing(processes: int, minutes: float) -> Part:
    about = f"exact mode to the bit: 1 process, DDP x{processes} and FSDP2 x{processes} on the one GPU, every recipe"
    return Part(f"sharing-x{processes}", about, (*TESTS, "tests/laws/test_sharing.py", "-k", f"x{processes}"), minutes)


def _speed(name: str, about: str, minutes: float) -> Part:
    return Part(name, about, ("-m", "benchmarks.gpu.speed", name), minutes, small=(name, "--small", "--rounds", "3"))


def _cost(recipes: Sequence[str], minutes: float) -> Part:
    about = f"what exact mode costs {', '.join(recipes)}: items a second against ordinary mode"
    words = tuple(f"exact-{recipe}" for recipe in recipes)
    small = (*words, "--small", "--rounds", "3")
    return Part(f"exact-{'-'.join(recipes)}", about, ("-m", "benchmarks.gpu.speed", *words), minutes, small=small)


def _launches(recipe: str) -> Part:
    about = f"how many kernels a step of {recipe} launches, in exact mode and the ordinary"
    return Part(f"launches-{recipe}", about, ("-m", "benchmarks.exact", recipe, "--blocks", "0"), 0.5)


def _saving(gigabytes: str, minutes: float) -> Part:
    about = f"how long training waits for a checkpoint of {gigabytes} GB"
    words = ("-m", "benchmarks.saving", "--gigabytes", gigabytes, "--rounds", "3")
    return Part(f"saving-{gigabytes}gb", about, words, minutes, small=("--gigabytes", "0.1", "--rounds", "2"))


PARTS = (
    _laws("cls", 2),
    _laws("lm", 2),
    _sharing(2, 4),
    _speed("lm", "a Llama of 1.1 billion weights: tokens a second, MFU, memory; against a bare loop and Trainer", 5),
    _cost(("lm", "cls"), 5),
    _laws("img", 2),
    _laws("tag", 1.5),
    _laws("det", 1.5),
    _laws("graph", 1.5),
    _laws("dpo", 1.5),
    _laws("s2s", 1.5),
    _laws("gan", 1.5),
    _laws("seg", 1.5),
    _speed("cls", "BERT-base against a bare loop and Trainer", 2.5),
    _sharing(4, 5),
    Part(
        "compiled-x2",
        "cls and lm compiled by region, exact mode to the bit: 1 process, DDP x2 and FSDP2 x2 on the one GPU",
        (*TESTS, "tests/laws/test_sharing_compiled.py"),
        4,
    ),
    _launches("cls"),
    _launches("lm"),
    Part("copies", "the share of copying that is hidden", ("-m", "benchmarks.copies"), 0.5),
    _saving("1", 1),
    Part(
        "memory",
        "peak memory against what `plan` predicts",
        ("-m", "benchmarks.predicted"),
        3,
        small=("--small",),
        leaves="--out",
    ),
    _speed("resnet", "ResNet-50 against a bare loop and Trainer", 3),
    _speed("vit", "ViT-B against a bare loop and Trainer", 3),
    _cost(("img", "gan", "seg"), 6),
    _saving("13", 3),
)


def chosen(words: Sequence[str], parts: Sequence[Part] = PARTS) -> list[Part]:
    """Return the parts that words select, in order: by its name, or all whose names begin with the word.

    Raises:
        SystemExit: a word selects none.
    """
    selected = []
    for word in words:
        named = [part for part in parts if part.name == word] or [p for p in parts if p.name.startswith(word)]
        if not named:
            raise SystemExit(f"no part is called {word}; there are {', '.join(part.name for part in parts)}")
        selected += named
    return [part for part in parts if part in selected] if words else list(parts)
