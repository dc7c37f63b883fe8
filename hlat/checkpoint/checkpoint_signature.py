"""Signatures of checkpoints: Ed25519 over the content of `COMMITTED`, and so over every byte.

The signature is a file of 64 bytes that is written before the marker, so that a committed
checkpoint of a run that signs is never without it. Keys are PEM files, as openssl writes them.
"""

import os
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hlat.checkpoint.checkpoint_errors import CorruptCheckpointError, raise_as_corrupt
from hlat.checkpoint.checkpoint_manifest import COMMIT_MARKER, SIGNATURE_FILE
from hlat.config.config_errors import ConfigError
from hlat.storage.storage_path import StoragePath

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    from hlat.config.checkpoint import CheckpointConfig

Signer = Callable[[bytes], bytes]
"""Function that returns the signature of the content of a marker."""

_PUBLIC_KEY = re.compile(rb"-----BEGIN PUBLIC KEY-----.*?-----END PUBLIC KEY-----", re.DOTALL)
_PRIVATE_MODE = 0o077
"""Permissions that a private key must not have."""


def create_key_pair(path: Path) -> Path:
    """Write a new private key to `path` and its public key to `<path>.pub`; return the latter.

    Raises:
        ConfigError: If one of the files exists.
        OSError: If a file cannot be written.
    """
    serialization, ed25519 = _import_cryptography("keygen")
    key = ed25519.Ed25519PrivateKey.generate()
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain)
    info = serialization.PublicFormat.SubjectPublicKeyInfo
    public_path = path.with_name(f"{path.name}.pub")
    for existing in filter(Path.exists, (path, public_path)):
        raise ConfigError(f"{existing} exists; choose another name, or move it away")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    with open(path, "wb", opener=lambda name, _: os.open(name, flags, 0o600)) as file:
        file.write(private)
    with open(public_path, "xb") as file:
        file.write(key.public_key().public_bytes(pem, info))
    return public_path


def load_signer(signing_key: str | None) -> Signer | None:
    """Return the function that signs with the private key in a file; None without a file.

    Raises:
        ConfigError: If the file cannot be read, can be read by other users, or is no Ed25519 key.
    """
    if signing_key is None:
        return None
    setting = f"signing_key={signing_key}"
    serialization, ed25519 = _import_cryptography(setting)
    path = Path(signing_key).expanduser()
    content = _read_key_file(path, setting)
    if mode := path.stat().st_mode & _PRIVATE_MODE:
        raise ConfigError(
            f"{setting}: other users have access to the private key (mode {mode:03o}); run "
            f"chmod 600 {path}"
        )
    key: Any = None
    with suppress(TypeError, ValueError):  # their messages could repeat content
        key = serialization.load_pem_private_key(content, None)
    if not isinstance(key, ed25519.Ed25519PrivateKey):
        raise ConfigError(
            f"{setting} is not an Ed25519 private key in PEM format without a password; create one "
            "with hlat checkpoint keygen FILE"
        )
    sign: Signer = key.sign
    return sign


def load_trusted_keys(trusted_keys: str) -> list["Ed25519PublicKey"]:
    """Return the public keys in a file.

    Raises:
        ConfigError: If the file cannot be read, or contains no key or one of another type.
    """
    setting = f"trusted_keys={trusted_keys}"
    serialization, ed25519 = _import_cryptography(setting)
    content = _read_key_file(Path(trusted_keys).expanduser(), setting)
    keys: list[Any] = []
    for block in _PUBLIC_KEY.findall(content):
        try:
            keys.append(serialization.load_pem_public_key(block))
        except ValueError:
            keys.append(None)
    if not keys or not all(isinstance(key, ed25519.Ed25519PublicKey) for key in keys):
        raise ConfigError(
            f"{setting} must contain Ed25519 public keys in PEM format, one after another; hlat "
            "checkpoint keygen FILE writes one to FILE.pub"
        )
    return keys


def validate_keys(config: "CheckpointConfig") -> None:
    """Check that the run can sign checkpoints, and trusts its own signatures.

    Raises:
        ConfigError: If a key cannot be used, or the trusted keys do not include the run's own.
    """
    try:
        sign = load_signer(config.signing_key)
        keys = load_trusted_keys(config.trusted_keys) if config.trusted_keys is not None else None
    except ConfigError as error:
        raise ConfigError(*(f"checkpoint.{problem}" for problem in error.problems)) from None
    if sign is not None and keys is not None and not _is_signed_by(keys, sign(b""), b""):
        raise ConfigError(
            f"checkpoint.trusted_keys={config.trusted_keys} does not contain the public key of "
            f"checkpoint.signing_key={config.signing_key}, so the run could not resume from its "
            "own checkpoints; add the public key to the file"
        )


def verify_signature(checkpoint: StoragePath, marker: bytes, trusted_keys: str) -> None:
    """Compare the signature of a checkpoint with the content of its marker.

    Raises:
        CorruptCheckpointError: If there is no signature, or none of the trusted keys made it, or
            the keys cannot be read, which must not end a run that validated them.
    """
    try:
        keys = load_trusted_keys(trusted_keys)
    except ConfigError as error:
        raise CorruptCheckpointError(*error.problems) from error
    path = checkpoint / SIGNATURE_FILE
    if not path.exists():
        raise CorruptCheckpointError(
            f"{path} does not exist: the checkpoint is not signed, and trusted_keys={trusted_keys} "
            f"is set; sign it, if you trust it: hlat checkpoint sign {checkpoint} signing_key=FILE"
        )
    with raise_as_corrupt(path):
        signature = path.read_bytes()
    if not _is_signed_by(keys, signature, marker):
        raise CorruptCheckpointError(
            f"{path} is not a signature of {COMMIT_MARKER} by one of the {len(keys)} keys in "
            f"trusted_keys={trusted_keys}"
        )


def _is_signed_by(keys: list["Ed25519PublicKey"], signature: bytes, content: bytes) -> bool:
    from cryptography.exceptions import InvalidSignature

    for key in keys:
        try:
            key.verify(signature, content)
        except InvalidSignature:
            continue
        return True
    return False


def _read_key_file(path: Path, setting: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{setting} cannot be read ({error.strerror})") from error


def _import_cryptography(setting: str) -> tuple[Any, Any]:
    """Return the modules `serialization` and `ed25519`."""
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as error:
        raise ConfigError(
            f"{setting} needs the package cryptography: pip install 'hlat[signing]'"
        ) from error
    return serialization, ed25519
