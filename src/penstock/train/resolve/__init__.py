"""From the text of a recipe to the values of a run: presets, starting weights, packing, length."""
