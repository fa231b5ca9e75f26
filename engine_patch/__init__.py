"""Optional patches that make an engine report its steps; this folder holds none yet."""
