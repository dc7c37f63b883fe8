"""Files of an attacker are rejected with a message or read as data; their code never runs.

The hashes of a checkpoint do not identify its writer: these files are hostile, and every hash
matches.
"""

import contextlib
import hashlib
import io
import json
import os
import pickle
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hlat import export
from hlat.checkpoint import __main__ as checkpoint_command
from hlat.checkpoint import checkpoint_store
from hlat.checkpoint.checkpoint_errors import CorruptCheckpointError
from hlat.checkpoint.hugging_face import pretrained_files, pretrained_weights
from hlat.config.config_errors import ConfigError
from hlat.config.resolve import resolve_config
from hlat.data import prompt_tokenizer
from hlat.data.tokenizer import EMBEDDED_EOS_TOKEN, EMBEDDED_FILE, Tokenizer
from hlat.inference import model_metadata
from hlat.report import __main__ as report

STEP = "checkpoints/step_00000010"
DEEP = b"[" * 100_000
HUGE = 10**30
TOKENIZER = ["--tokenizer", str(EMBEDDED_FILE)]
EVERY_NTH = 6
pytestmark = pytest.mark.usefixtures("without_figures")


class Payload:
    """Object that creates a folder when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self._trace = trace

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.mkdir, (str(self._trace),)


def refuses(act: Callable[[], object], with_what: type[ConfigError] = ConfigError) -> bool:
    """Return True if `act` raises this error."""
    try:
        act()
    except with_what:
        return True
    return False


def replace_value(document: Any, keys: list[Any], value: Any) -> bytes:
    """Return the JSON of a document with another value at the end of `keys`."""
    copy = json.loads(json.dumps(document))
    part = copy
    for key in keys[:-1]:
        part = part[key]
    part[keys[-1]] = value
    return json.dumps(copy).encode()


def states(state: Any) -> dict[str, bytes]:
    """Return hostile contents of state.json."""
    cases = {"deep": DEEP, "list": b"[]", "nan": b"NaN", "key": b'{"x": 1}', "NUL": b"\0"}
    values: list[tuple[list[Any], list[Any]]] = [
        (["step"], ["5", -5, HUGE]),
        (["fixed"], [[]]),
        (["fixed", "model.name"], ["${oc.env:PATH}"]),
        (["fixed", "model.hidden_size"], [-64]),
        (["fixed", "model.num_layers"], [10**12]),
        (["data"], [{}, {"version": 2}]),
        (["data", "streams"], [{"0": [HUGE]}, []]),
        (["data", "stage"], [None]),
        (["data", "chapters"], [[["x"]]]),
        (["data", "fingerprint"], [[1]]),
        (["adjustable"], [[1]]),
    ]
    for keys, several in values:
        cases |= {f"{keys}={value!r}": replace_value(state, keys, value) for value in several}
    return cases


def manifests(manifest: Any) -> dict[str, bytes]:
    """Return hostile contents of manifest.json."""
    name = next(iter(manifest["tensors"]))
    tensor = ["tensors", name]
    piece = [*tensor, "slices", 0]
    nowhere = {"size": 0, "sha256": ""}
    values: list[tuple[list[Any], list[Any]]] = [
        (["step"], ["5", [5], float("nan"), True]),
        (["files", "../x"], [nowhere]),
        (["files", "/etc/passwd"], [nowhere]),
        (["files", ".."], [nowhere]),
        (["files", "a\0b"], [nowhere]),
        (["files", "state.json", "size"], ["1", 1.5, -1]),
        (["files", "state.json", "sha256"], [None]),
        ([*tensor, "shape"], ["xx", [-1, 64], [2**62, 2**62], [[1]], [HUGE, HUGE]]),
        ([*tensor, "dtype"], ["X9", []]),
        ([*tensor, "slices"], [None, []]),
        ([*piece, "offset"], [["a", "b"], [0], [-1, 0], [False, False]]),
        ([*piece, "size"], [[1.5, 2], [HUGE, 64], [2**40, 2**40]]),
        ([*piece, "file"], [1, [], "state.json", "../x"]),
    ]
    cases = {"deep": DEEP, "list": b"[]"}
    for keys, several in values:
        cases |= {f"{keys}={value!r}": replace_value(manifest, keys, value) for value in several}
    return cases


def tensor_files(content: bytes) -> dict[str, bytes]:
    """Return hostile contents of a safetensors file."""
    length = int.from_bytes(content[:8], "little")
    header, body = json.loads(content[8 : 8 + length]), content[8 + length :]
    name = next(key for key in header if key != "__metadata__")

    def file(head: bytes, rest: bytes = b"") -> bytes:
        return len(head).to_bytes(8, "little") + head + rest

    cases = {
        "empty": b"",
        "header of 2^63 bytes": (2**63).to_bytes(8, "little") + b"{}",
        "header of 99 MB": (99_999_999).to_bytes(8, "little") + b"{}",
        "ones": b"\xff" * 100,
        "deep": file(b'{"a":' * 100_000),
        "list": file(b"[]"),
        "nan": file(b'{"a": NaN}'),
        "no utf-8": file(b'{"\xff": 1}'),
    }
    values: list[tuple[str, list[Any]]] = [
        ("data_offsets", [[-4, 0], [0, 2**63], [4, 0], [0, 4]]),
        ("shape", [[2**40, 2**40], [-1], "x"]),
        ("dtype", ["OBJ", "F64"]),
    ]
    for key, several in values:
        for value in several:
            head = replace_value(header, [name, key], value)
            cases[f"{key}={value!r}"] = file(head, body)
    return cases


Select = Callable[[dict[str, bytes]], dict[str, bytes]]


@pytest.fixture(params=["every sixth case", pytest.param("other cases", marks=pytest.mark.slow)])
def select(request: pytest.FixtureRequest) -> Select:
    """Return a function that selects every sixth case, or the others, which take long."""
    is_default = request.param == "every sixth case"

    def select_cases(cases: dict[str, bytes]) -> dict[str, bytes]:
        numbered = enumerate(cases.items())
        return dict(case for i, case in numbered if (i % EVERY_NTH == 0) == is_default)

    return select_cases


class Victim:
    """Run with one checkpoint, which an attacker writes."""

    def __init__(self, runner: Any, trained: Path) -> None:
        self.runner = runner
        self.run = runner.folder / "runs/x"
        self._trained = trained
        self.renew()

    def renew(self) -> Path:
        """Restore the original checkpoint and remove the others."""
        shutil.rmtree(self.run, ignore_errors=True)
        shutil.copytree(self._trained, self.run)
        path: Path = self.run / STEP
        for other in path.parent.iterdir():
            if other != path:
                shutil.rmtree(other)
        return path

    def seal(self, **contents: bytes) -> None:
        """Write files (`state`, `manifest`, `rank`) and make every hash match."""
        path = self.renew()
        names = {"state": "state.json", "rank": "rank_00000.safetensors"}
        manifest = json.loads((path / "manifest.json").read_bytes())
        for part, name in names.items():
            content = contents.get(part, (path / name).read_bytes())
            (path / name).write_bytes(content)
            record = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
            manifest["files"][name] = record
        sealed = contents.get("manifest", json.dumps(manifest).encode())
        (path / "manifest.json").write_bytes(sealed)
        (path / "COMMITTED").write_text(hashlib.sha256(sealed).hexdigest())

    def assert_refused(self, case: str) -> None:
        """Assert that training, verification and export fail with a message."""
        done = self.runner.run("run.name=x", "run.steps=11")
        assert (done.returncode, "Traceback" in done.stderr) == (2, False), (case, done.stderr)
        assert done.stderr.startswith("hlat: "), case
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            code = checkpoint_command.main(["verify", str(self.run)])
        assert code == 1, case
        err = io.StringIO()
        with contextlib.redirect_stderr(err), contextlib.redirect_stdout(io.StringIO()):
            code = export.main([str(self.run), "--output", str(self.runner.folder / "out")])
        # An export does not read the data position and the adjustable settings
        if code == 0:
            assert case.startswith(("['data'", "['adjustable'")), case
            shutil.rmtree(self.runner.folder / "out")
        else:
            assert (code, len(err.getvalue()) > 20) == (2, True), (case, err.getvalue())


@pytest.fixture
def victim(runner, uninterrupted) -> Victim:
    return Victim(runner, uninterrupted.folder / "runs/whole")


def test_refuse_a_hostile_state(victim: Victim, select: Select) -> None:
    state = json.loads((victim.run / STEP / "state.json").read_bytes())
    for case, content in select(states(state)).items():
        victim.seal(state=content)
        victim.assert_refused(case)


def test_refuse_hostile_tensors(victim: Victim, select: Select) -> None:
    content = (victim.run / STEP / "rank_00000.safetensors").read_bytes()
    for case, hostile in select(tensor_files(content)).items():
        victim.seal(rank=hostile)
        victim.assert_refused(case)


@pytest.mark.slow
def test_refuse_a_hostile_manifest(victim: Victim) -> None:
    manifest = json.loads((victim.run / STEP / "manifest.json").read_bytes())
    for case, content in manifests(manifest).items():
        victim.seal(manifest=content)
        assert refuses(
            lambda: checkpoint_store.verify_checkpoint(victim.run / STEP), CorruptCheckpointError
        ), case
    victim.assert_refused(case)


def test_refuse_pickles_instead_of_files(victim: Victim, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    payload = pickle.dumps(Payload(trace))
    victim.seal(state=payload, rank=payload)
    victim.assert_refused("sealed")
    path = victim.renew()
    for name in ("COMMITTED", "manifest.json", "state.json", "rank_00000.safetensors"):
        (path / name).write_bytes(payload)
    victim.assert_refused("all")
    assert not trace.exists()


@pytest.mark.slow  # one or more whole processes
def test_refuse_a_symbolic_link_in_a_checkpoint(victim: Victim, tmp_path: Path) -> None:
    for name in ("COMMITTED", "manifest.json", "state.json", "rank_00000.safetensors"):
        path = victim.renew()
        (path / name).rename(tmp_path / "elsewhere")
        (path / name).symlink_to(tmp_path / "elsewhere")
        victim.assert_refused(name)


def test_refuse_a_hostile_checkpoint_in_start_from(victim: Victim, refused) -> None:
    state = json.loads((victim.run / STEP / "state.json").read_bytes())
    victim.seal(state=replace_value(state, ["fixed", "model.name"], "${oc.env:PATH}"))
    kept = victim.run.with_name("theirs")
    victim.run.rename(kept)
    done = victim.runner.run("run.name=y", f"checkpoint.start_from={kept / STEP}")
    refused(done, "${oc.env:PATH} is an interpolation")


@pytest.mark.slow
def test_export_a_run_with_a_hostile_configuration(
    victim: Victim, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = victim.runner.folder / "trace"
    (victim.run / "config.yaml").write_text(
        f"data: !!python/object/apply:os.mkdir ['{trace}']\n_target_: os.system\n"
    )
    out = victim.runner.folder / "out"
    assert export.main([str(victim.run), "--output", str(out)]) == 2
    assert "config.yaml: could not determine a constructor" in capsys.readouterr().err
    assert export.main([str(victim.run), "--output", str(out), *TOKENIZER]) == 0
    assert not trace.exists()


@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl", "provenance.json"])
def test_write_a_report_of_a_hostile_record(victim: Victim, name: str) -> None:
    lines = [DEEP, b"[]", b"NaN", b"1", b'"x"', pickle.dumps(Payload(Path("/nowhere")))]
    lines += [b'{"step": 1, "event": {}, "time": "x", "loss": [], "stages": 1, "phase": {}}']
    lines += [b'{"step": 1, "event": "<script>alert(1)", "refused": {"a": [{}]}, "attempt": []}']
    with (victim.run / name).open("ab") as file:
        file.write(b"\n".join(lines) + b"\n")
    assert report.main([str(victim.run)]) == 0
    page = (victim.run / "report.html").read_text()
    assert "<script>alert" not in page
    assert page.count("<script>") == 1  # the script of the page


def hugging_face(folder: Path, runner: Any) -> Path:
    """Export the model of the small run."""
    assert export.main([str(runner.folder / "runs/whole"), "--output", str(folder)]) == 0
    return folder


def test_run_no_code_of_a_hugging_face_folder(uninterrupted, runner, tmp_path: Path) -> None:
    folder, trace = hugging_face(tmp_path / "model", uninterrupted), tmp_path / "trace"
    config = json.loads((folder / "config.json").read_bytes())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling.Model", "AutoConfig": "modeling.C"}
    config["trust_remote_code"] = True
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "modeling.py").write_text(f"import os; os.mkdir({str(trace)!r})")
    for name in ("pytorch_model.bin", "optimizer.pt", "training_args.bin"):
        (folder / name).write_bytes(pickle.dumps(Payload(trace)))
    done = runner.run("run.name=y", "run.steps=1", f"model.init_from={folder}",
                      f"data.tokenizer={EMBEDDED_FILE}")  # fmt: skip
    assert done.returncode == 0, done.stderr
    (folder / "model.safetensors").unlink()
    done = runner.run("run.name=z", f"model.init_from={folder}")
    assert done.returncode == 2
    assert "is a pickle, which can run code" in done.stderr
    assert not trace.exists()


@pytest.mark.slow
def test_refuse_hostile_hugging_face_folders(uninterrupted, compose, tmp_path: Path) -> None:
    folder = hugging_face(tmp_path / "model", uninterrupted)
    model = runner_model(uninterrupted)
    config = json.loads((folder / "config.json").read_bytes())
    weights = (folder / "model.safetensors").read_bytes()
    files: dict[str, dict[str, bytes]] = {
        "config.json": {"deep": DEEP, "list": b"[]", "nan": b"NaN", "pickle": pickle.dumps(1)}
        | {
            f"{key}={value!r}": replace_value(config, [key], value)
            for key in ("hidden_size", "num_hidden_layers", "rope_parameters", "model_type")
            for value in (HUGE, -1, "x", [1], {"x": 1}, float("nan"))
            if key != "rope_parameters" or not isinstance(value, dict)
        },
        "model.safetensors": tensor_files(weights),
    }
    for name, cases in files.items():
        kept = (folder / name).read_bytes()
        for case, content in cases.items():
            (folder / name).write_bytes(content)
            assert refuses(lambda: pretrained_weights.validate_pretrained(str(folder), model)), (
                name,
                case,
            )
        (folder / name).write_bytes(kept)
    assert not refuses(lambda: pretrained_weights.validate_pretrained(str(folder), model))
    (folder / "model.safetensors").rename(tmp_path / "outside.safetensors")
    index = folder / "model.safetensors.index.json"
    names = pretrained_weights._load_header(tmp_path / "outside.safetensors")
    for target in (
        "../outside.safetensors",
        str(tmp_path / "outside.safetensors"),
        "..",
        "a\0b",
        ".",
    ):
        index.write_text(json.dumps({"weight_map": dict.fromkeys(names, target)}))
        assert refuses(lambda: pretrained_weights.validate_pretrained(str(folder), model)), target


def test_refuse_json_of_gigabytes_and_devices(tmp_path: Path, compose) -> None:
    model = resolve_config(compose("model=tiny")).model
    names = ("config.json", "tokenizer_config.json", "tokenizer.json")
    for name in ("model.safetensors.index.json", *names):
        with (tmp_path / name).open("wb") as file:
            file.truncate(3 << 30)
    readers: dict[str, list[Callable[[], object]]] = {
        "config.json": [
            lambda: pretrained_weights.validate_pretrained(str(tmp_path), model),
            lambda: model_metadata.load_metadata(str(tmp_path)),
        ],
        "tokenizer_config.json": [
            lambda: prompt_tokenizer.load_hugging_face_tokenizer(tmp_path),
            lambda: pretrained_files.load_pretrained_files(str(tmp_path), None, ""),
        ],
        "tokenizer.json": [
            lambda: Tokenizer(str(tmp_path / "tokenizer.json"), ".", EMBEDDED_EOS_TOKEN),
            lambda: prompt_tokenizer.load_run_tokenizer(tmp_path / "tokenizer.json", "x"),
        ],
    }
    for name in names:
        for read in readers[name]:
            with pytest.raises(ConfigError, match="it has 3,221,225,472 bytes, more than") as error:
                read()
            assert str(tmp_path) in str(error.value)
    for name in names[1:]:
        (tmp_path / name).unlink()
        (tmp_path / name).symlink_to("/dev/zero")
        with pytest.raises(ConfigError, match="it is not a regular file"):
            readers[name][0]()


def runner_model(runner: Any) -> Any:
    """Return the model configuration in the checkpoint of the small run."""
    from hlat.config import run_identity

    saved = checkpoint_store.load_state_json(runner.folder / "runs/whole" / STEP)
    return run_identity.build_saved_model_config(saved["fixed"])


@pytest.mark.slow  # one or more whole processes
def test_refuse_hostile_tokenizers(tmp_path: Path) -> None:
    document = json.loads(EMBEDDED_FILE.read_bytes())
    path = tmp_path / "tokenizer.json"
    cases = {"deep": DEEP, "list": b"[]", "null": b"null", "pickle": pickle.dumps(1), "empty": b""}
    cases |= {
        f"{keys}={value!r}": replace_value(document, keys, value)
        for keys, values in [
            (["model", "vocab"], [None, [], {"a": -1}, {"a": HUGE}]),
            (["model", "merges"], [["x"], [["a", "b", "c"]]]),
            (["added_tokens", 0, "id"], [-1, HUGE]),
            (["added_tokens"], [{}]),
            (["pre_tokenizer"], [{"type": "Custom"}]),
        ]
        for value in values
    }
    for case, content in cases.items():
        path.write_bytes(content)
        assert refuses(lambda: Tokenizer(str(path), ".", EMBEDDED_EOS_TOKEN)), case


NAMES = [
    *("../x", "a\nb", "", "a\u202eb"),
    *(
        pytest.param(name, marks=pytest.mark.slow)
        for name in ("/x", "a/b", "a\0b", "a\x1b[2J", ".", "..", ".x", "a\\b")
    ),
]


@pytest.mark.parametrize("name", NAMES, ids=repr)
@pytest.mark.slow_after(2)
def test_refuse_a_run_name_outside_of_the_run_root(runner, name: str) -> None:
    before = _list_files(runner.folder.parent)
    done = runner.run("run.name=" + json.dumps(name, ensure_ascii=False))
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert _list_files(runner.folder.parent) == before


def _list_files(folder: Path) -> set[Path]:
    """Return all files and directories, without those of a Slurm cluster that is running."""
    return {path for path in folder.rglob("*") if not re.search(r"/cluster\d", str(path))}


@pytest.mark.slow
def test_quote_the_run_name_in_the_printed_command(runner) -> None:
    name = "$(touch trace); `touch trace` ' && touch trace | * ~ \" é{a,b} #"
    done = runner.run("run.name=" + json.dumps(name, ensure_ascii=False), "run.steps=1")
    assert done.returncode == 0, done.stderr
    printed = done.stdout.rstrip().splitlines()[-1].removeprefix("extend:").strip()
    script = f"for word in {printed}; do printf '%s\\0' \"$word\"; done"
    shown = subprocess.run(["sh", "-c", script], cwd=runner.folder, capture_output=True, text=True)
    arguments = shown.stdout.split("\0")[:-1]
    assert arguments[1] == "train"
    assert f"run.name={json.dumps(name, ensure_ascii=False)}" in arguments
    assert {path.name for path in runner.folder.iterdir()} == {"runs"}
    assert {path.name for path in (runner.folder / "runs").iterdir()} == {name, ".finished"}
