"""The call graph of Python's library: its functions, which of them calls which, and the package that each is from."""

import ast
import re
import sys
import sysconfig
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import xxhash

from app.data.cache import cache_folder, made_once
from app.data.graphs import store
from app.data.graphs.store import UNKNOWN, Graph
from app.data.tables.python_library import stdlib_files
from app.errors import UserError
from app.sampling.hashing import key_of

# Part of the cache's key: raise it when the graph changes.
VERSION = 1
CLASSES = 24
"""The packages and modules with most functions, which are the classes. Functions of others have no label."""
WIDTH = 256
"""Numbers of a function's features."""
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")


@dataclass
class _Function:
    """A function: where it is, and what it calls, in words of its own file."""

    package: str
    words: list[str]
    calls: list[tuple[str, ...]] = field(default_factory=list)
    """Dotted names as tuples; of `self.f()`, the class's name takes the place of self."""


@dataclass
class _Module:
    """What a file's names are."""

    functions: dict[str, int] = field(default_factory=dict)
    """The number of each function, by its name in the file: `f` or `Class.f`."""
    imports: dict[str, str] = field(default_factory=dict)
    """What a name was imported as: a module, or module.name."""
    bases: dict[str, list[str]] = field(default_factory=dict)
    """The names of each class's bases, where they are plain names."""


def load() -> Graph:
    """Load the graph. It is made once, in 8 s of a processor, until Python, its library or VERSION changes."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [*sorted(path.name for path in root.glob("*.py")), *stdlib_files(root)]
    if not files:
        raise UserError(f"--data.path builtin:calls: {root} has no Python sources; give other data")
    listing = [(file, (root / file).stat().st_size) for file in files]
    folder = cache_folder() / "graphs" / key_of("calls", VERSION, sys.version, listing)
    return store.load(made_once(folder, lambda draft: store.save(build(root, files), draft)))


def build(root: Path, files: list[str]) -> Graph:
    """Make the graph of these files. Edges go both ways; a function's features are words in it, hashed."""
    modules, functions = _read(root, files)
    edges = {(caller, called) for caller, called in _edges(modules, functions) if caller != called}
    sizes = Counter(function.package for function in functions)
    # Ties go to the name that comes first, so that the choice does not depend on the order of counting.
    names = sorted(sorted(sizes, key=lambda name: (-sizes[name], name))[:CLASSES])
    places = {name: place for place, name in enumerate(names)}
    labels = np.array([places.get(function.package, UNKNOWN) for function in functions], np.int64)
    ends = np.array(sorted(edges), np.int64).reshape(-1, 2).T
    indptr, indices = store.csr_of(ends[0], ends[1], len(functions), undirected=True)
    # A package's own name would give its label away.
    hidden = {word for name in sizes for word in words_in(name)} | {name.lower() for name in sizes}
    features = np.stack([_hashed(word for word in function.words if word not in hidden) for function in functions])
    return Graph(indptr, indices, features, labels, names=names)


def words_in(name: str) -> list[str]:
    """Split an identifier at underscores and capitals; in lower case."""
    return [word.lower() for word in _WORD.findall(name)]


def _hashed(words: Iterator[str]) -> np.ndarray:
    """Count words into WIDTH places with signs (Weinberger et al., 2009); the length is 1, or 0 without words."""
    counts = np.zeros(WIDTH, np.float32)
    for word in words:
        value = xxhash.xxh3_64_intdigest(word.encode("utf-8", "surrogatepass"))
        counts[value % WIDTH] += 1 if value >> 63 else -1
    return counts / max(float(np.linalg.norm(counts)), 1e-6)


def _read(root: Path, files: list[str]) -> tuple[dict[str, _Module], list[_Function]]:
    """Read the modules, by their dotted names, and all functions in the order of files and lines."""
    modules: dict[str, _Module] = {}
    functions: list[_Function] = []
    for file in files:
        try:
            with tokenize.open(root / file) as stream:
                tree = ast.parse(stream.read())
        except (SyntaxError, UnicodeDecodeError):
            continue
        dotted = file.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
        modules[dotted] = module = _Module()
        is_package = file.endswith("__init__.py")
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                module.imports |= _imported(node, dotted, is_package)
        _collect(tree, "", dotted.partition(".")[0], module, functions)
    return modules, functions


