"""The translations of the admin's texts: correct, compiled, and shown whatever Django has."""

from __future__ import annotations

import re
import time
from html import unescape
from io import BytesIO, StringIO
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import django
import pytest
from babel.messages.mofile import read_mo
from babel.messages.pofile import read_po
from django.core.management import call_command
from django.http import HttpResponse
from django.utils import timezone
from django.utils.translation import override, trans_real

from django_singletask.models import OUTCOMES
from tests import catalogues, inside
from tests.admin_pages import BASE, event, log_in
from tests.catalogues import by_id
from tests.command_line import hold
from tests.entries import key_of

pytestmark = [
    pytest.mark.django_db(databases="__all__"),
    pytest.mark.usefixtures("on_redis", "empty_history"),
]

UPDATE = "python -m tests.catalogues"


def translated(language: str) -> dict[tuple[str | None, Any], tuple[str, ...]]:
    """Return the translations that are in the source of a catalogue."""
    every = by_id(catalogues.read(language))
    return {text: strings for text, strings in every.items() if all(strings)}


@pytest.mark.parametrize("language", catalogues.LANGUAGES)
def test_each_text_is_translated_and_no_translation_is_stale(language: str) -> None:
    faults = catalogues.faults(catalogues.read(language), catalogues.texts())
    assert faults == [], f"run {UPDATE}"


GOOD = """
msgid "Holder"
msgstr "Inhaber"

msgid "{} of {}"
msgstr "{} von {}"

msgid "%(counter)s lock"
msgid_plural "%(counter)s locks"
msgstr[0] "%(counter)s Sperre"
msgstr[1] "%(counter)s Sperren"
"""
HOLDER = 'msgid "Holder"'
PLURAL = "('%(counter)s lock', '%(counter)s locks')"


@pytest.mark.parametrize(
    ("good", "bad", "fault"),
    [
        (f'{HOLDER}\nmsgstr "Inhaber"', "", "not translated: 'Holder'"),
        ('"Inhaber"', '""', "not translated: 'Holder'"),
        ('"%(counter)s Sperren"', '""', f"not translated: {PLURAL}"),
        (HOLDER, f"#, fuzzy\n{HOLDER}", "only a guess: 'Holder'"),
        (HOLDER, f'msgid "Owner"\nmsgstr "Inhaber"\n\n{HOLDER}', "no longer used: 'Owner'"),
        (HOLDER, f'#~ msgid "Owner"\n#~ msgstr "Inhaber"\n\n{HOLDER}', "no longer used: 'Owner'"),
        ('"{} von {}"', '"von {}"', "other placeholders: '{} of {}'"),
        ('"%(counter)s Sperren"', '"%(zahl)s Sperren"', f"other placeholders: {PLURAL}"),
    ],
)
def test_each_fault_of_a_catalogue_is_found(good: str, bad: str, fault: str) -> None:
    texts, spoiled = (
        read_po(BytesIO(source.encode()), locale="de") for source in (GOOD, GOOD.replace(good, bad))
    )
    assert catalogues.faults(texts, texts) == []
    assert catalogues.faults(spoiled, texts) == [fault]


@pytest.mark.parametrize("language", catalogues.LANGUAGES)
def test_the_compiled_catalogue_is_that_of_the_source(language: str) -> None:
    assert by_id(catalogues.compiled(language)) == translated(language), f"run {UPDATE}"


@pytest.mark.parametrize("language", catalogues.LANGUAGES)
@pytest.mark.parametrize("suffix", ["po", "mo"])
def test_the_header_has_no_placeholder(language: str, suffix: str) -> None:
    text = (catalogues.folder(language) / f"django.{suffix}").read_bytes()
    assert b"Project-Id-Version: django-singletask" in text
    assert f"Language: {language}".encode() in text
    placeholders = (b"PROJECT", b"VERSION", b"EMAIL@ADDRESS", b"FULL NAME", b"li.org", b"YEAR")
    assert [one for one in placeholders if one in text] == []


