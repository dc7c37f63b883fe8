"""Signed checkpoints: openssl verifies them, and readers with trusted keys reject others."""

import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from hlat.checkpoint import averaging, checkpoint_lookup, checkpoint_signature, retention
from hlat.checkpoint.checkpoint_errors import CorruptCheckpointError
from hlat.checkpoint.checkpoint_store import save_checkpoint, verify_checkpoint
from hlat.checkpoint.training_state import TrainingState
from hlat.config.checkpoint import CheckpointConfig
from hlat.config.config_errors import ConfigError
from hlat.distributed.state_shard import StateShard
from hlat.storage import durable_files, storage_path


@pytest.fixture
def key(tmp_path: Path) -> str:
    """Create a private key; the public key is in the file with .pub."""
    checkpoint_signature.create_key_pair(tmp_path / "key.pem")
    return str(tmp_path / "key.pem")


def save(directory: Path, step: int, key: str | None) -> Path:
    shard = StateShard("weights/w", (3,), (0,), (3,), torch.full((3,), float(step)))
    state = TrainingState(step, step * 1000).to_json()
    sign = checkpoint_signature.load_signer(key)
    return save_checkpoint(directory, step, [shard], state, sign=sign)


def alter_marker(path: Path) -> None:
    (path / "COMMITTED").write_text("0" * 64)


def alter_manifest_and_marker(path: Path) -> None:
    """Alter the contents and update their hash, as an attacker can."""
    (path / "manifest.json").write_text((path / "manifest.json").read_text() + " ")
    (path / "COMMITTED").write_text(durable_files.hash_file(path / "manifest.json").sha256)


def sign_with_another_key(path: Path) -> None:
    checkpoint_signature.create_key_pair(path.parent / "other.pem")
    sign = checkpoint_signature.load_signer(str(path.parent / "other.pem"))
    assert sign is not None
    (path / "COMMITTED.sig").write_bytes(sign((path / "COMMITTED").read_bytes()))


def truncate_signature(path: Path) -> None:
    (path / "COMMITTED.sig").write_bytes(b"")


def remove_signature(path: Path) -> None:
    (path / "COMMITTED.sig").unlink()


def make_signature_a_directory(path: Path) -> None:
    remove_signature(path)
    (path / "COMMITTED.sig").mkdir()


FORGERIES = [
    alter_marker,
    alter_manifest_and_marker,
    sign_with_another_key,
    truncate_signature,
    remove_signature,
    make_signature_a_directory,
]


@pytest.mark.parametrize("location", ["{}", "file://{}"])
def test_a_signed_checkpoint_is_accepted(tmp_path: Path, key: str, location: str) -> None:
    directory = storage_path.parse_storage_path(location.format(tmp_path / "checkpoints"))
    path = save(directory, 1, key)  # type: ignore[arg-type]
    verify_checkpoint(path, trusted_keys=f"{key}.pub")
    verify_checkpoint(path)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl")
