"""`python -m hlat.prepare` says what the embedded corpus holds, as often as it is asked."""

from pathlib import Path

import pytest

from hlat import prepare


def test_sources_rows_sizes_and_place_are_printed(embedded_folder: Path, capsys) -> None:
    assert prepare.main([]) == 0
    first = capsys.readouterr().out
    assert prepare.main([]) == 0
    assert capsys.readouterr().out == first
    lines = first.splitlines()
    assert str(embedded_folder) in lines[0]
    assert [line.split()[0] for line in lines[1:]] == [
        "embedded:code",
        "embedded:data",
        "embedded:prose",
    ]
    assert all("rows" in line and line.endswith("MB") for line in lines[1:])


def test_a_cache_that_cannot_be_written_is_exit_code_2(monkeypatch, tmp_path, capsys) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HLAT_CACHE", str(tmp_path / "file"))
    assert prepare.main([]) == 2
    assert "HLAT_CACHE" in capsys.readouterr().err


def test_help_names_the_folder(capsys) -> None:
    with pytest.raises(SystemExit) as exit_:
        prepare.main(["--help"])
    assert exit_.value.code == 0
    assert "HLAT_CACHE" in capsys.readouterr().out
