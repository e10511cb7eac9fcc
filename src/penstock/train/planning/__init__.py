"""Planning of a recipe: its memory, and the layout for the available machines."""
