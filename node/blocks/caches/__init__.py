"""What sessions keep beside plain buffers of keys and values: states that a step replaces, and ragged attention."""
