"""A small project that tests its locked code with the doubles; its locks would need servers that are not there."""

SECRET_KEY = "only-for-tests"
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
INSTALLED_APPS = ["angee_jobs", "billing"]
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": "/nowhere/billing.sqlite3"}}
ANGEE_JOBS_LOCKS = {
    "default": {"BACKEND": "angee_jobs.locks.TableLockBackend"},
    "elsewhere": {"BACKEND": "billing.Unreachable"},
}
