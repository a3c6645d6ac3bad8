"""Anthropic's /v1/messages: what it takes (`requests`), what it gives (`writer`), and where (`endpoints`)."""
