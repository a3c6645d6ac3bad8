"""WebRTC-direct, by which a page that came by https reaches a server that has no domain."""
