"""The HTTP client of all checks: to make one reads every certificate, 30 ms that the engines need."""

import httpx

# Engines that are killed and started again leave no connection worth keeping.
CLIENT = httpx.Client(limits=httpx.Limits(max_keepalive_connections=0), trust_env=False)
