"""Every causal model that transformers knows, tiny: what a swarm says, and what transformers says (`make sweep`)."""
