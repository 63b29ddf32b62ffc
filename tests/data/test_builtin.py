"""Data that needs no download."""

import re

import pytest

from app.data.tables.python_library import functions_of, stdlib_rows

pytestmark = pytest.mark.usefixtures("data_cache")


def test_stdlib_has_thousands_of_functions_of_twelve_packages(stdlib):
    train, evaluation = stdlib
    assert len(train) + len(evaluation) > 3000
    assert abs(len(evaluation) - 0.1 * (len(train) + len(evaluation))) <= 0.5
    assert len(set(train["label"])) == 12
    assert set(evaluation["label"]) <= set(train["label"])
    texts = [*train["text"], *evaluation["text"]]
    assert len(set(texts)) == len(texts)
    assert all(text.count("\n") >= 2 for text in texts)
    assert all(re.match(r"(async )?def ", text) for text in texts)


def test_functions_of_a_file_are_the_outermost_ones_dedented(tmp_path):
    file = tmp_path / "code.py"
    file.write_text(
        '''# coding: latin-1\n\x0cdef short():
    pass

if True:
    class A:
        @property
        def method(self):
            """Caf\xe9
left of it"""
            def inner():
                a = 1
                return a

            return inner
try:
    pass
except ImportError:
    async def last():
        a = 1
        return a
''',
        encoding="latin-1",
    )
    method = (
        'def method(self):\n    """Caf\xe9\nleft of it"""\n'
        "    def inner():\n        a = 1\n        return a\n\n    return inner"
    )
    assert list(functions_of(file)) == [method, "async def last():\n    a = 1\n    return a"]
    file.write_text("print 'python 2'\n")
    assert list(functions_of(file)) == []


def test_stdlib_takes_the_largest_packages_and_leaves_tests_out(tmp_path):
    def package(path: str, functions: int, word: str):
        file = tmp_path / path / "code.py"
        file.parent.mkdir(parents=True)
        file.write_text("".join(f"def {word}{i}():\n    a = {i}\n    return a\n\n" for i in range(functions)))

    for i in range(14):
        package(f"p{i:02}", 20 - min(i, 11), f"f{i}_")
    package("p13/test", 99, "t")
    package("site-packages/p13", 99, "s")
    package("copy", 50, "f0_")  # comes before p00, and has 20 of its functions
    rows = list(stdlib_rows(str(tmp_path)))
    labels = [row["label"] for row in rows]
    assert sorted(set(labels)) == ["copy", *(f"p{i:02}" for i in range(1, 12))]
    assert labels == sorted(labels)
    assert labels.count("copy") == 50
