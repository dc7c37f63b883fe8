"""The documentation site: navigation, pinned packages, and the build with its links and anchors."""

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REPOSITORY = Path(__file__).resolve().parent.parent.parent
DOCS = REPOSITORY / "docs"
CONFIG = yaml.safe_load((REPOSITORY / "mkdocs.yml").read_text())
OUTSIDE_NAV = re.compile(r"adr/0.*")


def _iterate_pages(item: Any) -> Iterator[str]:
    if isinstance(item, str):
        yield item
        return
    for child in item if isinstance(item, list) else item.values():
        yield from _iterate_pages(child)


def test_navigation_contains_every_page_once() -> None:
    pages = sorted(_iterate_pages(CONFIG["nav"]))
    found = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}
    assert pages == sorted(page for page in found if not OUTSIDE_NAV.fullmatch(page))


def _collect_anchors(page: Path) -> set[str]:
    """Return the anchors of a page: those of its headings as Python-Markdown builds them, and `<a id>`."""
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    plain = [re.sub(r"[^\w\s-]", "", re.sub(r"\]\([^)]*\)", "", title)) for title in titles]
    slugs = {re.sub(r"[-\s]+", "-", title.strip().lower()) for title in plain}
    return slugs | set(re.findall(r'<a id="([^"]+)"', text))


def test_anchors_of_links_exist() -> None:
    for page in [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *DOCS.rglob("*.md")]:
        links = re.findall(r"\]\(([^)#\s]*\.md)?#([^)\s]+)\)", page.read_text())
        for path, anchor in links:
            target = page.parent / path if path else page
            assert anchor in _collect_anchors(target), f"{page.name}: {path}#{anchor}"


def test_packages_are_pinned() -> None:
    table = re.search(
        r"^docs = \[\n(.*?)^\]",
        (REPOSITORY / "pyproject.toml").read_text(),
        re.MULTILINE | re.DOTALL,
    )
    assert table is not None
    names = {canonicalize_name(Requirement(text).name) for text in re.findall(r'"(.+)"', table[1])}
    pins = (REPOSITORY / "constraints.txt").read_text()
    assert names <= {canonicalize_name(name) for name in re.findall(r"^([\w.-]+)==", pins, re.M)}


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site."""
    if any(importlib.util.find_spec(name) is None for name in ("material", "mkdocstrings")):
        pytest.skip("needs the packages of the extra `docs`: make docs")
    directory = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(directory)],
        cwd=REPOSITORY,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    return directory


class _PageParser(HTMLParser):
    """Parser that collects the links, loaded resources and ids of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.ids: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" and value:
                self.ids.add(value)
            elif name in ("href", "src") and value:
                (self.links if tag == "a" else self.loaded).append(value)


@pytest.fixture(scope="session")
def parsed_pages(site: Path) -> dict[Path, _PageParser]:
    return {
        page: _PageParser(page.read_text())
        for page in site.rglob("*.html")
        if page.name != "404.html"
    }


@pytest.mark.slow
@pytest.mark.xdist_group("site")
def test_site_loads_nothing_from_other_hosts(
    site: Path, parsed_pages: dict[Path, _PageParser]
) -> None:
    for page, parsed in parsed_pages.items():
        assert not [url for url in parsed.loaded if re.match(r"(?:[a-z]+:)?//", url)], page
    for style in site.rglob("*.css"):
        assert not re.search(r"url\(['\"]?https?:", style.read_text()), style.relative_to(site)


@pytest.mark.slow
@pytest.mark.xdist_group("site")
def test_internal_links_and_anchors_exist(
    site: Path, parsed_pages: dict[Path, _PageParser]
) -> None:
    """MkDocs checks the links of Markdown; this checks those of the pages, raw HTML included."""
    for page, parsed in parsed_pages.items():
        for target in [*parsed.links, *parsed.loaded]:
            if re.match(r"[a-z]+:", target):
                continue
            path, _, anchor = target.partition("#")
            destination = (page.parent / path).resolve() if path else page
            assert destination.exists(), f"{page.relative_to(site)}: {target}"
            if anchor and destination in parsed_pages:
                ids = parsed_pages[destination].ids
                assert anchor in ids, f"{page.relative_to(site)}: {target}"
