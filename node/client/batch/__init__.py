"""Batches: forward and backward passes without a cache, over chains of servers.

The way of one batch: `batch_client` plans it with `chains`, and `batch_pass` takes each micro-batch forward and back.
`batch_stream` sends it to one server and checks the answer and its receipt.

May use the top of `client` and the rooms before it; nothing of `session` and `api`.
"""
