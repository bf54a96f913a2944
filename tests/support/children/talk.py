"""How tasks speak with the test: through lists in Valkey, since what a pool's process writes to a pipe may get lost."""

import os
import time

_clients = {}


def valkey():
    """One client for each process, which stays: it may be told to end at any moment, also in a finalizer."""
    import redis

    if os.getpid() not in _clients:
        path = os.environ["ANGEE_JOBS_TEST_BROKER"]
        _clients[os.getpid()] = redis.Redis(unix_socket_path=path, decode_responses=True)
    return _clients[os.getpid()]


def tell(key, *words):
    valkey().rpush(f"said:{key}", " ".join(map(str, words)))


def wait_for_go(key, seconds=40):
    """Until the test says so; in small pieces, so that a soft time limit can strike between them."""
    client, end = valkey(), time.monotonic() + seconds
    while time.monotonic() < end:
        if client.lpop(f"go:{key}"):
            return True
        time.sleep(0.01)
    raise AssertionError("the test does not say go")