def test_openssl_verifies_the_signature(tmp_path: Path, key: str) -> None:
    path = save(tmp_path / "checkpoints", 1, key)
    marker, signature = path / "COMMITTED", path / "COMMITTED.sig"
    arguments = ["-pubin", "-inkey", f"{key}.pub", "-rawin", "-in", marker, "-sigfile", signature]
    done = subprocess.run(
        ["openssl", "pkeyutl", "-verify", *arguments], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl")
def test_a_key_of_openssl_is_accepted(tmp_path: Path) -> None:
    key, public = tmp_path / "key.pem", tmp_path / "all.pub"
    subprocess.run(["openssl", "genpkey", "-algorithm", "ed25519", "-out", key], check=True)
    subprocess.run(["openssl", "pkey", "-in", key, "-pubout", "-out", public], check=True)
    key.chmod(0o600)
    other = checkpoint_signature.create_key_pair(tmp_path / "other.pem")
    public.write_text(f"# two keys\n{other.read_text()}\n{public.read_text()}")
    verify_checkpoint(save(tmp_path / "checkpoints", 1, str(key)), trusted_keys=str(public))


@pytest.mark.parametrize("forge", FORGERIES)
def test_a_forged_checkpoint_is_rejected_by_name(tmp_path: Path, key: str, forge) -> None:
    path, trusted = save(tmp_path / "run/checkpoints", 2, key), f"{key}.pub"
    forge(path)
    with pytest.raises(CorruptCheckpointError, match=r"step_00000002.*COMMITTED"):
        verify_checkpoint(path, trusted_keys=trusted)
    with pytest.raises(ConfigError, match=r"step_00000002/COMMITTED"):
        averaging.load_weighted_checkpoint(path, 1.0, lambda _: None, trusted)
    for source, step in ((tmp_path / "run", None), (tmp_path / "run", 2), (path, None)):
        with pytest.raises(ConfigError, match=r"step_00000002.*COMMITTED"):
            checkpoint_lookup.find_checkpoint(source, step, trusted)


@pytest.mark.parametrize("forge", FORGERIES)
def test_the_newest_signed_checkpoint_is_used(tmp_path: Path, key: str, forge) -> None:
    signed = save(tmp_path, 1, key)
    forge(save(tmp_path, 2, key))
    found, problems = checkpoint_lookup.find_newest_checkpoint(tmp_path, trusted_keys=f"{key}.pub")
    assert found is not None
    assert found.path == signed
    assert len(problems) == 1
    assert "checkpoint step_00000002 is rejected" in problems[0]


def test_a_planted_checkpoint_does_not_replace_a_save(tmp_path: Path, key: str) -> None:
    """Replace an existing checkpoint of a step unless this run signed it."""
    inode = save(tmp_path, 1, key).stat().st_ino
    assert save(tmp_path, 1, key).stat().st_ino == inode
    save(tmp_path, 2, None)
    verify_checkpoint(save(tmp_path, 2, key), trusted_keys=f"{key}.pub")
    assert (tmp_path / "step_00000002_damaged_1").is_dir()


def test_planted_checkpoints_do_not_displace_signed_ones(tmp_path: Path, key: str) -> None:
    """Treat unsigned checkpoints as damaged: prune does not count or remove them."""
    for step in (1, 2, 3, 4, 9):
        save(tmp_path, step, None if step in (3, 9) else key)
    removed = retention.prune_checkpoints(tmp_path, 2, trusted_keys=f"{key}.pub")
    assert removed == [tmp_path / "step_00000001"]
    removed = [retention.remove_oldest(tmp_path, None, None, f"{key}.pub") for _ in range(4)]
    assert removed == ["step_00000002", "step_00000003", "step_00000009", ""]


def test_keys_that_disappear_remove_no_checkpoint(tmp_path: Path, key: str) -> None:
    paths = [save(tmp_path, step, key) for step in (1, 2, 3)]
    Path(f"{key}.pub").unlink()
    assert retention.prune_checkpoints(tmp_path, 1, None, paths[2], f"{key}.pub") == []
    with pytest.raises(CorruptCheckpointError, match=r"trusted_keys=.* cannot be read"):
        verify_checkpoint(paths[0], trusted_keys=f"{key}.pub")


def test_the_signature_is_written_before_the_marker(
    tmp_path: Path, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, write_file = [], durable_files.write_file

    def record(path: Path, blocks: object) -> object:
        written.append(path.name)
        return write_file(path, blocks)  # type: ignore[arg-type]

    monkeypatch.setattr(durable_files, "write_file", record)
    save(tmp_path, 1, key)
    assert written[-3:] == ["manifest.json", "COMMITTED.sig", "COMMITTED"]


def test_private_keys_of_other_types_are_rejected(tmp_path: Path, key: str) -> None:
    with pytest.raises(ConfigError, match=r"signing_key=.*missing cannot be read"):
        checkpoint_signature.load_signer(str(tmp_path / "missing"))
    Path(key).chmod(0o640)
    with pytest.raises(ConfigError, match=r"other users .*\(mode 040\); run chmod 600"):
        checkpoint_signature.load_signer(key)
    for number, content in enumerate((b"", b"SECRET no key", Path(f"{key}.pub").read_bytes())):
        file = tmp_path / str(number)
        file.touch(mode=0o600)
        file.write_bytes(content)
        with pytest.raises(ConfigError, match="is not an Ed25519 private key") as error:
            checkpoint_signature.load_signer(str(file))
        assert "SECRET" not in str(error.value)


def test_trusted_keys_of_other_types_are_rejected(tmp_path: Path, key: str) -> None:
    with pytest.raises(ConfigError, match=r"trusted_keys=.*missing cannot be read"):
        checkpoint_signature.load_trusted_keys(str(tmp_path / "missing"))
    broken = tmp_path / "broken"
    for content in ("", "no key", Path(f"{key}.pub").read_text().replace("MCow", "AAAA")):
        broken.write_text(content)
        with pytest.raises(ConfigError, match="must contain Ed25519 public keys"):
            checkpoint_signature.load_trusted_keys(str(broken))


def test_a_run_must_trust_its_signing_key(tmp_path: Path, key: str) -> None:
    settings = {"every_steps": 1, "keep_last": 1}
    own, other = f"{key}.pub", str(checkpoint_signature.create_key_pair(tmp_path / "other.pem"))
    checkpoint_signature.validate_keys(CheckpointConfig(**settings))
    checkpoint_signature.validate_keys(
        CheckpointConfig(**settings, signing_key=key, trusted_keys=own)
    )
    with pytest.raises(ConfigError, match=r"checkpoint\.trusted_keys=.* does not contain"):
        checkpoint_signature.validate_keys(
            CheckpointConfig(**settings, signing_key=key, trusted_keys=other)
        )
    with pytest.raises(ConfigError, match=r"checkpoint\.signing_key=nope cannot be read"):
        checkpoint_signature.validate_keys(CheckpointConfig(**settings, signing_key="nope"))
