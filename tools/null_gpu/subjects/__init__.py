"""Programs that run under the null GPU, one process each, and print what they counted as JSON."""
