"""Which cases of a long table run in `make test`, and which in `make test-all` alone."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest

# BR-H in both forms, its reactive form, and the rule that most deployments have. The others share their code.
USUAL_POLICIES = ("br-h", "br-h --paper", "br-0", "jsq")


def usually(
    usual: Collection[object], cases: Iterable[Any], *, ids: Iterable[str] | None = None
) -> list[Any]:
    """Return the cases for `parametrize`; those that are not usual run in `make test-all` alone.

    Args:
        usual: Names of cases.
        cases: Values, or (with `ids`) what the names stand for.
        ids: The cases' names, if they are not names themselves.
    """
    named = [(case, case) for case in cases] if ids is None else zip(ids, cases, strict=True)
    marks = {True: (), False: (pytest.mark.extended,)}
    return [pytest.param(case, id=str(name), marks=marks[name in usual]) for name, case in named]
