"""Files, and batches of requests that are answered when nobody else asks: `store` keeps them in a SQLite file, `runner`
answers them, `objects` and `endpoints` are OpenAI's /v1/files and /v1/batches."""
