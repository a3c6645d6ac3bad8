"""What a node tells whoever watches it: metrics in Prometheus' format, read from the node's own counts when they are
asked for, so that counting costs the node no more than adding numbers; and OpenTelemetry traces of what is over.

May use `api` and the rooms before it.
"""
