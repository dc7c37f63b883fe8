"""Location of keys in YAML files."""

import pytest

from hlat.config import config_files

TEXT = """\
# @package _global_
phase:
  timeline:
    - {name: a, tokens: 1}
    - name: b
      token: 2
"""


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("phase", ("phase", 2)),
        ("phase.timeline[1].token", ("phase.timeline.1.token", 6)),
        ("experiment.phase.timeline", ("phase.timeline", 3)),
        ("phase.timeline[2].token", None),
        ("batch", None),
    ],
)
def test_line_of_a_key(tmp_path, key, expected):
    path = tmp_path / "x.yaml"
    path.write_text(TEXT)
    assert config_files.find_key(path, key) == expected
    assert config_files.find_package(path) == "_global_"


@pytest.mark.parametrize("content", [b"a: [", b"\xff", b""])
def test_no_line_in_a_file_that_is_not_yaml(tmp_path, content):
    path = tmp_path / "x.yaml"
    path.write_bytes(content)
    assert config_files.find_key(path, "a.b") is None
    assert config_files.find_package(path) is None
