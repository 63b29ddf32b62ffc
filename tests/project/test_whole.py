"""Objects are whole when they are made: no attribute is born after the constructor, in app and in recipes."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from support.launching import ROOT

CONSTRUCTORS = {"__init__", "__post_init__", "__new__", "__init_subclass__", "__set_name__"}


@dataclass
class Class:
    """What a class statement says of its instances."""

    path: str
    node: ast.ClassDef
    made: set[str] = field(default_factory=set)
    kinds: dict[str, str] = field(default_factory=dict)
    """Names of the classes of attributes, where the constructor shows them."""

    @property
    def bases(self) -> list[str]:
        return [name_of(base) for base in self.node.bases]


def name_of(node: ast.AST | None) -> str:
    """The last part of a dotted name, also in quotes, with `| None`, or called; empty for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value.partition(" | ")[0].rpartition(".")[2]
    if isinstance(node, ast.BinOp):
        return name_of(node.left)
    if isinstance(node, ast.Call):
        return name_of(node.func)
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def methods(node: ast.ClassDef) -> list[ast.FunctionDef]:
    """The methods that get an instance."""
    plain = [each for each in node.body if isinstance(each, ast.FunctionDef) and each.args.args]
    return [m for m in plain if not {"staticmethod", "classmethod"} & {name_of(d) for d in m.decorator_list}]


def stores(function: ast.AST) -> Iterator[ast.Attribute]:
    """The attributes that a function assigns, also by tuples, `with` and `for`."""
    for node in ast.walk(function):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node


def kinds_in(function: ast.FunctionDef) -> dict[str, str]:
    """The classes of a function's parameters and of the variables that it makes by calling a class."""
    arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    kinds = {each.arg: name_of(each.annotation) for each in arguments if each.annotation}
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            kinds |= {each.id: name_of(node.value) for each in node.targets if isinstance(each, ast.Name)}
    return kinds


def described(path: str, node: ast.ClassDef) -> Class:
    about = Class(path, node)
    for each in node.body:
        if isinstance(each, ast.AnnAssign):
            about.made.add(name_of(each.target))
            about.kinds[name_of(each.target)] = name_of(each.annotation)
        elif isinstance(each, ast.Assign):
            about.made |= {name_of(target) for target in each.targets}
        elif isinstance(each, ast.FunctionDef):
            ways = {name_of(d) for d in each.decorator_list}
            about.made |= {each.name} & {each.name if "setter" in ways else ""}
            about.kinds |= {each.name: name_of(each.returns)} if {"property", "cached_property"} & ways else {}
    for method in (m for m in methods(node) if m.name in CONSTRUCTORS):
        own, kinds = method.args.args[0].arg, kinds_in(method)
        about.made |= {each.attr for each in stores(method) if name_of(each.value) == own}
        for each in ast.walk(method):
            for target, value in pairs(each):
                if isinstance(target, ast.Attribute) and name_of(target.value) == own:
                    of_call = name_of(value) if isinstance(value, ast.Call) else kinds.get(name_of(value), "")
                    about.kinds.setdefault(target.attr, of_call)
    return about


def pairs(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr | None]]:
    """The targets of an assignment, each with its value."""
    if isinstance(node, ast.AnnAssign):
        yield node.target, node.annotation
    if isinstance(node, ast.Assign):
        for target in node.targets:
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                yield from zip(target.elts, node.value.elts, strict=False)
            else:
                yield target, node.value


class House:
    """All classes of some files."""

    def __init__(self, texts: dict[str, str]):
        self.trees = {path: ast.parse(text) for path, text in texts.items()}
        self.classes: dict[str, Class] = {}
        twice = set()
        for path, tree in self.trees.items():
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef):
                    twice |= {node.name} & set(self.classes)
                    self.classes[node.name] = described(path, node)
        # A name that two files give to classes of their own says nothing about an instance.
        self.unique = {name: about for name, about in self.classes.items() if name not in twice}

    def made(self, about: Class) -> set[str]:
        """What the constructors of a class and of its bases make."""
        bases = [self.classes[name] for name in about.bases if name in self.classes and name != about.node.name]
        return about.made.union(*map(self.made, bases))

    def is_ours(self, about: Class) -> bool:
        """Whether all that a class inherits is in these files."""
        return all(b in self.classes and b != about.node.name and self.is_ours(self.classes[b]) for b in about.bases)

    def born_late(self) -> list[str]:
        """The attributes that a method other than a constructor gives to its own object."""
        late = []
        for path, tree in self.trees.items():
            for node in (n for n in ast.walk(tree) if isinstance(n, ast.ClassDef)):
                made = self.made(described(path, node))
                for method in (m for m in methods(node) if m.name not in CONSTRUCTORS):
                    own = method.args.args[0].arg
                    names = [
                        each.attr
                        for each in stores(method)
                        if isinstance(each.value, ast.Name) and each.value.id == own
                    ]
                    late += [f"{path}: {node.name}.{method.name}: {n}" for n in names if n not in made]
        return sorted(set(late))

    def kind_of(self, value: ast.expr, kinds: dict[str, str]) -> Class | None:
        """The class of an expression such as `step` or `run.services.logger`, where that can be seen."""
        if isinstance(value, ast.Name):
            return self.unique.get(kinds.get(value.id, ""))
        if isinstance(value, ast.Attribute) and (outer := self.kind_of(value.value, kinds)):
            return self.unique.get(outer.kinds.get(value.attr, ""))
        return None

    def given_from_outside(self) -> list[str]:
        """The attributes that code gives to objects of classes which have none of that name."""
        late = []
        for path, tree in self.trees.items():
            owners = {id(m): n.name for n in ast.walk(tree) if isinstance(n, ast.ClassDef) for m in methods(n)}
            for function in (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)):
                kinds = kinds_in(function)
                if id(function) in owners:
                    kinds[function.args.args[0].arg] = owners[id(function)]
                for each in stores(function):
                    about = self.kind_of(each.value, kinds)
                    own = isinstance(each.value, ast.Name) and id(function) in owners
                    own = own and each.value.id == function.args.args[0].arg
                    if about and self.is_ours(about) and not own and each.attr not in self.made(about):
                        late.append(f"{path}: {function.name}: {ast.unparse(each)}")
        return sorted(set(late))


def house() -> House:
    paths: list[Path] = [*ROOT.glob("app/**/*.py"), *ROOT.glob("recipes/*.py")]
    return House({str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in paths})


def test_no_attribute_is_born_after_the_constructor():
    assert house().born_late() == []


def test_no_attribute_is_given_from_outside():
    assert house().given_from_outside() == []


def test_late_attributes_are_seen():
    text = """
class Base:
    fixed = 0
    def __init__(self):
        self.a, (self.b, self.c) = 1, (2, 3)
class Child(Base):
    def later(self):
        self.a = self.fixed = 1
        with open("x") as self.file:
            self.d, self.e = 1, 2
class Owner:
    def __init__(self, child: Child):
        self.child = child
    def reach(self):
        self.child.new = 1
        self.child.a = 2
def change(owner: "Owner | None"):
    owner.child.other = 1
"""
    seen = House({"x.py": text})
    assert seen.born_late() == [f"x.py: Child.later: {name}" for name in ("d", "e", "file")]
    assert seen.given_from_outside() == ["x.py: change: owner.child.other", "x.py: reach: self.child.new"]
