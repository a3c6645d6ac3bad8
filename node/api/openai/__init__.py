"""OpenAI's endpoints: what they take (`requests`), what they give (`objects`, `writers`), and where (`endpoints`)."""
