"""Values of the environment are replaced in text, in all forms in which they are written."""

import contextlib
import html
import io
import json
import subprocess
import sys

import pytest
from omegaconf import OmegaConf

from hlat.config import redaction

SECRET = 'a "quoted"/path & <more>\nsecond line'


@pytest.fixture(autouse=True)
def recorded(monkeypatch):
    """Resolve two secrets, a public variable and a short value in a configuration."""
    for name, value in {"A_SECRET": SECRET, "OTHER": "s3://bucket/x/", "SHORT": "abc"}.items():
        monkeypatch.setenv(name, value)
    expressions = ["${oc.env:A_SECRET}", "x${oc.env:OTHER}y", "${oc.env:SHORT}", "${oc.env:HOME}"]
    redaction.install_resolver()
    with contextlib.redirect_stdout(sys.stdout), contextlib.redirect_stderr(sys.stderr):
        assert OmegaConf.create(expressions)[0] == SECRET
        OmegaConf.to_container(OmegaConf.create(expressions), resolve=True)
        yield


@pytest.mark.parametrize(
    "text",
    [SECRET, repr(SECRET), json.dumps(SECRET), html.escape(SECRET), *SECRET.splitlines()],
)
def test_redact_all_forms(text):
    redacted = redaction.redact_text(f"before {text} after")
    assert redacted.replace('"', "").replace("'", "") == "before ${oc.env:A_SECRET} after"


def test_redact_paths_and_data():
    text = "s3://bucket/x and bucket/x/y of s3://bucket/x/"
    expression = "${oc.env:OTHER}"
    redacted = f"{expression} and {expression}/y of {expression}/"
    assert redaction.redact_text(text) == redacted
    data = {"bucket/x": [text, 3, None, ("second line",)]}
    assert redaction.redact_data(data) == {"bucket/x": [redacted, 3, None, ["${oc.env:A_SECRET}"]]}


def test_keep_short_and_public_values(monkeypatch):
    home = redaction.os.environ["HOME"]
    assert redaction.redact_text(f"abc {home}") == f"abc {home}"


def test_expand_redacted_text():
    redacted = redaction.redact_text("s3://bucket/x/y")
    assert redacted == "${oc.env:OTHER}/y"
    assert redaction.expand_text(redacted) == "s3://bucket/x/y"
    assert redaction.expand_text("${oc.env:MISSING_ONE}/y") == "${oc.env:MISSING_ONE}/y"
    assert redaction.uses_other_variables("${oc.env:MISSING_ONE}/y")
    assert not redaction.uses_other_variables("${oc.env:OTHER}/y")


def test_redact_streams():
    with contextlib.redirect_stderr(io.StringIO()) as stream:
        redaction.record_variables(["OTHER"])
        print("at", "s3://bucket/x/", file=sys.stderr)
        sys.stderr.writelines(["bucket/x\n"])
    assert stream.getvalue() == "at ${oc.env:OTHER}/\n${oc.env:OTHER}\n"


def test_redact_tracebacks():
    program = (
        "from hlat.config import redaction\n"
        "redaction.record_variables(['A_SECRET'])\n"
        "raise ValueError(redaction.os.environ['A_SECRET'])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.endswith("ValueError: ${oc.env:A_SECRET}\n")