@pytest.mark.parametrize("language", catalogues.LANGUAGES)
def test_a_text_that_django_has_too_is_translated_alike(language: str) -> None:
    """Django has one catalogue for all apps: which translation it takes depends on their order."""
    ours, differ = translated(language), {}
    for path in Path(django.__file__).parent.rglob(f"{language}/LC_MESSAGES/django.mo"):
        with path.open("rb") as file:
            theirs = by_id(read_mo(file))
        both = ours.keys() & theirs.keys()
        differ |= {key: (ours[key], theirs[key]) for key in both if ours[key] != theirs[key]}
    assert differ == {}, "give such a text a context (pgettext), or another wording"


class Marked(trans_real.DjangoTranslation):
    """A translation that puts each text into brackets, so that one that is not marked shows."""

    def gettext(self, message: str) -> str:
        return f"⟦{message.rpartition(chr(4))[2]}⟧"

    def ngettext(self, singular: str, plural: str, number: int) -> str:
        return self.gettext(singular if number == 1 else plural)


def unmarked(response: HttpResponse) -> set[str]:
    """Return what the page of the package shows outside of brackets, but for names and numbers."""
    assert response.status_code == 200
    html = response.content.decode()
    html = html[html.index('<div id="content"') : html.index('<footer id="footer"')]
    # The facts of a lock are in the words of the command, and the page says so.
    html = re.sub(r'<(code|script|dl(?= [^>]* lang="en")).*?</\1>', "", html, flags=re.DOTALL)
    texts = re.sub(r"<[^>]*>", "\n", html) + "\n".join(
        re.findall(r'(?:aria-label|data-label|placeholder|title)="(.*?)"', html)
    )
    while texts != (inner := re.sub(r"⟦[^⟦⟧]*⟧", "", texts)):
        texts = inner
    # What is left: durations, the time zone, and the dotted names of tasks.
    texts = re.sub(r"\bUTC\b|\b[0-9.]+[dhms]\b|\b\w+(?:\.\w+)+", "", unescape(texts))
    return {line.strip() for line in texts.splitlines() if re.search("[A-Za-z]", line)}


@pytest.mark.usefixtures("empty_history")
def test_the_pages_show_no_text_that_is_not_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    marked = Marked("de")
    monkeypatch.setattr(trans_real, "translation", lambda language: marked)
    browser = log_in("view_tasklockevent", "clear_lock", name="οδ")
    run = {**inside.this_process(), "host": "ξ", "since": time.time(), "timeout": 60}
    run |= {"name": "ένα", "task": "δύο", "task_id": "τρία", "token": "1" * 32}
    keys = [key_of("ένα"), inside.queued_key(key_of("ένα"), "δύο")]
    for key, pid in zip(keys, [1, 0], strict=True):
        holder = hold(key=key, **{**run, "pid": pid})
    facts = {"name": "ένα", "task": "δύο", "host": "ξ", "pid": 1, "key": "3"}
    rows = [event(ref=holder.token, **facts)]
    rows += [
        event(kind=kind, result="skipped", blocked_by="2" * 32, count=3, **facts)
        for kind in ("conflict", "duplicate")
    ]
    noticed = {"noticed_at": timezone.now(), "actor": "οδ", "retaken": 2}
    rows += [
        event(outcome=outcome, ref=str(number) * 32, **noticed, **facts)
        for number, outcome in enumerate(OUTCOMES, 3)
    ]
    pages = ["", "history/", "history/?q=ένα", "timeline/", "per-task/"]
    pages += [f"timeline/?{urlencode({'name': 'ένα', 'event': row.pk})}" for row in rows[1:2]]
    pages += [f"clear/?{urlencode({'lock': f'{key} {holder.token}'})}" for key in keys]
    with override("de", deactivate=True):  # what was active would be activated as this one
        found = {page: unmarked(browser.get(BASE + page)) for page in pages}
    assert {page: texts for page, texts in found.items() if texts} == {}


def test_the_command_speaks_english_in_every_language() -> None:
    """Else its sentences, which are not translated, would have translated states in them."""
    output = StringIO()
    event()
    with override("de"):
        call_command("locks", "history", stdout=output)
    assert " held " in output.getvalue()
