"""The catalogues of the package's texts: ``python -m tests.catalogues`` brings them up to date.

New texts are added without a translation, and texts that are no longer used are removed. It lists
what is left to translate, and ``tests/operators/test_catalogues.py`` fails until that is done.
After an edit of a ``.po``, run this again: it compiles the ``.mo``.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from io import BytesIO
from itertools import count
from pathlib import Path
from string import Formatter
from typing import Any

from babel.messages import Catalog, Message
from babel.messages.extract import DEFAULT_KEYWORDS, extract
from babel.messages.mofile import read_mo, write_mo
from babel.messages.pofile import read_po, write_po
from django.utils.translation.template import templatize

__all__ = ["LANGUAGES", "by_id", "compiled", "faults", "read", "texts", "update"]

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "django_singletask"
LANGUAGES = ["de", "es", "fr"]

KEYWORDS = DEFAULT_KEYWORDS | {
    f"{name}_lazy": DEFAULT_KEYWORDS[name] for name in ("gettext", "ngettext", "pgettext")
}
HEADLINE = "# The texts of the admin's pages. After an edit: python -m tests.catalogues"
HEADER = """\
Project-Id-Version: django-singletask
Language: {0.locale}
MIME-Version: 1.0
Content-Type: text/plain; charset=utf-8
Content-Transfer-Encoding: 8bit
Plural-Forms: {0.plural_forms}
"""


class Compilable(Catalog):
    """A catalogue with another header, because that of Babel has placeholders."""

    def __init__(self, catalog: Catalog) -> None:
        super().__init__(catalog.locale)
        self.catalog = catalog

    def __iter__(self) -> Iterator[Message]:
        _header, *messages = self.catalog
        yield Message("", HEADER.format(self.catalog))
        yield from messages


def folder(language: str) -> Path:
    return PACKAGE / "locale" / language / "LC_MESSAGES"


def read(language: str) -> Catalog:
    """Return the translations, or an empty catalogue of a new language."""
    path = folder(language) / "django.po"
    if not path.exists():
        return Catalog(language, header_comment=HEADLINE)
    with path.open("rb") as file:
        return read_po(file, locale=language)


def compiled(language: str) -> Catalog:
    """Return what Django reads."""
    path = folder(language) / "django.mo"
    if not path.exists():
        return Catalog(language)
    with path.open("rb") as file:
        return read_mo(file)


def texts() -> Catalog:
    """Return all texts of the package that are marked for translation."""
    catalog = Catalog()
    for path in sorted(PACKAGE.rglob("*")):
        if path.suffix not in {".html", ".py"}:
            continue
        source = path.read_text()
        if path.suffix == ".html":
            # What is not marked is X here, but still indented, which Python does not like.
            lines = templatize(source, origin=str(path)).splitlines()
            source = "\n".join(line.lstrip() for line in lines)
        name = str(path.relative_to(ROOT))
        for line, text, comments, context in extract(
            "python", BytesIO(source.encode()), KEYWORDS, ["Translators:"]
        ):
            catalog.add(text, None, [(name, line)], (), comments, context=context)
    return catalog


def update(language: str) -> None:
    """Write the catalogue with the texts of now, and compile it."""
    catalog = read(language)
    catalog.update(texts(), no_fuzzy_matching=True)
    catalog.obsolete.clear()
    folder(language).mkdir(parents=True, exist_ok=True)
    with (folder(language) / "django.po").open("wb") as file:
        # The comment at the head lists the terms of the language.
        lines = [f'"{line}\\n"\n' for line in HEADER.format(catalog).splitlines()]
        head = f'{catalog.header_comment}\nmsgid ""\nmsgstr ""\n{"".join(lines)}\n'
        file.write(head.encode())
        # Without the lines of the modules, which change with each edit.
        write_po(file, catalog, width=98, omit_header=True, include_lineno=False)
    for (context, text), strings in by_id(catalog).items():
        if not all(strings):
            catalog.delete(text, context)
    with (folder(language) / "django.mo").open("wb") as file:
        write_mo(file, Compilable(catalog))


def faults(catalog: Catalog, texts: Catalog) -> list[str]:
    """Return what is wrong with a catalogue that is to translate these texts, and no other."""
    wanted, found = by_id(texts), by_id(catalog)
    wrong = {
        "not translated": [text for text in wanted if not all(found.get(text, [""]))],
        "only a guess": [(each.context, each.id) for each in catalog if each.id and each.fuzzy],
        "no longer used": [*(found.keys() - wanted), *((None, text) for text in catalog.obsolete)],
        "other placeholders": [text for text in found if differs(text[1], found[text])],
    }
    return [f"{fault}: {text!r}" for fault, them in wrong.items() for _context, text in them]


def differs(text: Any, strings: tuple[str, ...]) -> bool:
    """Say whether one of its translations does not have the placeholders and tags of a text."""
    forms = [text] if isinstance(text, str) else [text[0], *[text[1]] * (len(strings) - 1)]
    pairs = zip(forms, strings, strict=True)
    return any(string and placeholders(form) != placeholders(string) for form, string in pairs)


def placeholders(text: str) -> list[str]:
    """Return what is filled in, whatever the order, and the tags."""
    numbers = count()
    fields = [field for _text, field, *_rest in Formatter().parse(text) if field is not None]
    named = [field or str(next(numbers)) for field in fields]
    return sorted(named + re.findall(r"%\(\w+\)\w|%%|<[^>]*>", text))


def by_id(catalog: Catalog) -> dict[tuple[str | None, Any], tuple[str, ...]]:
    """Return the translations of each text, by its context and itself: several for a plural."""
    translations = {}
    for message in catalog:
        text, strings, context = message.id, message.string or "", message.context
        if text:
            if isinstance(context, bytes):  # as Babel reads it from a .mo
                context = context.decode()
            text = text if isinstance(text, str) else tuple(text)
            strings = (strings,) if isinstance(strings, str) else tuple(strings)
            translations[context, text] = strings
    return translations


if __name__ == "__main__":
    for language in LANGUAGES:
        update(language)
        for fault in faults(read(language), texts()):
            sys.stdout.write(f"{language}: {fault}\n")
