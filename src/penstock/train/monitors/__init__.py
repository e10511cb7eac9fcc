"""Monitors of a running job: watchdog, stragglers, hang reports, traces."""
