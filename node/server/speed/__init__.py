"""How fast this machine computes and sends, measured and kept from run to run."""
