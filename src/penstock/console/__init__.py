"""Web console: runs while they go on, and requests to them; reads the files that runs write."""
