"""Requests drawn by schemathesis from vLLM's own openapi.json, each sent to an engine and to the proxy.

    python schema.py BASE_URL MODEL ENGINE_URL [EXAMPLES]

Both must answer with the same status, but for the differences listed here with their reasons. The
proxy must never answer with a status of 500 or more that the engine does not answer with.
"""

import gzip
import importlib.metadata
import json
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import requests  # type: ignore[import-untyped]
import schemathesis  # type: ignore[import-not-found]
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable

from checks.packages import report

_SCHEMA = Path(__file__).with_name("vllm_openapi.json.gz")
_EXAMPLES = 40
_TIMEOUT_S = 60.0
# Long answers show nothing more.
_MOST_TOKENS = 4
_CONTEXT = 4_096
_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
_GENERATION = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses")


# Served by an engine alone.
NOT_SERVED = {
    "/invocations": "SageMaker's own route",
    "/is_scaling_elastic_ep": "the operator's",
    "/scale_elastic_ep": "the operator's",
    "/kv_event_sources": "the operator's",
    "/v1/responses/{response_id}": "an answer is kept by the engine that made it",
    "/v1/responses/{response_id}/cancel": "an answer is kept by the engine that made it",
}
# (status of the engine, of the proxy, words of the engine, of the proxy): why.
DIFFERENCES = {
    (404, 501, "Not Found", "no engine serves"): "501 says that the engines lack the route",
    (404, 400, "Not Found", ""): "bodies are judged before it shows that the engines lack a route",
    (404, 400, "not found", "responses are not kept"): "neither keeps responses",
    (400, 404, "", "does not exist"): "the model's name is judged before the rest",
    (200, 400, "", "from 1 to 128"): "the proxy bounds the answers of one request",
}


def tame(case: Any, model: str) -> Any:
    """Name the served model, so that more than its name is judged, and ask for short answers."""
    body = case.body
    if not isinstance(body, dict):
        return case
    if "model" in body and len(json.dumps(body, default=str)) % 8:
        body["model"] = model
    if case.operation.path.startswith(_GENERATION):
        for name in _LIMITS:
            value = body.get(name)
            if type(value) is int and 0 < value <= _CONTEXT:
                body[name] = min(value, _MOST_TOKENS)
        if all(body.get(name) is None for name in _LIMITS):
            body["max_output_tokens" if "responses" in case.operation.path else "max_tokens"] = 2
    return case


def main() -> int:
    """Compare; print a line for each operation, as the other checks do."""
    base_url, model, engine_url, *rest = sys.argv[1:]
    examples = int(rest[0]) if rest else _EXAMPLES
    with gzip.open(_SCHEMA) as file:
        schema = schemathesis.openapi.from_dict(json.load(file))
    operations = (result.ok() for result in schema.get_all_operations())
    served = (one for one in operations if one.path not in NOT_SERVED)
    session = requests.Session()

    def outcome(operation: Any) -> tuple[str, str | None]:
        statuses, excused, faults = Counter[int](), Counter[str](), list[str]()

        def compare(case: Any) -> None:
            """Send one request to both and compare the statuses."""
            answers = []
            # Tamed once, as a tamed body may be tamed further.
            case = tame(case, model)
            for url in (engine_url, base_url):
                try:
                    arguments = case.as_transport_kwargs(base_url=url)
                    answers.append(session.request(**arguments, timeout=_TIMEOUT_S))
                except (requests.exceptions.InvalidHeader, UnicodeError):
                    return  # It cannot be written.
                except requests.RequestException as error:
                    faults.append(f"{operation.label}: {url}: {error}")
                    return
            found = [one.status_code for one in answers]
            statuses[found[1]] += 1
            if found[0] == found[1]:
                return
            said = [one.text for one in answers]
            for (*expected, their_words, our_words), reason in DIFFERENCES.items():
                if expected == found and their_words in said[0] and our_words in said[1]:
                    excused[reason] += 1
                    return
            faults.append(
                f"{operation.label}: {found[0]} from the engine, {found[1]} from the proxy "
                f"({said[1][:200]}; the engine said {said[0][:200]}) for "
                f"{str(answers[1].request.body)[:300]}"
            )

        _draw(operation, examples, compare)
        seen = ", ".join(f"{n} x {status}" for status, n in sorted(statuses.items()))
        differing = "".join(f"; {n} differ: {why}" for why, n in excused.items())
        fault = f"{len(faults)} differ: {faults[0]}" if faults else None
        return f"{operation.label}: {seen}{differing}", fault

    return report(importlib.metadata.version("schemathesis"), map(outcome, served))


def _draw(operation: Any, examples: int, take: Callable[[Any], None]) -> None:
    """Draw requests of an operation, the same each time: malformed ones too."""
    for mode in schemathesis.GenerationMode:

        @given(case=operation.as_strategy(generation_mode=mode))
        @settings(
            max_examples=examples,
            derandomize=True,
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        def run(case: Any) -> None:
            take(case)

        with suppress(Unsatisfiable):  # Nothing about such an operation can be wrong.
            run()


if __name__ == "__main__":
    sys.exit(main())
