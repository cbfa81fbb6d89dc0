"""The version has one place, and messages link to the documentation of their own version."""

from __future__ import annotations

import pkgutil
import re
import runpy
import tomllib
from pathlib import Path

import pytest

import django_singletask

ROOT = Path(__file__).parents[2]
BUILD = tomllib.loads((ROOT / "pyproject.toml").read_text())
SITE = "https://django-singletask.readthedocs.io/en"


def test_the_build_reads_the_version_of_the_package() -> None:
    assert BUILD["project"]["dynamic"] == ["version"]
    attribute = BUILD["tool"]["setuptools"]["dynamic"]["version"]["attr"]
    assert pkgutil.resolve_name(attribute) == django_singletask.__version__


@pytest.mark.parametrize(
    ("version", "folder"), [("0.1.0.dev0", "latest"), ("0.1.0", "0.1.0"), ("1.2.3rc1", "1.2.3rc1")]
)
def test_messages_link_to_the_documentation_of_their_version(
    version: str, folder: str, tmp_path: Path
) -> None:
    released = tmp_path / "version.py"
    code = (ROOT / "django_singletask" / "version.py").read_text()
    released.write_text(re.sub(r'(?<=^VERSION = ").*(?="$)', version, code, flags=re.MULTILINE))
    assert runpy.run_path(str(released))["DOCS"] == f"{SITE}/{folder}"


def test_each_linked_page_exists() -> None:
    code = "".join(path.read_text() for path in (ROOT / "django_singletask").rglob("*.py"))
    pages = re.findall(r"\{DOCS\}/([\w/-]+)\.html", code)
    assert len(pages) == code.count("{DOCS}")
    assert all((ROOT / "docs" / f"{page}.rst").exists() for page in pages)


def test_readme_and_policy_name_the_supported_versions() -> None:
    project = BUILD["project"]
    minors = re.findall(r"Python :: 3\.(\d+)", "\n".join(project["classifiers"]))
    assert project["requires-python"] == f">=3.{minors[0]}"
    [celery] = [need for need in project["dependencies"] if need.startswith("celery")]
    policy = (ROOT / "docs/reference/policy.rst").read_text()
    oldest = celery.removeprefix("celery>=")
    assert f"   * - Celery\n     - {oldest} to " in policy
    readme = (ROOT / "README.rst").read_text()
    assert f"Celery {oldest} to " in readme
    for page in (policy, readme):
        assert f"3.{minors[0]} to 3.{minors[-1]}" in page
        for django in re.findall(r"Django :: (\d\.\d)", "\n".join(project["classifiers"])):
            assert django in page
