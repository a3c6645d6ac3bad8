"""Answers over the swarm, whatever endpoint asks: requests in one form, prompts, sessions that stay, grammars, tools,
and the events of which answers are made. Knows nothing of HTTP. May use the errors and fields of the API."""
