"""Programs that write and check this repository's own pages and figures."""
