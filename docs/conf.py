"""Configuration of the documentation: ``sphinx-build -W docs docs/_build``."""

from __future__ import annotations

import inspect
import os
import tomllib
from pathlib import Path
from typing import Any

import django
from django.conf import settings
from sphinx.pycode import ModuleAnalyzer

import django_singletask

# The reference imports the package.
settings.configure(INSTALLED_APPS=["django.contrib.contenttypes", "django_singletask"])
django.setup()

project = "django-singletask"
copyright = "the authors of django-singletask"
release = django_singletask.__version__
extensions = ["sphinx.ext.autodoc"]
extensions += ["sphinx_copybutton", "notfound.extension", "sphinxext.opengraph"]
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
pygments_dark_style = "github-dark"  # the theme's own underlines names as if they were links
html_title = f"django-singletask {release}"
project_file = Path(__file__).parent.parent / "pyproject.toml"
repository = tomllib.loads(project_file.read_text())["project"]["urls"].get("Repository", "")
if repository:
    html_theme_options = {
        "source_repository": repository,
        "source_branch": "main",
        "source_directory": "docs/",
    }
# Where these pages are. Read the Docs says so.
address = os.environ.get("READTHEDOCS_CANONICAL_URL", "/en/latest/")
html_baseurl = address
notfound_context = {
    "title": "Page not found",
    "body": f"""
        <h1>Page not found</h1>
        <p>This address has no page, or its page is in another version of the documentation.</p>
        <ul>
        <li><a href="{address}search.html">Search</a> looks for words in all pages.</li>
        <li><a href="{address}index.html">The first page</a> leads to all pages.</li>
        <li><a href="{address}operating/troubleshooting.html">Troubleshooting</a> has the
            steps for “the task does not run”.</li>
        </ul>
    """,
}
# Copy neither prompts nor what a command prints.
copybutton_prompt_text = "$ "
copybutton_exclude = ".linenos, .gp, .go"
# What a chat shows of a link to a page.
ogp_site_url = address
ogp_image = "_images/held.png"
ogp_image_alt = "The admin page of the locks that are held now"
ogp_enable_meta_description = True
ogp_social_cards = {"enable": False}
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = ["accessible.js"]
# The order of the results of the search. tests/docs_search.py asks it what people ask.
html_search_scorer = str(Path(__file__).with_name("search_scorer.js"))
nitpicky = True
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True}

# Overloads are for type checkers. Readers want one list of the options.
for module in ("django_singletask.locks.only_one", "django_singletask.task.decorator"):
    analyzer = ModuleAnalyzer.for_module(module)
    analyzer.analyze()
    analyzer.overloads.clear()

PLAIN = (
    "django_singletask.SingletonTask.apply",
    "django_singletask.SingletonTask.apply_async",
    "django_singletask.SingletonTask.apply_async_on_commit",
    "django_singletask.SingletonTask.delay_on_commit",
    "django_singletask.SingletonTask.lock",
    "django_singletask.SingletonTask.queued",
    "django_singletask.TaskLock",
    "django_singletask.only_one",
)
"""What is shown with its parameters only: without types, and without what is internal."""
CREATED_BY_THE_PACKAGE = (
    "django_singletask.DuplicateTask",
    "django_singletask.LockConflict",
    "django_singletask.signals.LockEvent",
)
"""What is shown without parameters."""


def plain_signature(app: Any, what: str, name: str, thing: Any, *rest: Any) -> Any:
    if name in CREATED_BY_THE_PACKAGE:
        return "", None
    if name not in PLAIN:
        return None
    parameters = [
        parameter.replace(annotation=parameter.empty)
        for parameter in inspect.signature(thing).parameters.values()
        if parameter.name not in ("run", "self") and not parameter.name.startswith("_")
    ]
    return str(inspect.Signature(parameters)), None


def public_name(app: Any, env: Any, node: Any, content: Any) -> Any:
    """Find the names of the package itself that docstrings of its modules use."""
    name = node.get("reftarget")
    if name not in django_singletask.__all__:
        return None
    python = env.get_domain("py")
    name = f"django_singletask.{name}"
    return python.resolve_xref(env, node["refdoc"], app.builder, "obj", name, node, content)


def setup(app: Any) -> None:
    app.connect("missing-reference", public_name)
    app.connect("autodoc-process-signature", plain_signature)
