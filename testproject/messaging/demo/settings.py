"""The project's settings for a worker of the demo: all the same, but on the demo's throw-away database."""

import os

from testproject.settings import *  # noqa: F403
from testproject.settings import DATABASES

from .database import database_in

DEBUG = False
DATABASES = {**DATABASES, "default": database_in(os.environ["ANGEE_JOBS_DEMO_DIR"])}
