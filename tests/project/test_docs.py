"""The documentation is what the code says: its codes, options, settings, tests and metrics."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import re
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from django_singletask import TaskLock, only_one
from django_singletask.models import KINDS, OUTCOMES, RESULTS
from django_singletask.signals import LockEvent
from tests.history.test_writing import STRONGEST

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "docs/reference"
SURFACE = (ROOT / "tests/surface.txt").read_text()
"""The public surface, as tests/project/test_surface.py compares it with the code."""
SOURCE = "\n".join(path.read_text() for path in (ROOT / "django_singletask").rglob("*.py"))
PAGES = ["tests/README.rst", "docs/operating/cost.rst", "benchmarks/SOAK.rst"]
PAGE = "\n".join((ROOT / name).read_text() for name in PAGES)
DEFINED = {
    name
    for path in (ROOT / "tests").rglob("test_*.py")
    for name in re.findall(r"(?:def|class) ([Tt]est\w+)", path.read_text())
}


@pytest.mark.parametrize("name", sorted(set(re.findall(r"``([Tt]est_?\w[\w…]+)", PAGE))))
def test_named_test_exists(name):
    assert any(fnmatchcase(test, name.replace("…", "*")) for test in DEFINED)


@pytest.mark.parametrize("path", sorted(set(re.findall(r"``(tests/[\w/.]+)``", PAGE))))
def test_named_file_exists(path):
    assert (ROOT / path).exists()


@pytest.mark.parametrize(
    ("path", "name"), re.findall(r"``(tests/[\w/.]+\.py)``:[ |]*\n?.*?``([Tt]est_?\w+)``", PAGE)
)
def test_named_test_is_in_the_named_file(path, name):
    assert re.search(rf"(def|class) {name}\b", (ROOT / path).read_text())


def queries_and_metrics():
    """Return each query of the dashboard with the metrics and labels that monitoring.rst has."""
    page = (ROOT / "docs/operating/monitoring.rst").read_text()
    code = re.findall(r'(Counter|Histogram)\("(\w+)", ".*", (\[.*?\])', page)
    metrics = {}
    for kind, name, labels in code:
        for end in ("_total",) if kind == "Counter" else ("_bucket", "_count", "_sum"):
            metrics[name + end] = {*json.loads(labels), "le"}
    board = json.loads((ROOT / "docs/operating/grafana-dashboard.json").read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    variables = [each["definition"] for each in board["templating"]["list"] if "definition" in each]
    return [*queries, *variables], metrics


def test_dashboard_asks_for_metrics_that_are_exported():
    queries, metrics = queries_and_metrics()
    assert len(metrics) == 6
    page = (ROOT / "docs/operating/monitoring.rst").read_text()
    for line in re.findall(r"^    (singletask_\w+(?:{.*?})?) \d+$", page, re.MULTILINE):
        metrics[line.partition("{")[0]] = {*re.findall(r"(\w+)=", line)}
    for query in queries:
        names = set(re.findall(r"singletask_\w+", query))
        by = re.findall(r"by \((.*?)\)", query)
        labels = {
            *re.findall(r"(\w+)=", query),
            *(label for each in by for label in each.split(", ")),
        }
        assert names <= set(metrics), query
        assert all(labels <= metrics[name] for name in names) or "unless" in query, query


def test_opentelemetry_exports_the_metrics_under_the_same_names():
    page = (ROOT / "docs/operating/monitoring.rst").read_text()
    listed = set(re.findall(r"^``(singletask\.lock\.\w+)``", page, re.MULTILINE))
    units = {name.replace(".", "_") for name in listed} | {"singletask_lock_hold_seconds"}
    for metric in queries_and_metrics()[1]:
        assert metric.rpartition("_")[0] in units


def codes(heading):
    """Return the codes of a section of the page of codes; each is there once."""
    page = (REFERENCE / "codes.rst").read_text()
    section = re.split(r"\n\n(.+)\n---+\n", page)
    text = dict(zip(section[1::2], section[2::2], strict=True))[heading]
    listed = re.findall(r"^   \* - ``(\w+)``", text, re.MULTILINE)
    assert len(listed) == len({*listed})
    return {*listed}


def part(title):
    """Return the lines of a part of the public surface."""
    text = SURFACE.partition(f"\n{title}\n---")[2]
    return text.partition("\n")[2].partition("\n\n")[0].splitlines()


def defaults(title):
    """Return the options or settings of a part of the public surface, with their defaults."""
    lines = (re.fullmatch(r"(\w+)(?:: .*?)? = (.+?)(?:: one of .*)?", line) for line in part(title))
    return {line[1]: ast.literal_eval(line[2]) for line in lines}


def json_keys(place):
    """Return the keys that an object in the JSON of the command has."""
    return {*re.findall(rf"^{re.escape(place)}(\w+)$", SURFACE, re.MULTILINE)}


OPTIONS = defaults("Options of a task, and their defaults")
SETTINGS = defaults("Settings, and their defaults")
[STATES] = [line.removeprefix("states: ").split(", ") for line in part("Codes") if "states" in line]
[POLICIES] = re.findall(r"^on_conflict: .* one of (.*)$", SURFACE, re.MULTILINE)
CONFLICTS = {*ast.literal_eval(POLICIES), "redelivery", "retry", "superseded", "outage"}


@pytest.mark.parametrize(
    ("heading", "known"),
    [
        ("Kinds of events", {*re.findall(r"""\.tell\(\s*"(\w+)\"""", SOURCE)}),
        ("Kinds of rows", {*KINDS}),
        ("Outcomes", {*OUTCOMES}),
        ("Results", {*RESULTS}),
        ("Reasons", {*CONFLICTS, "queued", "kept"}),
        ("States", {*STATES}),
        ("Levels", {"ok", "note", "restart", "warning", "unfit"}),
    ],
)
def test_the_page_of_codes_lists_each_code_and_no_other(heading, known):
    assert codes(heading) == known


