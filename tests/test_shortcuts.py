"""Short cuts on the path of every block give what the long way gives."""

from angee_jobs.locks.backends.pg_advisory import advisory_key
from angee_jobs.locks.hold import new_owner_id


def test_owner_ids_are_as_long_as_those_of_the_secrets_module() -> None:
    ids = {new_owner_id() for _ in range(1000)}
    assert len(ids) == 1000
    assert {len(each) for each in ids} == {32}


def test_advisory_key_of_the_cache_is_that_of_its_space() -> None:
    assert (
        advisory_key("angee:name:a") == advisory_key("angee:name:a", "lock") != advisory_key("angee:name:a", "waiters")
    )
