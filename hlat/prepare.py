"""Prepares the embedded corpus ahead of a run: `python -m hlat.prepare`.

The first run prepares it by itself; this entry is for machines whose compute nodes should find it
ready, and for whoever wants to see what it holds.
"""

import argparse
import sys
from collections.abc import Sequence

from hlat.config.errors import ConfigError, Exit
from hlat.data import embedded, library
from hlat.data.corpus import Corpus


def main(argv: Sequence[str] | None = None) -> int:
    """Prepare the corpus unless it is there, and print its sources, rows, sizes and place."""
    parser = argparse.ArgumentParser(
        prog="hlat.prepare",
        description="Prepare the embedded corpus: the documents of Python's standard library as "
        "Arrow files. The folder is $HLAT_CACHE, $XDG_CACHE_HOME/hlat or ~/.cache/hlat. "
        "What is there already is left as it is.",
    )
    parser.parse_args(argv)
    try:
        folder = embedded.prepare()
        corpora = {name: Corpus([folder / f"{name}.arrow"], "text") for name in library.NAMES}
    except ConfigError as error:
        print(error, file=sys.stderr)
        return Exit.CONFIGURATION
    print(f"embedded corpus: {folder}")
    for name, corpus in corpora.items():
        print(f"  embedded:{name:<6} {len(corpus):>6} rows {corpus.num_bytes / 1e6:>7.2f} MB")
    return Exit.FINISHED


if __name__ == "__main__":
    sys.exit(main())
