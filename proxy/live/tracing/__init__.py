"""Traces of requests for an OpenTelemetry collector: spans, and their export by OTLP over HTTP."""
