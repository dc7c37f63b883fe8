"""What supervisors leave in the temporary folder, and who clears it away."""

import fcntl
import tempfile

from hlat.recovery.supervisor import _record_folder


def test_folders_of_dead_supervisors_go_and_those_of_others_stay(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in (
        "hlat-supervisor-dead",
        "hlat-supervisor-alive",
        "hlat-supervisor-begun",
        "hlat-x",
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "0.pulse").touch()
    (tmp_path / "hlat-supervisor-dead/alive").touch()
    with (tmp_path / "hlat-supervisor-alive/alive").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with _record_folder() as own:
            names = {path.name for path in tmp_path.iterdir()}
            assert names == {
                "hlat-supervisor-alive",
                "hlat-supervisor-begun",
                "hlat-x",
                own.name,
            }
            with _record_folder() as other:
                assert other != own
            assert own.exists()
    assert not own.exists()
