"""What a node tells whoever watches it: metrics in Prometheus' format, and OpenTelemetry traces of what is over.
Metrics are read from the node's own counts when asked for. So counting costs the node no more than adding numbers.

May use `api` and the rooms before it.
"""
