"""What can be done with a `Lock` object."""

import copy
import pickle

import pytest

from angee_jobs.locks import (
    lock,
)


def test_a_lock_is_not_copied():
    with lock("one", backend="local") as held:
        for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="detach"):
                duplicate(held)
