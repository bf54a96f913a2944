"""Promise 11 further: a process forked without Python's knowledge is a new process.

uWSGI without ``--lazy-apps`` forks so, an embedded interpreter, a C extension. Seen: both children inside at once,
since they shared their parent's re-entrant session; and leases that no thread renewed.
"""

import pytest

from tests.support.procs import Child


@pytest.mark.once
def test_two_children_of_a_master_that_has_used_locks(alias):
    if alias == "local":
        pytest.skip("excludes inside one process only")
    inside, told = None, {}
    with Child("fork_in_c", alias) as master:
        while len([each for each in told if each[0] == "held"]) < 2:
            word, number, *rest = master.line(40).split(" ", 2)
            assert word != "failed", rest
            if word == "in":
                assert inside is None, "both are inside"
                inside = number
            elif word == "out":
                assert inside == number
                inside = None
            else:
                told[word, number] = rest
        master.send("go on")
        assert master.line(20) == "parent 1 1", "the master has its lock"
    assert told == {
        ("refused", "1"): ["0"],
        ("refused", "2"): ["0"],
        ("held", "1"): ["1"],
        ("held", "2"): ["1"],
    }
