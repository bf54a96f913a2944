"""The suite's settings for a project whose only database is PostgreSQL, and empty."""

from tests.settings import *  # noqa: F403
from tests.settings import DATABASES as ALL

DATABASES = {"default": ALL["postgres"] | {"NAME": "bare"}}
del ANGEE_JOBS_LOCKS  # noqa: F821
