"""Trace replay over HTTP against any OpenAI-compatible endpoint."""
