"""Hooks of MkDocs: pages for files of the repository outside docs/ that the documentation links to.

On a Git server such a link opens the file. The site must work on its own, so linked Markdown files
become pages, other text files become pages with their content, directories become lists of their
files, and figures and JSON files are copied. All of them are below repository/ in the site.
"""

import re
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

_LINK = re.compile(r"(\]\()([^)#\s]+)((?:#[^)\s]*)?\))")
_CODE = re.compile(r"^ *```.*?^ *```|`[^`\n]+`", re.MULTILINE | re.DOTALL)
_COPIED = {".json", ".png", ".svg", ".ipynb"}
_ROOT = "repository"
_SEARCH_BOOSTS = {
    "guides/": 2.0,
    "reference/": 2.0,
    **dict.fromkeys(("adr/", "log.md", "renames.md", f"{_ROOT}/"), 0.001),
}
"""Factors of the rank of pages in the search, by the start of their path; else 1. The theme weights
words of titles by 1,000, and decisions and log entries have long titles."""
_NOT_SEARCHED = "---\nsearch: {exclude: true}\n---\n\n"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages and copies of all linked files of the repository."""
    repository, docs = Path(config.config_file_path).parent, Path(config.docs_dir)
    waiting = [
        (_to_repository_path(file.src_uri, docs.name), file.content_string)
        for file in files
        if file.src_uri.endswith(".md")
    ]
    while waiting:
        origin, text = waiting.pop()
        for target in _find_repository_targets(repository, docs.name, origin, text):
            uri = _to_site_uri(repository, docs.name, target)
            if files.get_file_from_path(uri) is not None:
                continue
            path = repository / target
            if path.suffix in _COPIED:
                copy = File.generated(config, uri, abs_src_path=str(path))
                files.append(copy)
                continue
            content = _render(repository, target)
            options: dict[str, Any] = {"inclusion": InclusionLevel.NOT_IN_NAV}
            files.append(File.generated(config, uri, content=content, **options))
            if path.suffix == ".md" or path.is_dir():
                waiting.append((target, content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Replace links to files of the repository by links to their pages; set the search rank."""
    for start, boost in _SEARCH_BOOSTS.items():
        if page.file.src_uri.startswith(start):
            page.meta.setdefault("search", {"boost": boost})
    repository, docs = Path(config.config_file_path).parent, Path(config.docs_dir).name
    here = page.file.src_uri
    origin = _to_repository_path(here, docs)

    def replace(match: re.Match[str]) -> str:
        target = _resolve(repository, origin, match[2])
        if target is None:
            return match[0]
        uri = _to_site_uri(repository, docs, target)
        return f"{match[1]}{relpath(uri, str(PurePosixPath(here).parent))}{match[3]}"

    pieces, end = [], 0
    for code in _CODE.finditer(markdown):
        pieces += [_LINK.sub(replace, markdown[end : code.start()]), code[0]]
        end = code.end()
    return "".join([*pieces, _LINK.sub(replace, markdown[end:])])


def _find_repository_targets(repository: Path, docs: str, origin: str, text: str) -> list[str]:
    """Return the linked files and directories outside docs/, relative to the repository."""
    targets = [
        _resolve(repository, origin, match[2]) for match in _LINK.finditer(_CODE.sub("", text))
    ]
    return [target for target in targets if target and target.partition("/")[0] != docs]


def _resolve(repository: Path, origin: str, link: str) -> str | None:
    """Return the repository path of a relative link in the file `origin`, if it exists."""
    if re.match(r"[a-z]+:", link):
        return None
    base = origin if (repository / origin).is_dir() else str(PurePosixPath(origin).parent)
    target = normpath(f"{base}/{link}")
    return target if not target.startswith("..") and (repository / target).exists() else None


def _to_repository_path(uri: str, docs: str) -> str:
    """Return the repository path of a page of the site."""
    if not uri.startswith(f"{_ROOT}/"):
        return f"{docs}/{uri}"
    path = uri.removeprefix(f"{_ROOT}/")
    return path.removesuffix("/index.md").removesuffix(".source.md")


def _to_site_uri(repository: Path, docs: str, target: str) -> str:
    """Return the source URI of the page or copy of a file of the repository."""
    path = repository / target
    if target.partition("/")[0] == docs and (path.suffix in {".md", *_COPIED}):
        return target.removeprefix(f"{docs}/")
    if path.is_dir():
        return f"{_ROOT}/{target}/index.md"
    if path.suffix == ".md" or path.suffix in _COPIED:
        return f"{_ROOT}/{target}"
    return f"{_ROOT}/{target}.source.md"


def _render(repository: Path, target: str) -> str:
    """Return the Markdown of the page of a file or directory of the repository."""
    path = repository / target
    if path.is_dir():
        hidden = {"__init__.py", "__pycache__"}
        names = sorted(item.name for item in path.iterdir() if item.name not in hidden)
        lines = "".join(f"* [{name}]({name})\n" for name in names if not name.startswith("."))
        return f"{_NOT_SEARCHED}# {target}/\n\n{lines}"
    if path.suffix == ".md":
        return path.read_text()
    language = {".py": "python", ".yaml": "yaml", ".js": "javascript"}.get(path.suffix, "text")
    return f"{_NOT_SEARCHED}# {target}\n\n`````{language}\n{path.read_text()}\n`````\n"
