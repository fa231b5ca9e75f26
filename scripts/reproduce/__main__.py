"""Makes a table or a picture of the pages: `python scripts/reproduce NAME ..`; `--list` tells the names."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from commands import main

COMMANDS = {
    "admission-idle": "reproduce.admission",
    "audit": "reproduce.live",
    "demo": "reproduce.live",
    "energy": "reproduce.simulations",
    "fair-shares": "reproduce.admission",
    "forecasts": "reproduce.admission",
    "goodput": "reproduce.admission",
    "hostile-tenant": "reproduce.tenants",
    "live-tables": "reproduce.live",
    "local-prefill": "reproduce.prefill",
    "model-alias": "reproduce.models",
    "overload": "reproduce.overload",
    "predictor-table": "reproduce.predictors",
    "predictors": "reproduce.predictors",
    "prefill-tail": "reproduce.prefill",
    "qos": "reproduce.tenants",
    "reference": "reproduce.reference",
    "request-path": "reproduce.reference",
    "reservation": "reproduce.simulations",
    "score-weights": "reproduce.prefill",
    "scale": "reproduce.scale",
    "scores": "reproduce.prefill",
    "served-streams": "reproduce.streams",
    "servegen-trace": "reproduce.simulations",
    "simulations": "reproduce.simulations",
    "stream-orders": "reproduce.streams",
    "turns": "reproduce.turns",
}

if __name__ == "__main__":
    sys.exit(main("reproduce", COMMANDS))
