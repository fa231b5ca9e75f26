"""Tokens that name requests and transfers."""

import random

from balanceroute.proxy.live.scheduling.driver import UniqueTokens


class Counted(random.Random):
    """Counts how often it is asked."""

    asked = 0

    def getrandbits(self, k: int, /) -> int:
        self.asked += 1
        return super().getrandbits(k)


def test_every_token_is_another_of_128_bits() -> None:
    token = UniqueTokens(random.Random(7))
    made = [token() for _ in range(1_000)]
    assert len(set(made)) == 1_000
    assert {len(one) for one in made} == {32}
    assert set("".join(made)) == set("0123456789abcdef")


def test_the_system_is_asked_once_for_many() -> None:
    rng = Counted(7)
    token = UniqueTokens(rng)
    for _ in range(128):
        token()
    assert rng.asked == 2
