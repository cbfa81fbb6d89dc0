"""Metrics of the locks, through OpenTelemetry."""
