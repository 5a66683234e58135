"""Traces of requests through all processes, by OpenTelemetry; off, and nothing of it imported, without an endpoint."""
