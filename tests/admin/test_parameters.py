"""Parameters of the held-locks page and of its release form: never a server error, and nothing released by mistake."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from django.test import Client
from hypothesis import given
from hypothesis import strategies as st

from angee_jobs.locks import held_locks, lock
from tests.support.admin_page import URL, locks, no_users, operator  # noqa: F401  (fixtures)
from tests.support.hostile import anything, examples, texts

PARAMETERS = ["q", "backend", "kind", "o", "p", "refresh", "e", "_popup", "all"]
values = st.one_of(
    texts,
    st.sampled_from(["default", "table", "broken", "name", "-since", "key", "-token", "0", "2", "99999999999", "5"]),
)


def jsonable(value: object) -> str:
    return json.dumps(value, default=repr)


targets = st.one_of(
    texts,
    anything.map(jsonable),
    st.lists(anything, min_size=3, max_size=3).map(jsonable),
    st.tuples(
        st.sampled_from(["default", "table", "broken", "none"]),
        st.one_of(st.none(), st.integers(), anything),
        st.one_of(texts, st.just("angee:name:free")),
    ).map(jsonable),
)


@pytest.fixture(autouse=True)
def taken(locks: None) -> Iterator[None]:  # noqa: F811
    with lock("taken"), lock("taken", backend="table"):
        yield


@pytest.mark.once
def test_parameters_of_the_page(client: Client) -> None:
    @examples(40)
    @given(query=st.dictionaries(st.sampled_from(PARAMETERS), st.lists(values, max_size=2), max_size=4), raw=texts)
    def check(query: dict[str, list[str]], raw: str) -> None:
        safe = {name: [each.encode(errors="replace") for each in given] for name, given in query.items()}
        assert client.get(URL, safe).status_code == 200
        assert client.get(URL, QUERY_STRING=raw.encode(errors="replace").decode("latin-1")).status_code == 200

    check()


@pytest.mark.once
def test_the_body_of_the_release_form(client: Client) -> None:
    fields = {
        "back": values,
        "reason": values,
        "session": values,
        "confirmed": values,
    }

    @examples(50)
    @given(body=st.fixed_dictionaries({"lock": st.lists(targets, max_size=3)}, optional=fields))
    def check(body: dict[str, object]) -> None:
        safe = {
            name: [each.encode(errors="replace") for each in given]
            if isinstance(given, list)
            else given.encode(errors="replace")
            for name, given in body.items()
        }
        response = client.post(URL + "release/", safe)
        assert response.status_code in (200, 302, 400)  # 400 is Django's own, of an address that is too long
        if response.status_code == 302:
            assert response["Location"].startswith(URL), "not to where the body says"
        assert client.get(URL).status_code == 200

    check()
    for alias in ("default", "table"):
        assert [info.name for info in held_locks(backend=alias)] == ["angee:name:taken"], "nobody named it"


def test_bodies_that_are_none(client: Client) -> None:
    for kind in ("application/json", "multipart/form-data; boundary=x", "application/x-www-form-urlencoded", "é"):
        for body in (b"", b"\xff\xfe", b"--x\r\n", b"lock=%ED%A0%80&confirmed=1&reason=%00", b"{" * 1000):
            response = client.generic("POST", URL + "release/", body, content_type=kind)
            assert response.status_code in (200, 302, 400)
