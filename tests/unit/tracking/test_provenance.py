"""Tests of code revision, packages and host."""

import subprocess
from importlib import metadata

from hlat.tracking import provenance


def test_provenance_contains_revision_packages_and_data(tmp_path):
    collected = provenance.collect_provenance("cpu", {"data.tokenizer": "abc"}, tmp_path)
    assert collected["device"] == "cpu"
    assert collected["data"] == {"data.tokenizer": "abc"}
    assert collected["packages"]["torch"].startswith("2.")
    assert collected["hosts"][0]
    assert collected["prediction"] is None
    head = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=provenance._PACKAGE_DIR, capture_output=True, text=True
    )
    assert collected["git_revision"] == (head.stdout.strip() if head.returncode == 0 else None)


def test_revision_is_none_without_git(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", "")
    assert provenance.collect_provenance("cpu", {}, tmp_path)["git_revision"] is None


def test_packages_have_the_names_and_versions_of_their_metadata(monkeypatch, tmp_path):
    package = tmp_path / "some_package-1.0.dist-info"
    package.mkdir()
    lines = ("Name: Some.Package", "Version: 1.0", "Summary: Name: x", "", "Name: of the text", "")
    (package / "METADATA").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(tmp_path)
    provenance._list_packages.cache_clear()
    packages = dict(provenance._list_packages())
    provenance._list_packages.cache_clear()
    assert packages["Some.Package"] == "1.0"
    distributions = [one.metadata for one in metadata.distributions()]
    assert packages == {one["Name"]: one["Version"] for one in distributions}
