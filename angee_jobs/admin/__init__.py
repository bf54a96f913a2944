"""The admin's page of held locks.

``page.py`` shows it, ``query.py`` says what may be asked, ``listing.py`` reads what is shown, ``release.py`` releases
by force. Django imports this module where the admin is installed. The command ``release_lock`` uses ``release.py``
without it.
"""

from django.apps import apps

if apps.is_installed("django.contrib.admin"):
    from . import page  # noqa: F401  registers the page
