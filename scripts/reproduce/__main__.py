"""Makes a table or a picture of the pages: `python scripts/reproduce NAME ..`; `--list` tells the names."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from commands import main

COMMANDS = {
    "demo": "reproduce.live",
    "fair-shares": "reproduce.overload",
    "goodput": "reproduce.overload",
    "hostile-tenant": "reproduce.tenants",
    "live-table": "reproduce.live",
    "overload": "reproduce.overload",
    "predictor-table": "reproduce.predictors",
    "predictors": "reproduce.predictors",
    "qos": "reproduce.tenants",
    "reference": "reproduce.reference",
    "scale": "reproduce.scale",
    "score-weights": "reproduce.scores",
    "scores": "reproduce.scores",
    "served-streams": "reproduce.streams",
    "servegen-trace": "reproduce.traces",
    "simulations": "reproduce.simulations",
    "stream-orders": "reproduce.streams",
}

if __name__ == "__main__":
    sys.exit(main("reproduce", COMMANDS))
