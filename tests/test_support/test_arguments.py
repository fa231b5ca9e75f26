"""Numbers in the command lines of scripts."""

import argparse

import pytest
from tests.support.arguments import positive, several


def test_an_integer_is_read() -> None:
    assert (positive("1"), several("2")) == (1, 2)


@pytest.mark.parametrize("text", ["0", "-1", "", "x", "1.5"])
def test_what_is_none_of_at_least_one_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not an integer of at least 1"):
        positive(text)


def test_one_is_not_several() -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="1 is not an integer of at least 2"):
        several("1")
