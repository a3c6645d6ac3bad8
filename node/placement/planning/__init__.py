"""Plans for a fleet of machines before any of them runs, by the cost model that routing uses."""
