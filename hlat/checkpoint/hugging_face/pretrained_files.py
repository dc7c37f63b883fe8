"""Generation settings and chat template of a Hugging Face directory.

Those of model.init_from apply to a run that continues its training with the same tokenizer.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hlat.checkpoint.checkpoint_errors import parse_json_object, raise_as_corrupt
from hlat.checkpoint.hugging_face.tokenizer_files import find_tokenizer_file
from hlat.storage.bounded_files import read_bounded

_GENERATION_CONFIG, _TOKENIZER_CONFIG = "generation_config.json", "tokenizer_config.json"
_CHAT_TEMPLATE = "chat_template.jinja"


@dataclass(frozen=True)
class PretrainedFiles:
    """Settings of a Hugging Face directory beside its weights.

    Attributes:
        generation_config: Content of generation_config.json.
        tokenizer_config: Content of tokenizer_config.json.
        documents: Files to copy, by name.
        warning: Reason why there are none although the run has initial weights; empty: none.
    """

    generation_config: dict[str, Any] = field(default_factory=dict)
    tokenizer_config: dict[str, Any] = field(default_factory=dict)
    documents: dict[str, bytes] = field(default_factory=dict)
    warning: str = ""

    @property
    def end_token_ids(self) -> list[int]:
        """Tokens that end a text: eos_token_id of generation_config.json, one or several."""
        ends = self.generation_config.get("eos_token_id")
        ends = ends if isinstance(ends, list) else [ends]
        return [token_id for token_id in ends if type(token_id) is int]

    def build_generation_config(
        self, eos_token_id: int, bos_token_id: int | None = None
    ) -> dict[str, Any]:
        """Return generation_config.json: that of the initial model, which also ends at the EOS.

        The initial model may have several end tokens, such as that of a chat message. The BOS of
        the run replaces that of the initial model.
        """
        source, ends = self.generation_config, self.end_token_ids
        if eos_token_id not in ends:
            ends = [eos_token_id, *ends]
        pad_token_id = source.get("pad_token_id")
        bos = {} if bos_token_id is None else {"bos_token_id": bos_token_id}
        return {
            **{key: value for key, value in source.items() if key != "transformers_version"},
            **bos,
            "eos_token_id": ends if len(ends) > 1 else ends[0],
            "pad_token_id": eos_token_id if pad_token_id is None else pad_token_id,
        }


def load_pretrained_files(
    init_from: str | None, run_dir: Path | None, tokenizer_sha256: str
) -> PretrainedFiles:
    """Return the settings in the directory of the initial weights.

    A relative directory is resolved against the working directory and the parents of the run
    directory, one of which the run was started in.

    Raises:
        CorruptCheckpointError: If a file cannot be read, or is not a JSON object.
    """
    if init_from is None:
        return PretrainedFiles()
    bases = (Path.cwd(), *(run_dir.parents if run_dir is not None else ()))
    candidates = [base / Path(init_from).expanduser() for base in bases]
    directory = next((path for path in candidates if path.is_dir()), None)
    without = "the export has no chat template and no generation settings of it"
    if directory is None:
        return PretrainedFiles(warning=f"model.init_from={init_from} does not exist; {without}")
    names = (_GENERATION_CONFIG, _TOKENIZER_CONFIG, _CHAT_TEMPLATE)
    contents = {name: _read_file(directory / name) for name in names if (directory / name).exists()}
    if contents and find_tokenizer_file(tokenizer_sha256, [directory / "tokenizer.json"]) is None:
        reason = f"model.init_from={init_from} has another tokenizer.json than the run"
        return PretrainedFiles(warning=f"{reason}; {without}")
    template = {name: content for name, content in contents.items() if name == _CHAT_TEMPLATE}
    return PretrainedFiles(
        _parse(contents, _GENERATION_CONFIG), _parse(contents, _TOKENIZER_CONFIG), template
    )


def _read_file(path: Path) -> bytes:
    with raise_as_corrupt(path):
        return read_bounded(path)


def _parse(contents: dict[str, bytes], name: str) -> dict[str, Any]:
    if name not in contents:
        return {}
    with raise_as_corrupt(name):
        return parse_json_object(contents[name], name)
