"""One worker of the demo: `manage.py db_worker`, in a process that cannot outlive the demo.

The demo keeps the other end of our standard input open. It closes when the demo ends, however it ends.
"""

import os
import sys
import threading

from django.core.management import execute_from_command_line


def leave_with_the_demo() -> None:
    try:
        while os.read(0, 1):
            pass
    finally:
        os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=leave_with_the_demo, daemon=True).start()
    os.environ["DJANGO_SETTINGS_MODULE"] = "testproject.messaging.demo.settings"
    execute_from_command_line(["manage.py", "db_worker", *sys.argv[1:]])
