"""Locks under fire: many processes, faults at random, and a checker that reads what they wrote down.

    python -m tests.torture --seconds 300          # every backend whose server can run here
    python -m tests.torture.soak --minutes 60      # steady load instead, and does anything grow?

* ``worker.py``   what a process does: protected sections, written to a log of its own
* ``nemesis.py``  what is done to processes and servers, written to a log as well
* ``checker.py``  reads the logs, and knows nothing of the package: what was promised, and what happened
* ``planted.py``  backends with a bug each, which the checker has to find
"""
