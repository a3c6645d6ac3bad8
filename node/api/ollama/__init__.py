"""Ollama's endpoints for programs that know only those: what they take (`requests`), what they give (`writer`), and
where (`endpoints`)."""
