"""Fleet layouts (how many prefillers, how many decode ranks); this folder holds none yet."""
