"""The laboratory: emulated engines, the simulator, replays and measurements; nothing of it serves."""
