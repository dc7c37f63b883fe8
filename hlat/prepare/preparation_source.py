"""Sources to prepare: inputs, output directories and settings of each."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hlat.config.config_errors import ConfigError
from hlat.prepare import corpus_layouts, corpus_manifest
from hlat.prepare.document_settings import HELDOUT, TRAIN, DocumentSettings
from hlat.prepare.text_losses import SkippedRecord
from hlat.storage.data_file import DataFile


@dataclass(frozen=True)
class PreparationSource:
    """Inputs of one prepared directory, or of one for training and one for held-out documents."""

    name: str
    directory: Path
    inputs: tuple[DataFile, ...]
    column: str
    layout: str | None
    skipped: tuple[SkippedRecord, ...] = ()
    """Files beside the inputs that are not read."""
    settings: DocumentSettings = field(default_factory=DocumentSettings)

    @property
    def work_dir(self) -> Path:
        """Directory of finished jobs until all are finished."""
        return self.directory / corpus_manifest.WORK_DIR

    @property
    def targets(self) -> dict[str, Path]:
        """Directories with a manifest, by the name of their source."""
        if self.settings.heldout is None:
            return {self.name: self.directory}
        return {name: self.directory / name for name in (TRAIN, HELDOUT)}

    def to_settings(self) -> dict[str, Any]:
        """Return the command-line settings that every attempt must repeat."""
        paths = [file.location for file in self.inputs]
        settings = self.settings.to_json()
        return {"text_column": self.column, "layout": self.layout, "INPUT": paths, **settings}


def plan_sources(
    output_dir: Path,
    inputs: Sequence[DataFile],
    column: str,
    layout: str | None,
    skipped: Sequence[SkippedRecord] = (),
    settings: DocumentSettings | None = None,
) -> tuple[list[PreparationSource], list[str]]:
    """Return the sources to prepare, and notes on missing and unmatched files of a layout.

    `skipped` is recorded in the manifest of a source without layout.

    Raises:
        ConfigError: If no input matches the layout, or the directory was prepared as a single
            source instead of several, or vice versa.
    """
    settings = settings or DocumentSettings()
    prepared = corpus_manifest.find_prepared_dirs(output_dir)
    if layout is None:
        own_names = () if settings.heldout is None else (TRAIN, HELDOUT)
        children = [path for path in prepared if path != output_dir and path.name not in own_names]
        if children:
            raise ConfigError(
                f"{output_dir}: contains prepared sources, such as {children[0].name}; choose "
                "another output= for a source without layout="
            )
        if settings.heldout is not None and (output_dir / corpus_manifest.MANIFEST_FILE).is_file():
            raise ConfigError(
                f"{output_dir}: was prepared without heldout=; choose another output=, or delete "
                "the directory"
            )
        name, files, records = output_dir.name, tuple(inputs), tuple(skipped)
        return [PreparationSource(name, output_dir, files, column, None, records, settings)], []
    if output_dir in prepared:
        raise ConfigError(
            f"{output_dir}: is a prepared source itself; choose another output= for layout={layout}"
        )
    assigned, unmatched = corpus_layouts.assign_sources(layout, inputs)
    sources = [
        PreparationSource(name, output_dir / name, tuple(files), column, layout, (), settings)
        for name, files in assigned.items()
    ]
    patterns = corpus_layouts.LAYOUTS[layout].sources
    notes = [
        f"{name}: there is no file {' or '.join(patterns[name])}"
        for name in patterns
        if name not in assigned
    ]
    if unmatched:
        notes.append(
            f"{len(unmatched)} files are of no source of {layout}, such as {unmatched[0].location}"
        )
    return sources, notes
