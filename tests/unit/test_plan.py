"""The entry as a user meets it: tables, JSON, figures, typos."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hlat import plan

REPOSITORY = Path(__file__).resolve().parent.parent.parent
FEW = ("trials=20",)


def test_without_a_command_it_tells_the_commands(capsys):
    assert plan.main([]) == 0
    assert "failures   uptime, goodput" in capsys.readouterr().out


def test_help_names_every_key(capsys):
    with pytest.raises(SystemExit) as end:
        plan.main(["failures", "--help"])
    assert end.value.code == 0
    out = capsys.readouterr().out
    for key in ("scenario", "nodes", "mtbf_h", "save_write_s", "every_steps", "steps"):
        assert re.search(rf"^  {key} ", out, re.MULTILINE)


def test_the_table_has_formula_simulation_and_sources(capsys):
    assert plan.main(["failures", "nodes=128", *FEW]) == 0
    out = capsys.readouterr().out
    assert out.startswith("128 nodes, together a failure every 23 h 2 min; 429,153 steps of 3.303")
    assert re.search(r"^uptime +97\.86% +9\d\.\d\d% +9\d\.\d\d% to 9\d\.\d\d%$", out, re.MULTILINE)
    assert re.search(r"^nodes=128 +given$", out, re.MULTILINE)
    assert re.search(r"^restart_s=420 +assumed: ", out, re.MULTILINE)
    assert "this interval   1,000 steps, 55 min 3 s: loses" in out


def test_an_interval_that_loses_nothing_is_told_as_such(capsys):
    assert plan.main(["failures", "every_steps=1350", "nodes=1", *FEW]) == 0
    assert "this interval   1,350 steps, 1 h 14 min: loses 1.01 points" in capsys.readouterr().out
    assert plan.main(["failures", "every_steps=1350", *FEW]) == 0
    assert "this interval   1,350 steps, 1 h 14 min: as good\n" in capsys.readouterr().out


def test_json_has_every_number_and_flags_stand_anywhere(capsys):
    words = ["failures", "scenario=manual", "--json", "trials=200", "seed=3"]
    assert plan.main(words) == 0
    out = capsys.readouterr().out
    told = json.loads(out)
    assert told["scenario"]["mtbf_h"] == {
        "value": 2950,
        "source": "fitted to 77.83% of scenario=manual",
    }
    assert told["formula"]["uptime"] == pytest.approx(0.7783, abs=1e-4)
    simulation = told["simulation"]
    assert simulation["trials"] == 200
    off = simulation["mean"]["uptime"] - told["formula"]["uptime"]
    assert abs(off) < 4 * simulation["standard_error"]["uptime"]
    parts = set(told["formula"]) - {"uptime", "wall_s", "failures"}
    for shares in (told["formula"], simulation["mean"]):
        assert sum(shares[part] for part in parts) == pytest.approx(1)
    interval = told["interval"]
    assert interval["loses_goodput"] == pytest.approx(
        interval["best_goodput"] - interval["current_goodput"]
    )
    assert plan.main(words) == 0
    assert capsys.readouterr().out == out


@pytest.mark.parametrize("ending", ["svg", "png"])
def test_the_figure_is_drawn(tmp_path, capsys, ending):
    file = tmp_path / f"goodput.{ending}"
    assert plan.main(["failures", "--figure", str(file), *FEW]) == 0
    assert capsys.readouterr().err == f"drew {file}\n"
    content = file.read_bytes()
    if ending == "png":
        assert content.startswith(b"\x89PNG")
    else:
        text = content.decode()
        assert "best: 1 h 13 min" in text
        assert "this: 55 min 3 s" in text
        assert not re.search(r"#0000\d", text), "a placeholder colour was left"


@pytest.mark.parametrize(
    "words",
    [
        ("save_stall_s=0",),
        ("mtbf_h=1e9",),
        ("nodes=2000", "every_steps=1"),
        ("save_write_s=3303",),
        ("steps=1000",),
        ("step_s=1e-4", "save_stall_s=0"),
    ],
)
def test_the_figure_copes_with_extremes(tmp_path, capsys, words):
    file = tmp_path / "goodput.svg"
    assert plan.main(["failures", "--figure", str(file), *FEW, *words]) == 0
    assert file.is_file()


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("fialures", "fialures cannot be planned; did you mean failures?"),
        ("throughput", "throughput cannot be planned; commands: failures"),
        ("failures scenario=manul", "scenario=manul does not exist; did you mean manual?"),
        ("failures --figure x.pdf", "--figure x.pdf must end in .png or .svg"),
        (
            "failures save_write_s=5000",
            "save_write_s=5000 is longer than the 3303 s from a save to the next; use every_steps=1514 or more",
        ),
    ],
)
def test_a_mistake_is_told_in_a_line_and_exits_with_2(capsys, words, problem):
    assert plan.main(words.split()) == 2
    told = capsys.readouterr()
    assert told.err == problem + "\n"
    assert told.out == ""


@pytest.mark.parametrize(
    ("words", "problems"),
    [
        ("nods=3", ["nods=3 is no setting; did you mean nodes=?"]),
        ("nodes", ["nodes: needs a whole number above 0"]),
        ("nodes=1.5", ["nodes=1.5: needs a whole number above 0, such as 2"]),
        ("nodes=-1.5", ["nodes=-1.5: needs a whole number above 0"]),
        ("nodes=1 nodes=2", ["nodes= is given twice"]),
        ("mtbf_h=inf", ["mtbf_h=inf: needs a number above 0"]),
        ("load_s=-1", ["load_s=-1: needs a number of 0 or more"]),
        ("load_s=1min", ["load_s=1min: needs a number of 0 or more"]),
        (
            "trials=0 every_steps=x",
            [
                "trials=0: needs a whole number above 0",
                "every_steps=x: needs a whole number above 0",
            ],
        ),
    ],
)
def test_every_setting_that_cannot_be_used_is_told(capsys, words, problems):
    with pytest.raises(SystemExit) as end:
        plan.main(["failures", *words.split()])
    assert end.value.code == 2
    told = capsys.readouterr().err
    assert told == "".join(f"hlat.plan failures: {problem}\n" for problem in problems)


def test_a_misspelled_flag_names_the_near_one(capsys):
    with pytest.raises(SystemExit) as end:
        plan.main(["failures", "--fgure", "x.svg"])
    assert end.value.code == 2
    assert "did you mean --figure?" in capsys.readouterr().err


def test_a_folder_that_is_missing_is_told(tmp_path, capsys):
    file = tmp_path / "no" / "goodput.svg"
    assert plan.main(["failures", "--figure", str(file), *FEW]) == 1
    assert capsys.readouterr().err == (
        f"--figure {file} cannot be written (No such file or directory)\n"
    )


def test_no_torch_and_for_help_nothing_heavy():
    program = (
        "import sys; from hlat import plan; plan.main([])\n"
        "assert not {'numpy', 'matplotlib', 'hydra'} & set(sys.modules)\n"
        "plan.main(['failures', 'trials=5'])\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["manual", "automatic"])
def test_the_documentation_shows_what_it_prints(capsys, name):
    assert plan.main(["failures", f"scenario={name}"]) == 0
    shown = (REPOSITORY / "docs/failures.md").read_text()
    for line in capsys.readouterr().out.splitlines():
        told = re.sub(r"%? +\S+ +\S+ to \S+$", "", line)  # without what is drawn
        assert told in shown
