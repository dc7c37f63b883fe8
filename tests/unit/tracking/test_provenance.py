"""Code, packages and host of a run."""

import subprocess

from hlat.tracking import provenance


def test_it_names_revision_packages_and_data():
    found = provenance.collect("cpu", {"data.tokenizer": "abc"})
    assert found["device"] == "cpu"
    assert found["data"] == {"data.tokenizer": "abc"}
    assert found["packages"]["torch"].startswith("2.")
    assert found["hosts"][0]
    head = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=provenance._PACKAGE, capture_output=True, text=True
    )
    assert found["git_revision"] == (head.stdout.strip() if head.returncode == 0 else None)


def test_a_machine_without_git_has_no_revision(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert provenance.collect("cpu", {})["git_revision"] is None
