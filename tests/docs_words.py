"""Count the words of the documentation, and fail where there are more than its bounds.

    python -m tests.docs_words

Counted is what Sphinx writes as plain text, without blocks of code and tables of contents.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx

DOCS = Path(__file__).resolve().parents[1] / "docs"
MOST = {"users": 22_000, "contributors": 3_600}
MOST_PAGES = 43


def main() -> int:
    """Print the words of each page and of all, and return 1 if there are too many."""
    counts = words_of_pages()
    total = dict.fromkeys(MOST, 0)
    for name, count in sorted(counts.items()):
        print(f"{count:6,} {name}")
        total["contributors" if name.startswith("contributing/") else "users"] += count
    too_many = [readers for readers, most in MOST.items() if total[readers] > most]
    for readers, most in MOST.items():
        print(f"{total[readers]:6,} words for {readers}, at most {most:,}")
    print(f"{len(counts):6,} pages, at most {MOST_PAGES}")
    return int(bool(too_many) or len(counts) > MOST_PAGES)


def words_of_pages() -> dict[str, int]:
    """Write the pages as plain text, and return how many words each has."""
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder, "text")
        app = Sphinx(DOCS, DOCS, written, Path(folder, "doctrees"), "text", status=None)
        app.connect("doctree-read", remove_code)
        app.build()
        return {
            str(path.relative_to(written).with_suffix("")): words(path.read_text())
            for path in written.rglob("*.txt")
        }


def remove_code(app: Sphinx, page: nodes.document) -> None:
    """Remove the blocks of code and the tables of contents of a page before it is written."""
    for kind in (nodes.literal_block, addnodes.toctree):
        for block in list(page.findall(kind)):
            block.parent.remove(block)


def words(text: str) -> int:
    """Return how many words a text has. The lines around the cells of tables are none."""
    return sum(any(letter.isalnum() for letter in word) for word in text.split())


if __name__ == "__main__":
    sys.exit(main())
