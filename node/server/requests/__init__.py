"""The requests that a server answers, sessions (`/petalnode/inference/1`, `/petalnode/push/1`) and batches
(`/petalnode/forward/1`, `/petalnode/backward/1`): admitted, bounded in memory, computed, signed for in receipts."""
