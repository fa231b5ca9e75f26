"""Settings for every test: Hypothesis is deterministic unless told to search deeply.

`HYPOTHESIS_PROFILE=deep make test` draws many new examples instead.
"""

import os

from hypothesis import settings

# As the command line does; before numpy is imported.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

settings.register_profile("ci", derandomize=True, max_examples=50, deadline=None)
settings.register_profile("deep", max_examples=5_000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
