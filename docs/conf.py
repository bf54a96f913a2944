"""Sphinx: pages in Markdown, the reference from the docstrings. Built by ``tox -e docs``, with warnings as errors."""

import sys
import tomllib
from pathlib import Path

import django
from django.conf import settings

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
settings.configure(
    SECRET_KEY="only-for-the-documentation",
    INSTALLED_APPS=["django.contrib.contenttypes", "django.contrib.auth", "angee_jobs"],
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}},
    DEFAULT_AUTO_FIELD="django.db.models.BigAutoField",
)
django.setup()

project = "angee_jobs"
author = "angee_jobs contributors"
release = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]

extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["_build"]

myst_heading_anchors = 3
myst_enable_extensions = ["fieldlist"]

default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 88

html_theme = "furo"
html_title = f"angee_jobs {release}"