def _imported(node: ast.Import | ast.ImportFrom, module: str, is_package: bool) -> dict[str, str]:
    if isinstance(node, ast.Import):
        tops = {alias.name.partition(".")[0] for alias in node.names if not alias.asname}
        return {top: top for top in tops} | {alias.asname: alias.name for alias in node.names if alias.asname}
    parts = module.split(".") if is_package else module.split(".")[:-1]
    base = ".".join(parts[: len(parts) - node.level + 1]) if node.level else ""
    origin = ".".join(filter(None, (base, node.module)))
    return {a.asname or a.name: f"{origin}.{a.name}" for a in node.names}


def _collect(tree: ast.AST, owner: str, package: str, module: _Module, functions: list[_Function]) -> None:
    """Add the functions of a module or class; a function inside another is part of the other."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            name = f"{owner}.{node.name}" if owner else node.name
            module.functions.setdefault(name, len(functions))
            functions.append(_Function(package, *_inside(node, owner)))
        elif isinstance(node, ast.ClassDef):
            module.bases[node.name] = [base.id for base in node.bases if isinstance(base, ast.Name)]
            _collect(node, node.name, package, module, functions)
        elif isinstance(node, ast.If | ast.Try | ast.With):
            _collect(node, owner, package, module, functions)


def _inside(function: ast.FunctionDef | ast.AsyncFunctionDef, owner: str) -> tuple[list[str], list[tuple[str, ...]]]:
    """Return the words of a function's name, arguments and attributes, and the dotted names that it calls."""
    words, calls = words_in(function.name), []
    for node in ast.walk(function):
        if isinstance(node, ast.arg):
            words += words_in(node.arg)
        elif isinstance(node, ast.Attribute):
            words += words_in(node.attr)
        elif isinstance(node, ast.Call) and (name := _dotted(node.func)):
            calls.append((owner, *name[1:]) if name[0] in ("self", "cls") and owner else name)
    return words, calls


def _dotted(node: ast.AST) -> tuple[str, ...]:
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return (node.id, *reversed(names)) if isinstance(node, ast.Name) else ()


def _edges(modules: dict[str, _Module], functions: list[_Function]) -> Iterator[tuple[int, int]]:
    """Yield caller and called, where the name that is called says which function of the library it is."""
    methods = defaultdict(list)
    for module in modules.values():
        for path, number in module.functions.items():
            if "." in path:
                methods[path.rpartition(".")[2]].append(number)
    for module in modules.values():
        for number in module.functions.values():
            for name in functions[number].calls:
                called = _resolved(name, module, modules)
                # A method of something unknown, whose name only one class has.
                if called is None and len(name) > 1 and len(methods[name[-1]]) == 1:
                    (called,) = methods[name[-1]]
                if called is not None:
                    yield number, called


def _resolved(name: tuple[str, ...], module: _Module, modules: dict[str, _Module], depth: int = 4) -> int | None:
    """Return the number of the function that a name in a module means; of a class, its __init__."""
    for path in (name, (*name, "__init__")):
        if (number := module.functions.get(".".join(path))) is not None:
            return number
    if not depth:
        return None
    for base in module.bases.get(name[0], ()) if len(name) == 2 else ():
        if (inherited := _resolved((base, name[1]), module, modules, depth - 1)) is not None:
            return inherited
    if name[0] not in module.imports:
        return None
    parts = (*module.imports[name[0]].split("."), *name[1:])
    for cut in range(len(parts) - 1, 0, -1):
        if (other := modules.get(".".join(parts[:cut]))) is not None:
            return _resolved(parts[cut:], other, modules, depth - 1)
    return None
