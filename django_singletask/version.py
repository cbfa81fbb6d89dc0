"""The version of the package, and the address of its documentation."""

from __future__ import annotations

VERSION = "1.0.0.dev0"
"""The version of the package: the build and the documentation read it from here."""

DOCS = "https://django-singletask.readthedocs.io/en/"
if "dev" in VERSION:
    DOCS += "latest"
else:
    DOCS += VERSION
"""Where the documentation of this version is, for messages that name a page of it."""
