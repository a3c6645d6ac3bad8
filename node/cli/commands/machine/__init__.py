"""Commands about petalnode on this machine: a service of it, and pages made from its commands."""