def test_the_code_has_no_other_reason_and_level():
    reasons = r'(?:\breason=|report_conflict\(|postpone\(|refuse\()"(\w+)"'
    reasons = re.findall(reasons, SOURCE)
    assert {*reasons} <= codes("Reasons")
    probe = (ROOT / "django_singletask/operators/probe.py").read_text()
    assert {*re.findall(r'(?:Finding\(|yield )"(\w+)"', probe)} == codes("Levels")


def test_outcomes_are_listed_with_the_strongest_first():
    page = (REFERENCE / "codes.rst").read_text().partition("Outcomes\n----")[2]
    listed = re.findall(r"\* - ``(\w+)``", page)[: len(OUTCOMES)]
    assert [outcome for outcome in listed if outcome in STRONGEST] == STRONGEST[:-2]


@pytest.mark.parametrize("choices", [KINDS, OUTCOMES, RESULTS])
def test_history_shows_the_words_that_the_options_and_json_take(choices):
    assert {code: str(word) for code, word in choices.items()} == {code: code for code in choices}


def test_the_docstring_of_an_event_describes_each_field():
    described = re.findall(r"``(\w+)``", LockEvent.__doc__)
    assert {field.name for field in dataclasses.fields(LockEvent)} <= {*described}


def sections(page):
    """Return the fields below each heading that is a literal, by the literal."""
    text = (REFERENCE / page).read_text()
    parts = re.split(r"^\.\. _(\w+):\n\n``(\w+)``\n[-~]+\n", text, flags=re.MULTILINE)
    found = {}
    for label, name, rest in zip(parts[1::3], parts[2::3], parts[3::3], strict=True):
        assert label == name
        found[name] = dict(re.findall(r"^:(.+?): (.+(?:\n    .+)*)", rest, re.MULTILINE))
    return found


def test_each_option_has_a_heading_and_its_default():
    found = sections("options.rst")
    assert found.keys() == OPTIONS.keys()
    for name, fields in found.items():
        default = OPTIONS[name]
        shown = f'"{default}"' if isinstance(default, str) else str(default)
        assert fields["Default"].startswith(f"``{shown}``"), name


def test_options_name_each_option_of_a_lock_and_of_only_one():
    label = "In ``TaskLock``, ``only_one``"
    fields = [each.get(label, "") for each in sections("options.rst").values()]
    named = {*re.findall(r"``(\w+)``", "\n".join(fields))}
    parameters = {*inspect.signature(TaskLock).parameters, *inspect.signature(only_one).parameters}
    assert parameters - {"function", "cache", "run"} <= named
    assert named - {"TaskLock", "only_one"} <= parameters


def test_each_setting_has_a_heading_and_its_default():
    found = sections("settings.rst")
    assert found.keys() == SETTINGS.keys()
    for name, default in SETTINGS.items():
        shown = f'"{default}"' if isinstance(default, str) else str(default)
        assert found[name]["Default"].startswith(f"``{shown}``"), name


@pytest.mark.parametrize("page", sorted({*re.findall(r"\{DOCS\}/([\w/-]+)\.html", SOURCE)}))
def test_a_page_that_messages_name_exists(page):
    assert (ROOT / f"docs/{page}.rst").exists()


@pytest.mark.parametrize(
    "page",
    sorted([*ROOT.glob("*.rst"), ROOT / "tests/README.rst", *(ROOT / "docs").rglob("*.rst")]),
    ids=lambda page: page.stem,
)
def test_no_line_is_too_long(page):
    assert [line for line in page.read_text().splitlines() if len(line) > 110] == []


