"""Routes of the console's API, one file per subject."""
