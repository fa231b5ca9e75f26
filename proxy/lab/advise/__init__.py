"""How many prefillers and decode ranks a load needs, from a running fleet or from a trace."""
