"""Compare the locked packages with a file of advisories, without network: `make audit`.

The file is a zip archive of OSV records, such as the export of OSV for PyPI (JSON) or an archive of
the PyPA advisory database (YAML). The exit code is 1 if a locked version has a vulnerability, and 2
if a file cannot be read.
"""

import argparse
import json
import re
import sys
import zipfile
from collections.abc import Iterable, Iterator
from datetime import date
from pathlib import Path
from typing import Any

import yaml
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

LOCKS = Path(__file__).resolve().parent
SOURCES = """\
sources of such a file:
  https://osv-vulnerabilities.storage.googleapis.com/PyPI/all.zip
  https://github.com/pypa/advisory-database/archive/refs/heads/main.zip"""
_PIN = re.compile(r"^([A-Za-z0-9][\w.-]*)==([^\s;\\]+)", re.MULTILINE)
_YAML_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def main() -> int:
    """Print the date of the advisories and each vulnerable package; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=SOURCES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("advisories", type=Path, help="zip archive of OSV records")
    locks = sorted(LOCKS.glob("*.txt"))
    parser.add_argument("locks", nargs="*", type=Path, default=locks, help="default: all locks")
    parser.add_argument("--ignore", action="append", default=[], metavar="ID")
    arguments = parser.parse_args()
    try:
        pins = {pin for lock in arguments.locks for pin in parse_pins(lock.read_text())}
        names = {name for name, _ in pins}
        num_records, newest, records = read_records(arguments.advisories, names)
    except (OSError, ValueError, zipfile.BadZipFile, yaml.YAMLError) as error:
        parser.error(str(error))
    if not num_records or not pins:
        empty = "OSV record" if pins else "pinned package"
        parser.error(f"found no {empty}; give a zip archive of OSV records and lock files")
    newest, age = newest[:10], (date.today() - date.fromisoformat(newest[:10])).days
    name = arguments.advisories
    print(f"{name}: {num_records} advisories, the newest of {newest} ({age} days old)")
    found = [*find_vulnerabilities(pins, records, set(arguments.ignore))]
    for line in found:
        print(line)
    print(f"{len(pins)} locked packages, {len(found)} vulnerabilities")
    return 1 if found else 0


def parse_pins(lock: str) -> Iterator[tuple[str, str]]:
    """Yield canonical name and version of each package in a lock file, for every environment."""
    for name, version in _PIN.findall(lock):
        yield canonicalize_name(name), version


def read_records(
    archive_path: Path, names: set[str]
) -> tuple[int, str, list[tuple[str, dict[str, Any]]]]:
    """Return the number of records, the newest date of change, and the records of packages.

    Each returned record has the canonical name of the package that it affects.
    """
    num_records, newest, selected = 0, "", list[tuple[str, dict[str, Any]]]()
    with zipfile.ZipFile(archive_path) as archive:
        for entry in archive.namelist():
            record = _parse_record(entry, archive.read(entry))
            if record is None:
                continue
            num_records += 1
            newest = max(newest, str(record["modified"]))
            affected = {
                canonicalize_name(one["package"]["name"])
                for one in record.get("affected", ())
                if one.get("package", {}).get("ecosystem") == "PyPI"
            }
            selected += [(name, record) for name in sorted(affected & names)]
    return num_records, newest, selected


def find_vulnerabilities(
    pins: Iterable[tuple[str, str]], records: list[tuple[str, dict[str, Any]]], ignored: set[str]
) -> Iterator[str]:
    """Yield a line for each package and advisory that affects its version."""
    for name, version in sorted(pins):
        for affected_name, record in records:
            ids = {record["id"], *record.get("aliases", ())}
            if affected_name != name or "withdrawn" in record or ids & ignored:
                continue
            if any(_is_affected(one, name, version) for one in record["affected"]):
                summary = record.get("summary") or record.get("details", "")
                title = " ".join(summary.split())[:120]
                yield f"{name} {version}: {', '.join(sorted(ids))}: {title}"


def _parse_record(entry: str, content: bytes) -> dict[str, Any] | None:
    """Return the OSV record in a file of the archive; None if it is another file."""
    if entry.endswith(".json"):
        record = json.loads(content)
    elif entry.endswith(".yaml"):
        record = yaml.load(content, _YAML_LOADER)  # noqa: S506  # a safe loader
    else:
        return None
    return record if isinstance(record, dict) and {"id", "modified"} <= record.keys() else None


def _is_affected(affected: dict[str, Any], name: str, version: str) -> bool:
    """Return True if an entry of `affected` lists the version, or one of its ranges contains it."""
    if canonicalize_name(affected.get("package", {}).get("name", "")) != name:
        return False
    installed = Version(version)
    for listed in affected.get("versions", ()):
        try:
            if Version(str(listed)) == installed:
                return True
        except InvalidVersion:
            continue  # versions that predate PEP 440
    ranges = [one for one in affected.get("ranges", ()) if one.get("type") == "ECOSYSTEM"]
    return any(_is_in_range(one["events"], installed) for one in ranges)


def _is_in_range(events: list[dict[str, str]], installed: Version) -> bool:
    """Return True if the events `introduced`, `fixed` and `last_affected` include the version.

    Algorithm: https://ossf.github.io/osv-schema/#evaluation, with `introduced: 0` as the start.
    """
    is_vulnerable = False
    for event in sorted(events, key=lambda event: Version(str(next(iter(event.values()))))):
        (kind, text), *_ = event.items()
        bound = Version(str(text))
        if kind == "introduced" and installed >= bound:
            is_vulnerable = True
        elif (kind == "fixed" and installed >= bound) or (
            kind == "last_affected" and installed > bound
        ):
            is_vulnerable = False
    return is_vulnerable


if __name__ == "__main__":
    sys.exit(main())
