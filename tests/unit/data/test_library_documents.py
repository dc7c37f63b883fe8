"""Test the three sources of the standard library."""

from pathlib import Path

import pytest

from hlat.data import embedded_corpus

MODULE = '''"""Module docstring, été."""

import os


class A:
    """A class.

    Methods:
        Indented.
    """

    def method(self):
        "One line."

    x = "kept"  # été


async def f(): """Short."""; return "été"  # kept
'''


@pytest.fixture
def root(tmp_path: Path) -> Path:
    files = {
        "pkg/module.py": MODULE,
        "pkg/tests/test_module.py": MODULE,
        "encodings/table.py": "table = 1\n",
        "LICENSE.txt": "a licence",
        "broken.py": "def (:\n",
        "latin.py": "",
        "pydoc_data/topics.py": "topics = {'b': 'About b.', 'a': 'About a.'}\n",
        "site-packages/other.py": "no = 1\n",
        "config-3.11-linux/x.py": "no = 1\n",
        "pkg/__pycache__/x.py": "no = 1\n",
        "pkg/picture.png": "no",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    (tmp_path / "latin.py").write_bytes("x = 'été'".encode("latin-1"))
    return tmp_path


def read(root: Path) -> list[embedded_corpus.LibraryDocument]:
    return [
        d
        for path in embedded_corpus.list_library_files(root)
        for d in embedded_corpus.read_library_documents(root, path)
    ]


def test_files_are_listed_in_order_without_third_party_files(root: Path) -> None:
    assert embedded_corpus.list_library_files(root) == [
        "LICENSE.txt",
        "broken.py",
        "encodings/table.py",
        "latin.py",
        "pkg/module.py",
        "pkg/tests/test_module.py",
        "pydoc_data/topics.py",
    ]


def test_documents_are_assigned_to_sources(root: Path) -> None:
    assert [(d.source, d.path) for d in read(root)] == [
        ("prose", "LICENSE.txt"),
        ("data", "encodings/table.py"),
        ("code", "pkg/module.py"),
        ("prose", "pkg/module.py"),
        ("data", "pkg/tests/test_module.py"),
        ("prose", "pydoc_data/topics.py:a"),
        ("prose", "pydoc_data/topics.py:b"),
    ]


def test_docstrings_are_moved_from_code_to_prose(root: Path) -> None:
    code, prose = embedded_corpus.read_library_documents(root, "pkg/module.py")
    assert prose.text == (
        "Module docstring, été.\n\nA class.\n\nMethods:\n    Indented.\n\nOne line.\n\nShort."
    )
    assert code.text == (
        "\nimport os\n\n\nclass A:\n\n    def method(self):\n\n"
        '    x = "kept"  # été\n\n\nasync def f(): ; return "été"  # kept\n'
    )


def test_data_is_sampled_evenly_to_its_size(root: Path, monkeypatch) -> None:
    for i in range(20):
        (root / "encodings" / f"{i:02}.py").write_text("x" * 100)
    monkeypatch.setattr(embedded_corpus, "TARGET_DATA_BYTES", 1000)
    data = [
        path for path in embedded_corpus.list_library_files(root) if path.startswith("encodings/")
    ]
    assert data == [f"encodings/{i:02}.py" for i in range(0, 20, 3)]
