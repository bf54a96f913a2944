"""What the tests of hostile input throw at every entrance: values of any type and shape, and texts of any kind."""

from __future__ import annotations

from datetime import timedelta
from decimal import Decimal
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

#: With a profile that makes more examples (tests/conftest.py), so do these.
THOROUGH = settings.default is not None and settings.default.max_examples > 100


def examples(count: int) -> Any:
    """So many in the suite, the same each time; ten times as many in a thorough search."""
    return settings(
        max_examples=count * 10 if THOROUGH else count,
        derandomize=not THOROUGH,
        deadline=None,
        database=None,
        phases=list(Phase) if THOROUGH else [Phase.generate],
        suppress_health_check=list(HealthCheck),
    )


#: Of any kind: lone surrogates, control characters, quotes, wildcards, paths, templates, numbers.
texts = st.one_of(
    st.text(st.characters(codec=None, exclude_categories=()), max_size=30),
    st.sampled_from(
        [
            "", " ", "\0", "\ud800", "angee:", "angee:name:", "angee:name:a", "angee:x:%41", "a:b%3A", "***",
            "'; DROP TABLE lock; --", "{{ 7|add:7 }}", "%s%n%(x)s", "../../etc/passwd", "*", "[", "é", "\u202ex",
            "-1", "1e999", "inf", "nan", "0x10", "9" * 5000, "x" * 20_000, "null", "<script>alert(1)</script>",
            "\r\nSET-COOKIE: a",
        ]
    ),
)  # fmt: skip

numbers = st.one_of(
    st.integers(),
    st.floats(),
    st.sampled_from([0, -0.0, 1e-300, 10**400, -(10**400), 2**63, -(2**63), True, Decimal("1"), 1j]),
)

#: No callables and no modules: a dotted path of those is imported by whoever wrote it into the settings.
anything = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, texts, st.binary(max_size=10), st.timedeltas(), st.just(object())),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(st.one_of(texts, st.integers(), st.none()), inner, max_size=3),
    ),
    max_leaves=4,
)

times = st.one_of(anything, st.sampled_from([timedelta.max, timedelta.min, timedelta(0), timedelta(microseconds=1)]))