@pytest.mark.parametrize("page", ["contributing/how-it-works.rst"])
def test_a_module_that_a_page_names_exists(page):
    named = re.findall(r"``((?:\w+/)*\w+\.py|\w+/)``", (ROOT / "docs" / page).read_text())
    assert len(named) > 10
    roots = (ROOT / "django_singletask", ROOT)
    assert [one for one in named if not any((root / one).exists() for root in roots)] == []


def keys_of(action):
    """Return the keys that the page of the JSON lists in the section of an action."""
    page = (REFERENCE / "json.rst").read_text()
    text = re.split(rf"^``{action}``\n-+\n", page, flags=re.MULTILINE)[1]
    text = re.split(r"\n\n``\w+``\n-+\n", text)[0]
    cells = re.findall(r"^   \* - (.+)$", text, re.MULTILINE)
    return {*re.findall(r"``(\w+)``", " ".join(cells))}


@pytest.mark.parametrize(
    ("action", "place"),
    [("list", "list.locks[]."), ("history", "history.rows[]."), ("why", "why.")],
)
def test_json_has_the_keys_that_its_page_lists(action, place):
    assert keys_of(action) == json_keys(place) - {"version"}


def test_json_of_probe_has_the_keys_that_the_page_lists():
    page = (REFERENCE / "json.rst").read_text().partition("``probe``\n---")[2]
    listed = {*re.findall(r"``(\w+)``", page.partition("\n---")[0])}
    assert json_keys("probe.") - {"version"} <= listed


def test_each_picture_is_on_a_page():
    pages = [ROOT / "README.rst", *(ROOT / "docs").rglob("*.rst")]
    shown = {*re.findall(r"/([\w-]+\.(?:png|svg))$", "\n".join(p.read_text() for p in pages), re.M)}
    assert {path.name for path in (ROOT / "docs/pictures").iterdir()} == shown


RESULTS = (ROOT / "benchmarks/RESULTS.rst").read_text()
COSTS = (ROOT / "docs/operating/cost.rst").read_text()


def measured(title, candidate):
    """Return the median and the ratio of a candidate in a table of the benchmarks."""
    table = RESULTS.partition(f"\n{title}\n---")[2].partition("\n---")[0]
    row = re.search(rf"^{re.escape(candidate)}  +(\S+) \S+  +([\d.]+)", table, re.MULTILINE)
    return row.groups()


@pytest.mark.parametrize(
    ("title", "candidate"),
    [
        ("Throughput of a worker", "django-singletask"),
        ("Throughput of a worker", "django-singletask, history off"),
        ("Throughput of a worker, one core busy", "django-singletask"),
        ("Throughput of a worker, one core busy", "django-singletask, history off"),
        ("Throughput of a worker, 20 ms of work", "django-singletask"),
        ("Throughput of a worker, 20 ms of work", "django-singletask, history off"),
        ("A queue behind one lock", 'on_conflict="requeue"'),
    ],
)
def test_costs_are_those_of_the_benchmarks(title, candidate):
    assert measured(title, candidate)[1] in COSTS


@pytest.mark.parametrize(
    ("title", "candidate"),
    [
        ("Take and release on Redis", "django-singletask, RedisCache"),
        ("Take and release on Redis", "django-singletask, RedisCache, history off"),
        *(
            ("Enqueue only once", candidate)
            for candidate in ("plain Task", "django-singletask", "celery-singleton", "celery-once")
        ),
    ],
)
def test_times_are_those_of_the_benchmarks(title, candidate):
    microseconds = float(measured(title, candidate)[0].replace(",", ""))
    assert f"{microseconds / 1000:.2f} ms" in COSTS


def test_the_figures_of_a_fleet_are_those_of_the_model():
    fleet = (ROOT / "benchmarks/FLEET.txt").read_text()
    short_tasks, long_tasks = re.findall(r"^1,000 +0% .* ([\d.]+)%$", fleet, re.MULTILINE)[:2]
    requests, connections = re.search(r"^1,000 +1 +(\S+) .*% +(\S+) ", fleet, re.MULTILINE).groups()
    large_fleet = re.search(r"^10,000 +1 +\S+ +([\d.]+)%", fleet, re.MULTILINE)[1]
    microseconds_to_return = int(re.search(r"^return +(\d+) µs", fleet, re.MULTILINE)[1])
    page = " ".join(COSTS.split())
    assert f"makes {float(requests.replace(',', '')) / 1000:.1f} requests a second" in page
    assert f"1,000 processes use about {float(long_tasks):.0f}%" in page
    assert f"10,000 use about {float(large_fleet):.0f}%" in page
    assert f"1,000 processes use about {float(short_tasks):.0f}%" in page
    most_connected = 10_000 * 1000 / float(connections.replace(",", ""))
    assert f"about {round(most_connected, -2):,.0f} processes" in page
    assert f"About {round(1e6 / microseconds_to_return, -2):,.0f} holders" in page
