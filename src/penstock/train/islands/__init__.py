"""Islands (DiLoCo): groups of ranks that train independently and average every few steps."""
