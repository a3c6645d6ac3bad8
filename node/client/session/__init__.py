"""A session with attention caches on a chain of servers, any of which may die."""
