"""Metrics, spans and logs. The audit log is in `services`."""
