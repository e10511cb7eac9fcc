"""Chat: templates, tools, reasoning, response formats."""
