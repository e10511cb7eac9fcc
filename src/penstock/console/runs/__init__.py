"""Runs as the console reads them: discovery, table rows, columns, events."""
