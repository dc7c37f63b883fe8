"""Tests of code revision, packages and host."""

import subprocess

from hlat.tracking import provenance


def test_provenance_contains_revision_packages_and_data():
    collected = provenance.collect_provenance("cpu", {"data.tokenizer": "abc"})
    assert collected["device"] == "cpu"
    assert collected["data"] == {"data.tokenizer": "abc"}
    assert collected["packages"]["torch"].startswith("2.")
    assert collected["hosts"][0]
    head = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=provenance._PACKAGE_DIR, capture_output=True, text=True
    )
    assert collected["git_revision"] == (head.stdout.strip() if head.returncode == 0 else None)


def test_revision_is_none_without_git(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert provenance.collect_provenance("cpu", {})["git_revision"] is None
