"""A small project whose own tests take locks; its database is in the environment."""

import json
import os

SECRET_KEY = "only-for-tests"
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
ROOT_URLCONF = "shop.views"
INSTALLED_APPS = ["angee_jobs", "shop"]
DATABASES = {"default": json.loads(os.environ["INNER_DATABASE"])}
DATABASES["default"]["ATOMIC_REQUESTS"] = True
if backend := os.environ.get("INNER_BACKEND"):
    ANGEE_JOBS_LOCKS = {"default": {"BACKEND": backend}}
if runner := os.environ.get("INNER_RUNNER"):
    TEST_RUNNER = runner
