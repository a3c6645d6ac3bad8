"""Forward and backward passes over chains of servers, without caches."""
