"""Routes: one file per group of endpoints; they do not import each other, `app.py` imports them all."""
