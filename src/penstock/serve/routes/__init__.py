"""One file per group of addresses; `app.py` knows them all, they do not know each other."""
