"""The documentation names tests, and its dashboard metrics: they must exist."""

from __future__ import annotations

import json
import re
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from django_singletask.models import HoldOutcome, Kind, Result

ROOT = Path(__file__).parent.parent
PAGES = ["what-happens-when.rst", "evidence.rst"]
PAGE = "\n".join((ROOT / "docs/explanation" / name).read_text() for name in PAGES)
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
    assert len(metrics) == 5
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


@pytest.mark.parametrize("choices", [Kind, HoldOutcome, Result])
def test_history_shows_the_words_that_the_options_and_json_take(choices):
    assert choices.values == choices.labels
    text = (ROOT / "docs/operating/history.rst").read_text()
    assert {*choices.values} - {"run"} <= {*re.findall(r"``(\w+)``", text)}
