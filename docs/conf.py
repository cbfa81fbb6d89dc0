"""Configuration of the documentation: ``sphinx-build -W docs docs/_build``."""

from __future__ import annotations

import inspect
import os
import tomllib
from pathlib import Path
from typing import Any

import django
from django.conf import settings

import django_singletask

# The reference imports the package.
settings.configure(INSTALLED_APPS=["django.contrib.contenttypes", "django_singletask"])
django.setup()

project = "django-singletask"
copyright = "the authors of django-singletask"
release = django_singletask.__version__
extensions = ["sphinx.ext.autodoc"]
if "READTHEDOCS" in os.environ:  # elsewhere a build needs no network
    extensions.append("sphinx.ext.intersphinx")
intersphinx_mapping = {
    "python": ("https://docs.python.org/3/", None),
    "django": (
        "https://docs.djangoproject.com/en/stable/",
        "https://docs.djangoproject.com/en/stable/_objects/",
    ),
    "celery": ("https://docs.celeryq.dev/en/stable/", None),
}
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"django-singletask {release}"
project_file = Path(__file__).parent.parent / "pyproject.toml"
repository = tomllib.loads(project_file.read_text())["project"]["urls"].get("Repository", "")
if repository:
    html_theme_options = {
        "source_repository": repository,
        "source_branch": "main",
        "source_directory": "docs/",
    }
html_static_path = ["_static"]
html_css_files = ["tables.css"]
html_js_files = ["accessible.js"]
nitpicky = False
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True}

PLAIN = ("django_singletask.TaskLock", "django_singletask.only_one")
"""What is shown with its parameters only: without types, and without what is internal."""


def plain_signature(app: Any, what: str, name: str, thing: Any, *rest: Any) -> Any:
    if name not in PLAIN:
        return None
    parameters = [
        parameter.replace(annotation=parameter.empty)
        for parameter in inspect.signature(thing).parameters.values()
        if parameter.name != "run" and not parameter.name.startswith("_")
    ]
    return str(inspect.Signature(parameters)), None


def setup(app: Any) -> None:
    app.connect("autodoc-process-signature", plain_signature)
