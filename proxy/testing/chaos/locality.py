"""Runs in which all that decides by where a KV cache is, or may go, is on.

Prefillers are chosen by their prefix caches, ranks compute prompts, turns return to ranks, conversations have
names and common beginnings, and the engines are of two versions, some of which change with a restart.
"""

import random
from collections.abc import Sequence
from dataclasses import replace

from balanceroute.proxy.lab.emulate.settings import DpMode, EmulationSettings, Preemption
from balanceroute.proxy.testing.chaos.clients import Visit
from balanceroute.proxy.testing.chaos.faults import Act, Injection
from balanceroute.proxy.testing.chaos.requests import ClientRequest, with_beginning
from balanceroute.topologies import CONNECTORS

VERSIONS = ("0.32.0", "0.33.0")
_TALKS = 8
# Of the beginning that all turns of a conversation have, and of what each adds. The proxy knows beginnings
# by pieces of 2 KiB of text.
_WORDS, _FURTHER_WORDS, _WORD_BYTES = 20, 8, 150


def with_near_engines(engines: EmulationSettings) -> EmulationSettings:
    """Return a fleet of which every role has two engines, and whose ranks can compute prompts."""
    if not CONNECTORS[engines.connector].ranks_prefill:
        engines = replace(engines, connector="nixl", preemption=Preemption.INTERNAL)
    return replace(engines, prefillers=max(2, engines.prefillers), ranks=max(2, engines.ranks))


def with_locality(
    seed: int, engines: EmulationSettings, flags: dict[str, object]
) -> EmulationSettings:
    """Return the engines with prefix caches and versions; add the proxy's flags."""
    rng = random.Random(f"locality {seed}")
    flags |= {
        "prefill_choice": "prefix-aware",
        "local_prefill_tokens": rng.choice([40, 300, 100_000]),
        "prefix_affinity": random.Random(f"near affinity {seed}").choice([0.0, 1.0, 30.0]),
    }
    return replace(
        engines,
        prefix_cache_tokens=engines.prefix_cache_tokens or rng.choice([500, 10_000]),
        prompt_tokens_details=True,
        engine_versions=_versions(rng, engines),
    )


def _versions(rng: random.Random, engines: EmulationSettings) -> dict[str, str]:
    """Return the versions of all engines. The first of each role fit, and some engine is of the other."""
    decoders = engines.ranks if engines.dp_mode is DpMode.PORTS else 1
    names = [f"prefill/{number}" for number in range(1, engines.prefillers)]
    names += [f"decode/{number}" for number in range(1, decoders)]
    drawn = {name: rng.choice(VERSIONS) for name in names}
    return drawn | {rng.choice(names): VERSIONS[1]}


def with_updates(seed: int, injections: Sequence[Injection]) -> list[Injection]:
    """Return the faults, where engines come back from some restarts with another version.

    The first engine of each role keeps its own, so that some pair fits again in the end.
    """
    rng = random.Random(f"updates {seed}")
    return [
        replace(one, version=rng.choice(("", *VERSIONS)))
        if one.act is Act.KILL and one.engine > 0
        else one
        for one in injections
    ]


def with_talks(seed: int, visits: Sequence[Visit]) -> list[Visit]:
    """Return what clients do, each request as a turn of one of a few conversations."""

    def turn(request: ClientRequest) -> ClientRequest:
        # Whoever sends the same twice sends the same here.
        rng = random.Random(b"%d %b" % (seed, request.body))
        talk = rng.randrange(_TALKS)
        words = _WORDS + _FURTHER_WORDS * rng.randrange(4)
        text = " ".join(f"talk{talk}-{word}-".ljust(_WORD_BYTES, "x") for word in range(words))
        return with_beginning(request, text, session=f"talk {talk}" if rng.random() < 0.7 else "")

    return [replace(visit, requests=tuple(map(turn, visit.requests))) for visit in visits]


def mixed_pairs_allowed(injections: Sequence[Injection]) -> bool:
    """Return whether a fault may keep the proxy from knowing an engine's version in time."""
    harmless = (Act.POLICY, Act.DECISION, Act.DRAIN)
    return any(one.act not in harmless for one in injections)
