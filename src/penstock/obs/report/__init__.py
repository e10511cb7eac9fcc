"""Report of runs as one HTML page."""
