"""benchmarks/gpu/run.py records failures and continues; its page contains all measurements."""

import json
import time
import zipfile

import pytest

from benchmarks.gpu import render, run

OUTPUT = """\
tests/cuda/test_step.py::test_a[documents and window] PASSED             [ 25%]
tests/cuda/test_step.py::test_b[fp32] FAILED                             [ 50%]
tests/cuda/test_step.py::test_c SKIPPED (no CUDA device)                 [ 75%]
tests/cuda/test_step.py::test_d """


@pytest.fixture
def settings(tmp_path):
    return run.Settings("cpu", ["tiny"], ["bf16"], 0.1, None, tmp_path, {})


def test_a_part_that_fails_is_recorded_and_the_next_one_runs(settings, monkeypatch):
    def fail(settings, deadline, record):
        record({"rows": []})
        raise RuntimeError("no device")

    def succeed(settings, deadline, record):
        return {"seconds_left": deadline - time.monotonic()}

    monkeypatch.setattr(run, "PARTS", {"first": (fail, 0.25), "second": (succeed, 0.75)})
    result = {"device": "cpu", "third": {"kept": 1}}
    run.run_parts(settings, ["first", "second"], 1.0, result)
    written = json.loads((settings.output / "result.json").read_text())
    assert written == result
    assert "RuntimeError: no device" in written["first"]["failure"]
    assert 45 < written["second"]["seconds_left"] <= 60 - run.PAGE_SECONDS
    assert written["third"] == {"kept": 1}


@pytest.mark.slow
def test_a_script_that_exceeds_its_time_is_killed(settings, monkeypatch, tmp_path):
    (tmp_path / "slow.py").write_text("import time; time.sleep(60)")
    (tmp_path / "wrong.py").write_text("raise ValueError('of the script')")
    (tmp_path / "right.py").write_text("import json; print('RESULT', json.dumps({'value': 1}))")
    monkeypatch.setattr(run, "HERE", tmp_path)
    deadline = time.monotonic() + 10
    assert run.Script(settings, "right.py").read_result(deadline) == {"value": 1}
    failure = run.Script(settings, "wrong.py").read_result(deadline)
    assert failure == {"failure": "ValueError: of the script"}
    start = time.monotonic()
    assert run.Script(settings, "slow.py").read_result(start) == {
        "failure": "not finished after 1 s"
    }
    assert time.monotonic() - start < 30


def test_tests_are_counted_though_the_run_was_killed():
    found = run.parse_tests(OUTPUT)
    assert found["counts"] == {"PASSED": 1, "FAILED": 1, "ERROR": 0, "SKIPPED": 1}
    assert found["failed"] == ["tests/cuda/test_step.py::test_b[fp32]"]


def test_contestants_after_the_deadline_are_recorded_as_not_started(settings):
    rows = run.measure_steps(settings, time.monotonic() - 1, lambda value: None)["rows"]
    assert [row["contestant"] for row in rows] == [
        run.MATMUL,
        *(name for names in reversed(run.CONTESTANTS) for name in names),
    ]
    assert all("not started" in row["failure"] for row in rows)


def test_a_later_call_keeps_rows_that_it_did_not_measure():
    row = {"contestant": "ours", "shape": "1b", "recipe": "bf16"}
    before = {"rows": [row | {"first_loss": 1.0}, row | {"shape": "3b", "first_loss": 2.0}]}
    new = {"rows": [row | {"failure": "not started"}, row | {"shape": "3b", "first_loss": 3.0}]}
    merged = run.merge_part("step", before, new)["rows"]
    assert [each["first_loss"] for each in merged] == [1.0, 3.0]


@pytest.mark.slow
def test_missing_packages_are_installed_from_wheels(tmp_path):
    wheels, target = tmp_path / "wheels", tmp_path / "target"
    wheels.mkdir()
    for name in ("hlat_absent_package", "numpy"):
        with zipfile.ZipFile(wheels / f"{name}-1.0-py3-none-any.whl", "w") as archive:
            information = f"{name}-1.0.dist-info"
            archive.writestr(f"{name}.py", "value = 1")
            archive.writestr(
                f"{information}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
            )
            archive.writestr(
                f"{information}/WHEEL",
                "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
            )
            archive.writestr(f"{information}/RECORD", "")
    assert run.install_missing_packages(wheels, target) == [
        "hlat_absent_package-1.0-py3-none-any.whl"
    ]
    assert (target / "hlat_absent_package.py").exists()
    assert not (target / "numpy.py").exists()


def test_the_page_shows_measurements_and_failures():
    spread = {"median": 1e5, "min": 9e4, "max": 1.1e5}
    row = {
        "contestant": "ours, compiled",
        "shape": "1b",
        "recipe": "bf16",
        "tokens_per_second": spread,
    }
    row |= {"flops_per_token": 5e9, "peak_bytes": 10**10, "planned_bytes": 9 * 10**9}
    row |= {"first_step_seconds": 12.0, "same_loss": True}
    slow = {
        "contestant": "transformers",
        "shape": "1b",
        "recipe": "bf16",
        "failure": "out of memory",
    }
    matmul = {"contestant": "matmul", "shape": "1b", "recipe": "bf16", "flops_per_second": 8e14}
    result = {
        "device": "cuda",
        "environment": {"failure": "no nvidia-smi", "device": {"peak_flops": 1e15}},
        "step": {"rows": [matmul, row, slow]},
        "loader": {"shape": "1b", "workers": 1, "tokens_per_second": 10**6},
    }
    page = render.render(result)
    assert (
        "| ours, compiled | 100,000 (90,000 to 110,000) | 50.0% | 62.5% | 10.00 | 9.00 | 12.0 | same |"
        in page
    )
    assert "| transformers | out of memory |" in page
    assert "10.0 times what the fastest step of shape `1b` consumes" in page
    assert "no nvidia-smi" in page
    assert page.count(render.NOT_MEASURED) == 3
    assert len(render.draw_mfu(result).axes[0].patches) == 1
