"""The audit of the lock files finds a planted version without network."""

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

SCRIPT = Path(__file__).resolve().parent.parent.parent / "supply_chain/audit.py"


def record(identifier: str, package: str, **affected: object) -> dict[str, object]:
    return {
        "id": identifier,
        "modified": "2026-03-04T05:06:07Z",
        "summary": f"problem {identifier}",
        "affected": [{"package": {"ecosystem": "PyPI", "name": package}, **affected}],
    }


def between(introduced: str, end: str, end_event: str = "fixed") -> dict[str, object]:
    events = [{end_event: end}, {"introduced": introduced}]
    return {"ranges": [{"type": "ECOSYSTEM", "events": events}]}


RECORDS = [
    record("A-1", "Planted_Package", versions=["1.0", "not a version"]),
    record("A-2", "planted-package", **between("0", "2.0")),
    record("A-3", "planted.package", **between("1.5", "2.5", "last_affected")),
    record("A-4", "another", **between("0", "99")),
    {**record("A-5", "planted-package", **between("0", "99")), "withdrawn": "2026-01-01T00:00:00Z"},
]


@pytest.fixture
def advisories(tmp_path: Path) -> Path:
    """Return an archive with records in both formats, and a file that is not a record."""
    path = tmp_path / "advisories.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for number, one in enumerate(RECORDS):
            if number % 2:
                archive.writestr(f"main/vulns/{one['id']}.yaml", yaml.safe_dump(one))
            else:
                archive.writestr(f"{one['id']}.json", json.dumps(one))
        archive.writestr("main/README.md", "advisories")
    return path


def audit(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run the script where a connection is an error."""
    code = (
        "import runpy, socket, sys\n"
        "def refuse(*_): raise AssertionError('the audit opened a socket')\n"
        "socket.socket = socket.create_connection = refuse\n"
        "sys.argv = sys.argv[1:]\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    command = [sys.executable, "-c", code, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("version", "found"),
    [
        ("1.0", ["A-1", "A-2"]),
        ("1.0.0", ["A-1", "A-2"]),
        ("1.9", ["A-2", "A-3"]),
        ("2.0", ["A-3"]),
        ("2.5", ["A-3"]),
        ("2.6", []),
    ],
)
def test_a_planted_version_is_found(
    tmp_path: Path, advisories: Path, version: str, found: list[str]
) -> None:
    lock = tmp_path / "lock.txt"
    lock.write_text(
        f"planted-package=={version} ; python_version < '3.11' \\\n    --hash=sha256:00\n"
        "harmless==1.0\n"
    )
    done = audit(advisories, lock)
    first, *lines, last = done.stdout.splitlines()
    assert first.startswith(f"{advisories}: 5 advisories, the newest of 2026-03-04 (")
    assert [line.split(": ")[:2] for line in lines] == [
        [f"planted-package {version}", identifier] for identifier in found
    ]
    assert last == f"2 locked packages, {len(found)} vulnerabilities"
    assert done.returncode == (1 if found else 0), done.stderr


def test_an_accepted_advisory_is_ignored(tmp_path: Path, advisories: Path) -> None:
    lock = tmp_path / "lock.txt"
    lock.write_text("planted-package==2.0\n")
    assert audit(advisories, lock, "--ignore", "A-3").returncode == 0


def test_the_lock_files_are_read_by_default(advisories: Path) -> None:
    done = audit(advisories)
    assert done.returncode == 0, done.stdout
    assert int(done.stdout.splitlines()[-1].split()[0]) > 200


@pytest.mark.parametrize("content", [b"", b"no archive"])
def test_an_unusable_database_is_an_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "advisories.zip"
    path.write_bytes(content)
    assert audit(path).returncode == 2


def test_an_archive_without_records_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "advisories.zip"
    zipfile.ZipFile(path, "w").close()
    done = audit(path)
    assert done.returncode == 2
    assert "found no OSV record" in done.stderr
