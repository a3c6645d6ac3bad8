"""The computation of a span of transformer blocks, and of the client's part of a model. May use `models`."""
