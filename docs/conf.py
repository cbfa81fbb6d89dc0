"""Configuration of the documentation: ``sphinx-build -W docs docs/_build``."""

from __future__ import annotations

import tomllib
from pathlib import Path

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
nitpicky = False
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True}
