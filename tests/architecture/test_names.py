"""Files and classes have unique names, and prose and names use the field's terms."""

import ast
import collections
import functools
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent.parent
FILES = sorted(file for name in ("hlat", "launchers") for file in (REPOSITORY / name).rglob("*.py"))
WORDS = set(
    """
    told tell tells telling hears heard hear knows knew nobody nobody's everybody everyone somebody
    whoever whatever stands stood lies lie alike forgets forget owes likeliest riddle lot lots blame
    blames settles settle farewell passage patient dice anew goes came wrote draws drawn stranger
    strangers neighbours rooms nor alone own self's
    """.split()  # noqa: SIM905
)
"""Words with which private vocabulary begins; torch and Hydra have less than one in 1,000 words."""
NAME_WORDS = set(
    """
    told tell tells ask asked hear knows nobody everyone place places texts patient whole kept judge
    leave beginning box abandon examine settle chief meeting council farewell passage goes gone
    blame lively lot stands aside foreign
    """.split()  # noqa: SIM905
)
OPENINGS = set(
    """
    the a an what whether how where why who whom when every each all both one two nothing none no
    that this these those which whose some any it its if in of for from with as per by on at
    """.split()  # noqa: SIM905
)


_parse = functools.cache(ast.parse)


def _read_prose(text: str) -> Iterator[str]:
    """Yield docstrings and comments."""
    for node in ast.walk(_parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


def _read_functions(text: str) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(_parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def _count_flagged_words(text: str) -> tuple[int, collections.Counter[str]]:
    prose = re.sub(r"`[^`]*`", " ", " ".join(_read_prose(text)).lower())
    words = re.findall(r"[a-z']+", prose)
    return len(words), collections.Counter(word for word in words if word in WORDS)


def _is_noun_opening(docstring: str) -> bool:
    return (re.findall(r"[A-Za-z']+", docstring) or [""])[0].lower() in OPENINGS


def _flag_name(name: str) -> bool:
    return bool(NAME_WORDS & set(re.findall(r"[a-z]+", re.sub("([A-Z])", r"_\1", name).lower())))


def test_flags_are_found() -> None:
    text = 'def tell(place):\n    """The word that nobody knows."""\n'
    assert _count_flagged_words(text)[1] == {"nobody": 1, "knows": 1}
    assert _is_noun_opening("The word that nobody knows.")
    assert not _is_noun_opening("Return the word.")
    assert _flag_name("tell")
    assert _flag_name("WorkPlace")
    assert not _flag_name("placeholder")


def test_prose_uses_the_terms_of_the_field() -> None:
    num_words, flagged = 0, collections.Counter()
    for file in FILES:
        number, words = _count_flagged_words(file.read_text())
        num_words += number
        flagged += words
    assert sum(flagged.values()) < 2 * num_words / 1000, flagged.most_common(10)


def test_function_docstrings_begin_with_a_verb() -> None:
    docstrings = [
        (file, node.name, doc)
        for file in FILES
        for node in _read_functions(file.read_text())
        if (doc := ast.get_docstring(node))
    ]
    nouns = [(file.name, name) for file, name, doc in docstrings if _is_noun_opening(doc)]
    assert len(nouns) < 0.06 * len(docstrings), nouns


def test_names_use_the_terms_of_the_field() -> None:
    names = []
    for file in FILES:
        for node in _read_functions(file.read_text()):
            names += [(file.name, node.name), *((file.name, arg.arg) for arg in node.args.args)]
    flagged = [(file, name) for file, name in names if _flag_name(name)]
    assert len(flagged) < 3 * len(names) / 1000, flagged


@pytest.mark.parametrize("root", ["hlat", "launchers"])
def test_file_names_are_unique(root: str) -> None:
    names = collections.Counter(
        file.name for file in FILES if file.is_relative_to(REPOSITORY / root)
    )
    repeated = {name for name, count in names.items() if count > 1}
    assert repeated <= {"__init__.py", "__main__.py"}


def test_class_names_are_unique() -> None:
    names = collections.Counter(
        node.name
        for file in FILES
        for node in _parse(file.read_text()).body
        if isinstance(node, ast.ClassDef)
    )
    assert not [name for name, count in names.items() if count > 1]
