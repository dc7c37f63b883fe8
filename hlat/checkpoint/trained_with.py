"""What a checkpoint was trained with, as whoever uses its weights elsewhere must know it.

It follows from the checkpoint alone, but for the tokenizer's file, which is found again by its
hash: a model that reads other ids than it was trained on answers, and answers nonsense.
"""

from dataclasses import dataclass
from pathlib import Path

from hlat.checkpoint.places import Place
from hlat.config.errors import ConfigError
from hlat.config.precision import Dtype
from hlat.config.recorded import settings
from hlat.data.hugging_face import find
from hlat.data.tokenizer import EMBEDDED_FILE
from hlat.state import TrainingState


@dataclass(frozen=True)
class Circumstances:
    """Settings of the run that saved a checkpoint.

    Attributes:
        sequence_length: Tokens per sequence.
        eos_token: Token that ends a document.
        tokenizer_sha256: Of its tokenizer.json.
        dtype: Of the weights that the forward pass read.
    """

    sequence_length: int
    eos_token: str
    tokenizer_sha256: str
    dtype: Dtype


def circumstances(checkpoint: Place, state: TrainingState) -> Circumstances:
    """What the state of a checkpoint says of them.

    Raises:
        ConfigError: It lacks one of them.
    """
    try:
        data = state.data["fingerprint"]
        length, dtype = data["batch.sequence_length"], state.adjustable["precision.weights"]
        eos_token, sha256 = data["data.eos_token"], data["data.tokenizer"]
        if type(length) is not int or not isinstance(eos_token + sha256, str):
            raise TypeError(f"a sequence length of {length!r}, or other words than text")
        return Circumstances(length, eos_token, sha256, Dtype(dtype))
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{checkpoint}: state.json says nothing to go by ({error!r})") from error


def run_folder(source: Place, checkpoint: Place) -> Path | None:
    """The folder of the run that saved a checkpoint, if it is on this machine.

    Args:
        source: What the user named: the run, or the checkpoint.
        checkpoint: The checkpoint.
    """
    if isinstance(source, Path) and (source / "config.yaml").is_file():
        return source.absolute()
    return checkpoint.absolute().parent.parent if isinstance(checkpoint, Path) else None


def tokenizer(given: Path | None, checkpoint: Place, run: Path | None, sha256: str) -> Path:
    """Find the tokenizer.json that a checkpoint was trained with.

    A relative path of the run's configuration is looked for from here, then from the folders above
    the run, one of which it was started in.

    Args:
        given: What --tokenizer says.
        checkpoint: The checkpoint, for messages.
        run: The run's folder, if it is known.
        sha256: What the file hashes to.

    Raises:
        ConfigError: It is not there, or not the same file any more.
    """
    if given is not None:
        told, places = f"--tokenizer {given}", [given.expanduser()]
    elif run is not None and (run / "config.yaml").is_file():
        named = _named_tokenizer(run)
        told = f"data.tokenizer={named}"
        places = [EMBEDDED_FILE, *(above / named for above in (Path.cwd(), *run.parents))]
    else:
        told, places = "without the run's config.yaml, the embedded one", [EMBEDDED_FILE]
    if (found := find(sha256, places)) is None:
        raise ConfigError(
            f"{checkpoint} was trained with the tokenizer.json of sha256 {sha256}; {told} is not "
            "that file, or is not there; name it with --tokenizer FILE"
        )
    return found


def _named_tokenizer(run: Path) -> Path:
    """What the run's configuration says about its tokenizer.

    Raises:
        ConfigError: It says so by a variable that is not set here, or is no configuration.
    """
    try:
        root, name = settings(run, "data.root", "data.tokenizer")
        return Path(root).expanduser() / Path(name).expanduser()
    except ConfigError as error:
        raise ConfigError(f"{error}; use --tokenizer FILE") from error
    except TypeError as error:
        raise ConfigError(
            f"{run / 'config.yaml'}: it names no tokenizer ({error}); use --tokenizer FILE"
        ) from error
