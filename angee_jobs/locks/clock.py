"""The clock that this process measures its own leases with.

It must go on while the machine is suspended (a lease does not wait for a laptop to wake up) and must not jump
when somebody sets the time. Linux has CLOCK_BOOTTIME for that; elsewhere ``time.monotonic`` comes closest. It is
never compared with a server's clock: only the backend decides when a hold has expired.
"""

from __future__ import annotations

import functools
import time

#: Seconds as a float, since an arbitrary moment. A C callable: it is on the path of every acquire and release.
now = functools.partial(time.clock_gettime, time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic
