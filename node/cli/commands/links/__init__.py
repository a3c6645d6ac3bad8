"""Commands that make a link into a swarm, and that follow one."""
